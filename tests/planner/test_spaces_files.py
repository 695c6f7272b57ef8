"""Galvatron's plan files: what is read is written again, what is uniform runs, the rest says why not."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_models import net, question, run_of

from gemini.errors import ConfigError
from gemini.parallel.booster.plugin.hybrid import HybridParallelPlugin
from gemini.parallel.plan import ParallelPlan
from gemini.planner.chunks import StageCapacity
from gemini.planner.search import Search
from gemini.planner.spaces.blocks import Blocks, layerwise_of
from gemini.planner.spaces.galvatron_files import GalvatronFile, exported
from gemini.planner.spaces.layerwise import LayerwisePlan, Strategy


def document(layers: int = 4, **changed: Any) -> dict[str, Any]:
    """Return a plan for stages of two ranks, as Galvatron writes it."""
    row = ",".join(["1"] * layers)
    zeros = ",".join(["0"] * layers)
    found = {
        "pp_deg": 2,
        "tp_sizes_enc": row,
        "tp_consecutive_flags": row,
        "dp_types_enc": zeros,
        "use_sp": zeros,
        "checkpoint": "1,0,1,0",
        "global_bsz": 8,
        "chunks": 2,
        "pp_division": "3,1",
        "pipeline_type": "pipedream_flush",
        "default_dp_type": "zero2",
        "vtp": 1,
        "vsp": 0,
        "embed_sdp": 0,
    }
    return {name: value for name, value in {**found, **changed}.items() if value is not None}


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    layers = draw(st.integers(1, 12))

    def row(*choices: int) -> str:
        return ",".join(str(draw(st.sampled_from(choices))) for _ in range(layers))

    pp = draw(st.integers(1, layers))
    cuts = [0, *sorted(draw(st.permutations(range(1, layers)))[: pp - 1]), layers]
    found: dict[str, Any] = {
        "pp_deg": pp,
        "tp_sizes_enc": row(1, 2, 4, 8),
        "tp_consecutive_flags": row(0, 1),
        "dp_types_enc": row(0, 1),
        "global_bsz": draw(st.integers(1, 1024)),
        "chunks": draw(st.integers(1, 64)),
        "pipeline_type": draw(st.sampled_from(["gpipe", "pipedream_flush"])),
        "default_dp_type": draw(st.sampled_from(["ddp", "zero2", "zero3"])),
    }
    more = {
        "use_sp": row(0, 1),
        "checkpoint": row(0, 1),
        "pp_division": ",".join(str(b - a) for a, b in pairwise(cuts)),
        "vtp": draw(st.sampled_from([1, 2, 8])),
        "vsp": draw(st.integers(0, 1)),
        "embed_sdp": draw(st.integers(0, 1)),
    }
    return found | {name: value for name, value in more.items() if draw(st.booleans())}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(documents())
def test_what_is_read_is_what_is_written(found: dict[str, Any]) -> None:
    assert GalvatronFile.from_json(found).to_json() == found


def test_a_file_is_saved_as_it_was_read(tmp_path: Path) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    one.write_text(json.dumps(document()))
    GalvatronFile.load(one).save(two)
    assert json.loads(two.read_text()) == document()


HOSTILE: list[dict[str, Any]] = [
    document(pp_deg=float("nan")),
    document(pp_deg=True),
    document(pp_deg=0),
    document(pp_deg=2**80),
    document(pp_deg=5, pp_division=None),
    document(tp_sizes_enc="1,1"),
    document(tp_sizes_enc=""),
    document(tp_sizes_enc="1,,1,1"),
    document(tp_sizes_enc="1,1,1,0"),
    document(tp_sizes_enc="1,1,1,-2"),
    document(tp_sizes_enc="1,1,1,01"),
    document(tp_sizes_enc="1, 1,1,1"),
    document(tp_sizes_enc="1,1,1," + "9" * 5000),
    document(tp_sizes_enc="1," * 10**5),
    document(tp_sizes_enc=[1, 1, 1, 1]),
    document(dp_types_enc="0,0,0,2"),
    document(checkpoint="1,0,1"),
    document(pp_division="2,1"),
    document(pp_division="2,1,1"),
    document(pp_division="4,0"),
    document(pipeline_type="zigzag"),
    document(pipeline_type=["gpipe"]),
    document(default_dp_type=7),
    document(global_bsz="8"),
    document(chunks=1.5),
    document(chunks=None),
    document(vsp=2),
    document(unknown=1),
    {},
]


@pytest.mark.parametrize("found", HOSTILE, ids=range(len(HOSTILE)))
def test_no_hostile_file_is_taken(found: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(found))
    with pytest.raises(ConfigError) as caught:
        GalvatronFile.load(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "text", ["", "[]", "NaN", "3", "[" * 5000, '{"pp_deg": 1, "pp_deg": 2}', "\udcff", '{"a\\nb": 1}']
)
def test_text_that_is_no_plan_is_refused_in_a_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        GalvatronFile.load(path)
    assert "\n" not in str(caught.value)
    for other in (tmp_path, tmp_path / "none.json"):
        with pytest.raises(ConfigError):
            GalvatronFile.load(other)


def test_mutations_of_a_plan_are_read_or_refused() -> None:
    draw = random.Random(0)
    values = [None, True, -1, 0, 2**70, 1e300, "", "1", "1,2", "x", [], {}, [[1]], float("inf")]
    for _ in range(500):
        found = document()
        found[draw.choice([*found, "cp_sizes_enc", "vcp"])] = draw.choice(values)
        try:
            read = GalvatronFile.from_json(found)
        except ConfigError:
            continue
        assert read.to_json() == {name: value for name, value in found.items() if value is not None}


# -- plans that run, and others ------------------------------------------------------------------------------


def test_a_uniform_file_becomes_a_plan_that_a_plugin_takes() -> None:
    model = net(32, 32, 32, 32)
    blocks = Blocks.of(Search(model, run_of, question()), StageCapacity(2**30))
    plan = blocks.runnable(GalvatronFile.from_json(document()).layerwise(4), model, "fp32")
    layout = plan.layout
    assert (layout.dp, layout.pp, layout.tp, plan.zero_stage) == (2, 2, 1, 2)
    assert (plan.num_microbatches, plan.microbatch_size, plan.schedule) == (2, 2, "1f1b")
    assert plan.begins == ("blocks.3",)
    assert plan.recompute == ("blocks.0", "blocks.2")
    assert ParallelPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    HybridParallelPlugin(plan=plan)
    plan.check(model, 4)


@pytest.mark.parametrize(
    ("changed", "layout"),
    [
        ({"tp_sizes_enc": "2,2,2,2", "vtp": 2}, (2, 1, 1)),
        ({"tp_sizes_enc": "2,2,2,2", "vtp": 2, "use_sp": "1,1,1,1", "vsp": 1}, (1, 2, 1)),
        ({"dp_types_enc": "1,1,1,1", "embed_sdp": 1}, (1, 1, 2)),
        ({"pipeline_type": "gpipe", "default_dp_type": "ddp"}, (1, 1, 2)),
    ],
)
def test_kinds_of_parallelism_come_over_and_go_back(changed: dict[str, Any], layout: tuple[int, ...]) -> None:
    file = GalvatronFile.from_json(document(**changed))
    plan = file.layerwise(4)
    assert not file.not_runnable(4)
    found = plan.layout()
    assert (found.tp, found.sp, found.dp) == layout
    back = exported(plan)
    assert back.layerwise(4) == plan
    if plan.strategies[0].copies > 1 and 1 not in file.dp_types_enc:
        assert back.to_json() == file.to_json()


MIXED = [
    ({"tp_sizes_enc": "2,1,1,1"}, "tp must be one, and is 2 in block 0, 1 in blocks 1 to 3"),
    ({"dp_types_enc": "1,1,0,0"}, "the ZeRO stage must be one, and is ZeRO 3 in blocks 0 to 1, ZeRO 2 in"),
    ({"vtp": 2}, "tp must be one, and is 1 in blocks 0 to 3, 2 before the blocks, 2 behind the blocks"),
    ({"embed_sdp": 1}, "ZeRO 3 before the blocks"),
    ({"global_bsz": 6, "chunks": 4}, "6 samples over dp 2 do not divide into 4 micro-batches"),
]


@pytest.mark.parametrize(("changed", "reason"), MIXED)
def test_what_would_have_to_be_uniform_is_said(changed: dict[str, Any], reason: str) -> None:
    file = GalvatronFile.from_json(document(**changed))
    assert any(reason in each for each in file.not_runnable(4))
    with pytest.raises(ConfigError, match="does not run"):
        file.layerwise(4).layout()


def test_ranks_apart_context_parallelism_and_odd_ranks_are_no_plans_here() -> None:
    apart = document(tp_sizes_enc="2,2,2,2", vtp=2, tp_consecutive_flags="0,1,1,1")
    assert "neighbours" in GalvatronFile.from_json(apart).not_runnable(4)[0]
    for changed, ranks in (({}, 3), ({"cp_sizes_enc": "2,1,1,1"}, 4), ({"tp_sizes_enc": "4,4,4,4"}, 4)):
        with pytest.raises(ConfigError):
            GalvatronFile.from_json(document(**changed)).layerwise(ranks)


def test_a_plan_that_is_not_uniform_has_a_price() -> None:
    blocks = Blocks.of(Search(net(32, 32, 32, 32), run_of, question()), StageCapacity(2**30))
    file = GalvatronFile.from_json(document(dp_types_enc="1,1,0,0"))
    mixed = blocks.priced(file.layerwise(4))
    plain = blocks.priced(GalvatronFile.from_json(document()).layerwise(4))
    assert mixed.step_seconds > plain.step_seconds  # ZeRO 3 gathers
    assert mixed.ranks[0].device_bytes < plain.ranks[0].device_bytes
    assert len(mixed.ranks) == 2
    small = Blocks.of(Search(net(32, 32), run_of, question()), StageCapacity(2**30))
    with pytest.raises(ConfigError, match="4 layers, and the model has 2 blocks"):
        small.priced(file.layerwise(4))


def test_what_galvatron_does_not_have_is_not_exported() -> None:
    one = Strategy(dp=2, zero=2)
    plan = LayerwisePlan(8, 2, (one, one), (one, one), (2,))
    assert exported(plan).default_dp_type == "zero2"
    zero1, both = replace(one, zero=1), Strategy(tp=2, sp=2)
    for each in (zero1, both):
        with pytest.raises(ConfigError):
            exported(replace(plan, strategies=(each, each), outside=(each, each)))
    with pytest.raises(ConfigError, match="one kind"):
        exported(replace(plan, strategies=(one, replace(one, zero=0))))


def test_a_plan_of_this_project_goes_to_galvatron_and_back() -> None:
    model = net(32, 32, 32, 32)
    blocks = Blocks.of(Search(model, run_of, question()), StageCapacity(2**30))
    plan = blocks.runnable(GalvatronFile.from_json(document()).layerwise(4), model, "fp32")
    wise = layerwise_of(plan, blocks.names)
    assert exported(wise).to_json() == document()
    assert blocks.runnable(exported(wise).layerwise(4), model, "fp32") == plan
