"""``gemini bench placement``: its cases run, and its verdicts follow from its figures."""

from __future__ import annotations

import json

import pytest
from pairs import first

from gemini.cli.main import main
from gemini.memstats import Trace
from gemini.placement.problem import Iteration
from gemini_bench.placement import CASES
from gemini_bench.placement_search import transformer
from gemini_bench.placement_traces import TRACES, gpu_cpu


@pytest.mark.dear("one real run of a case")
@pytest.mark.parametrize(
    "case", first(["overlap", "exact", "plan-time", "routings", "predicted", "activations"], 4)
)
def test_a_quick_run_measures_every_row_of_a_case(capsys, tmp_path, case):
    arguments = ["bench", "placement", "--quick", "--json", "--only", case, "--disk-dir", str(tmp_path)]
    assert main(arguments) == 0
    rows = json.loads(capsys.readouterr().out)["cases"][case]["rows"]
    assert rows
    assert all(row["value"] == row["value"] for row in rows)  # not NaN
    assert not list(tmp_path.iterdir())


def test_an_unknown_case_is_refused_with_the_known_ones(capsys):
    assert main(["bench", "placement", "--only", "speed"]) == 2
    error = capsys.readouterr().err
    assert all(case in error for case in CASES)


def test_the_iteration_to_plan_has_a_thousand_chunks_and_moments():
    iteration = transformer(200)
    assert (len(iteration.chunk_bytes), iteration.num_moments) == (1000, 1000)


@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_computing_is_scaled_to_the_transfer_of_the_model_data(ratio):
    iteration = Iteration.of_trace(Trace.load(TRACES / "vit.json"), overlap=True)
    scaled, machine = gpu_cpu(iteration, 0.3, ratio)
    carried = iteration.total_bytes / machine.speed("h2d")[0]
    assert carried / sum(scaled.seconds) == pytest.approx(ratio)
