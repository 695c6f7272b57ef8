"""``gemini benchmark``: which modes go over so many ranks, and what is found of each."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gemini.cli.main import main
from gemini.parallel.tensor.grid import places_of
from gemini.parallel.tensor.mode_speeds import Benchmark, feasible_layouts

FEASIBLE = {
    1: [(None, None)],
    2: [("1d", None)],
    4: [("1d", None), ("2d", None)],
    6: [("1d", None)],
    8: [("1d", None), ("2.5d", 2), ("3d", None)],
    16: [("1d", None), ("2d", None), ("2.5d", 4)],
    64: [("1d", None), ("2d", None), ("2.5d", 16), ("2.5d", 4), ("3d", None)],
}


@pytest.mark.parametrize("ranks", FEASIBLE)
def test_every_mode_that_goes_is_tried(ranks: int) -> None:
    layouts = feasible_layouts(ranks)
    assert [(layout.mode, layout.depth) for layout in layouts] == FEASIBLE[ranks]
    assert [places_of(layout).count for layout in layouts] == [ranks] * len(layouts)


def bench(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    small = ["--batch", "4", "--length", "3", "--layers", "1", "--steps", "1", "--device", "cpu"]
    code = main(["benchmark", *small, *options])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.dear("each mode of tensor parallelism on its ranks")
def test_modes_are_measured_and_one_that_does_not_divide_says_why(capsys: Any) -> None:
    code, out, _ = bench(capsys, "--gpus", "4", "--hidden", "7", "--json")
    facts = json.loads(out)
    one, two = facts["results"]
    assert (code, facts["backend"], facts["input"]) == (0, "gloo", [4, 3, 7])
    assert one["mode"] == "1d"
    assert one["calls"] == 2  # an all-reduce forward, another one backward
    assert one["sent_bytes"] == 2 * 2 * 3 * (4 * 3 * 7 * 4) // 4
    assert one["parameter_bytes"] == 4 * (7 * 7 + 7 + 7 * 7 + 7)
    assert min(one["forward_s"], one["backward_s"], one["kept_bytes"]) > 0
    assert two["refused"].startswith("in_features 7 is not divisible by 2 ranks")


def test_table_has_a_row_for_each_mode(capsys: Any) -> None:
    code, out, _ = bench(capsys, "--gpus", "1", "--hidden", "4")
    assert code == 0
    assert "one process" in out


def test_what_cannot_be_measured_is_an_error_of_one_line(capsys: Any) -> None:
    assert bench(capsys, "--gpus", "0") == (2, "", "gemini: error: ranks is 0; it must be 1 or more\n")
    code, _, error = bench(capsys, "--gpus", "2", "--device", "tpu")
    assert code == 2
    assert "device 'tpu' for 2 ranks" in error
    with pytest.raises(ValueError, match="warmup is -1"):
        Benchmark(2, warmup=-1)
