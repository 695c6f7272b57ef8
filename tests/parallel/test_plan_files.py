"""ParallelPlan: what is loaded is what was saved, and nothing else is loaded."""

from __future__ import annotations

import json
import math
import os
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mutants import MUTANTS, SEED, mutate
from plan_samples import plan_for
from torch import nn

from gemini import ConfigError
from gemini.parallel import HybridParallelPlugin, Layout, ParallelPlan, fingerprint
from gemini.parallel.plan import LeftOut, PlanBudgets, Prediction, RankPrediction, RunnerUp

WHOLE = st.integers(0, 2**63 - 1)
BUDGET = st.integers(0, 2**62 - 1)
SECONDS = st.floats(0, 1e12) | st.integers(0, 10**12)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
SCHEDULES = {"1f1b": (1, 1), "gpipe": (1, 1), "interleaved": (1, 3), "zbv": (2, 2)}


@st.composite
def plans(draw: st.DrawFn) -> ParallelPlan:
    layout = Layout(*draw(st.tuples(*[st.integers(1, 3)] * 4)))
    schedule = draw(st.sampled_from(sorted(SCHEDULES)))
    each = draw(st.integers(*SCHEDULES[schedule])) if layout.pp > 1 else 1
    stages = layout.pp * each
    names = st.lists(TEXT, unique=True)
    ranks = st.builds(RankPrediction, *[WHOLE] * 7)
    return ParallelPlan(
        layout,
        draw(st.sampled_from(["ulysses", "ring"])),
        schedule,
        each,
        draw(st.integers(1, 2**63 - 1)),
        draw(st.integers(1, 2**63 - 1)),
        tuple(draw(st.lists(TEXT, unique=True, min_size=stages - 1, max_size=stages - 1))),
        draw(st.integers(0, 3)),
        draw(st.builds(PlanBudgets, st.none() | BUDGET, BUDGET, BUDGET)),
        tuple(draw(names)),
        draw(st.sampled_from(["fp32", "bf16", "fp16"])),
        Prediction(
            draw(SECONDS),
            draw(st.dictionaries(TEXT, SECONDS)),
            tuple(draw(st.lists(ranks, min_size=layout.pp, max_size=layout.pp))),
            draw(st.dictionaries(TEXT, WHOLE)),
        ),
        tuple(draw(st.lists(st.builds(RunnerUp, TEXT, SECONDS, TEXT)))),
        tuple(draw(st.lists(st.builds(LeftOut, TEXT, TEXT)))),
        draw(TEXT),
        draw(TEXT),
        draw(TEXT),
    )


@given(plans())
def test_a_plan_that_is_loaded_is_the_plan_that_was_saved(
    tmp_path_factory: pytest.TempPathFactory, plan: ParallelPlan
) -> None:
    path = tmp_path_factory.getbasetemp() / "a plan.json"
    plan.save(path)
    assert ParallelPlan.load(path) == plan
    assert ParallelPlan.load(path).diff(plan) == ""
    assert all(line.isprintable() for line in plan.explain().splitlines())


def document(**changed: Any) -> dict[str, Any]:
    return {"format": "gemini-plan-1", **plan_for(layout=Layout(pp=2), begins=("b",)).to_json(), **changed}


def with_rank(**changed: Any) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(document()))
    made["predicted"]["ranks"][1] |= changed
    return made


TEXTS = {
    "[" * 100_000: "nested too deeply",
    json.dumps(document()).replace('"sp_mode"', '"dtype": "fp32", "sp_mode"', 1): "'dtype' is given twice",
    json.dumps(document(num_microbatches=9)).replace("9", "9" * 5000, 1): "digits",
    "\ufeff": "Expecting value",
    json.dumps(with_rank(host_bytes=math.nan)): r"predicted.ranks\[1\].host_bytes is nan",
    json.dumps([]): "is not a gemini-plan-1 file",
    json.dumps(document(format="gemini-plan-2")): "newer version of gemini-runtime",
    json.dumps(document(format=1)): "is not a gemini-plan-1 file",
    "\xff": "no text in UTF-8",
}


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_what_is_no_plan_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(text.encode("latin-1") if text == "\xff" else text.encode())
    with pytest.raises(ConfigError, match=TEXTS[text]) as caught:
        ParallelPlan.load(path)
    assert str(caught.value).isprintable()
    assert str(path) in str(caught.value)


CHANGES = [
    ({"microbatch_size": 0}, "microbatch_size is 0; it must be a whole number from 1"),
    ({"microbatch_size": True}, "microbatch_size is True"),
    ({"microbatch_size": 2.0}, "microbatch_size is 2.0"),
    ({"num_microbatches": 2**63}, "num_microbatches is 9223372036854775808"),
    ({"num_microbatches": 10**400}, "a number of 1329 bits"),
    ({"zero_stage": 4}, "zero_stage is 4; it must be one of 0, 1, 2, 3"),
    ({"sp_mode": "both"}, "sp_mode is 'both'"),
    ({"dtype": "fp8"}, "dtype is 'fp8'"),
    ({"schedule": "x"}, "no schedule 'x'"),
    ({"stages_per_rank": 2}, "1f1b needs one stage on each rank, not 2"),
    ({"stages_per_rank": 2**62}, "stages"),
    ({"begins": ["b", "c"]}, "begins has 2 names, but 2 stages need 1"),
    ({"begins": "b"}, "begins is 'b'; it must be a list"),
    ({"begins": [["b"]]}, r"begins\[0\] is \['b'\]; it must be text"),
    ({"begins": ["\ud800"]}, "surrogate"),
    ({"recompute": ["b", "b"]}, "recompute names a block twice"),
    ({"layout": {"dp": 1, "pp": 2, "sp": 1}}, "layout.tp is missing"),
    ({"layout": {"dp": 1, "pp": 2, "sp": 1, "tp": 1, "ep": 1}}, "layout: it has the unknown field 'ep'"),
    ({"layout": {"dp": 0, "pp": 2, "sp": 1, "tp": 1}}, "layout.dp is 0"),
    ({"layout": {"dp": 2**20, "pp": 2, "sp": 1, "tp": 1}}, "layout has more than"),
    ({"layout": {"dp": 1, "pp": 1, "sp": 1, "tp": 1}, "begins": []}, "predicted.ranks has 2 entries, but"),
    ({"layout": 4}, "layout: it is 4, but must be an object"),
    ({"budgets": {"device_bytes": -1, "host_bytes": 0, "disk_bytes": 0}}, "budgets.device_bytes is -1"),
    (
        {"budgets": {"device_bytes": 1, "host_bytes": 0, "disk_bytes": 2**62}},
        "budgets.disk_bytes is 4611686018427387904 bytes; no machine has that much",
    ),
    ({"budgets": None}, "budgets: it is None"),
    ({"predicted": []}, "predicted: it is"),
    ({"runners_up": [{"settings": "x", "step_seconds": -1, "why": ""}]}, r"runners_up\[0\].step_seconds"),
    ({"left_out": [{"settings": "x"}]}, r"left_out\[0\].why is missing"),
    ({"model": 3}, "model is 3; it must be text"),
    ({"surprise": 3}, "unknown field 'surprise'"),
    ({"version": "99.0", "surprise": 3}, "gemini-runtime 99.0 wrote it"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "said"), CHANGES, ids=[str(each[1])[:40] for each in CHANGES])
def test_a_field_that_no_plan_can_have_is_named(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document(**changed)))
    with pytest.raises(ConfigError, match=said) as caught:
        ParallelPlan.load(path)
    assert str(caught.value).isprintable()


def test_groups_and_budgets_of_stages_are_kept_and_files_without_them_are_read(tmp_path: Path) -> None:
    plain = plan_for(layout=Layout(pp=2), begins=("2",), recompute=("0",))
    assert not {"groups", "stage_budgets", "activation_offload"} & plain.to_json().keys()
    assert ParallelPlan.from_json(plain.to_json()) == plain
    more = replace(
        plain,
        groups=(("1", ("2", "3")), (("4", "5"), "6")),
        stage_budgets=(PlanBudgets(64, 32), PlanBudgets(None)),
        activation_offload="auto",
    )
    more.save(tmp_path / "plan.json")
    found = ParallelPlan.load(tmp_path / "plan.json")
    assert found == more
    assert found.plugin_options()["recompute"] == ("0", ("1", ("2", "3")), (("4", "5"), "6"))
    assert found.budgets_of(0) == PlanBudgets(64, 32)
    assert "(1 (2 3))" in found.explain()
    assert "activations may leave DEVICE when memory is short" in found.explain()
    offloads = [replace(found, zero_stage=3).budget_options(rank)["activation_offload"] for rank in (0, 1)]
    assert offloads == ["auto", False]
    assert "budgets of rank 0 along pp: DEVICE 64 B, HOST 32 B" in found.explain()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"groups": ["1"]}, "groups[0] is '1'"),
        ({"groups": [["1", 2]]}, "groups[0][1] is 2"),
        ({"groups": [[]]}, "groups[0] is []"),
        ({"groups": [["0", "1"]]}, "recompute names a block twice"),
        ({"activation_offload": "all"}, "activation_offload is 'all'; it must be one of None, auto"),
        ({"stage_budgets": [{"device_bytes": 1, "host_bytes": 0, "disk_bytes": 0}]}, "stage_budgets has 1"),
    ],
)
def test_groups_and_budgets_that_no_plan_can_have_are_named(changed: dict[str, Any], said: str) -> None:
    plain = plan_for(layout=Layout(pp=2), begins=("2",), recompute=("0",))
    with pytest.raises(ConfigError, match=re.escape(said)):
        ParallelPlan.from_json({**plain.to_json(), **changed})


def test_a_changed_plan_is_refused_or_one(tmp_path: Path) -> None:
    path, whole, loaded = tmp_path / "plan.json", json.dumps(document()), 0
    for number in range(MUTANTS // 8):
        changed = json.loads(whole)
        mutate(changed, random.Random(f"{SEED} plan {number}"))
        path.write_text(json.dumps(changed))
        try:
            plan = ParallelPlan.load(path)
        except ConfigError:
            continue
        loaded += 1
        plan.save(path)
        assert ParallelPlan.load(path) == plan
        assert plan.explain()
    assert loaded


@pytest.mark.parametrize("there", ["nothing", "directory", "fifo", "large"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, there: str) -> None:
    path = tmp_path / "plan.json"
    if there == "directory":
        path.mkdir()
    elif there == "fifo":
        os.mkfifo(path)
    elif there == "large":
        path.touch()
        os.truncate(path, 2**40)
    with pytest.raises(ConfigError, match=r"cannot read the plan .*plan.json"):
        ParallelPlan.load(path)
    with pytest.raises(ConfigError, match="cannot read the plan"):
        HybridParallelPlugin(plan=path)


def test_a_plan_too_large_for_its_file_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(ConfigError, match=r"at most 4\.0 MiB"):
        plan_for(machine="x" * 2**22).save(path)
    assert not path.exists()


# -- what a plan says ----------------------------------------------------------------------------------


def test_an_explanation_says_what_why_and_what_else() -> None:
    plan = plan_for(layout=Layout(dp=2, pp=2), begins=("b.1",), recompute=("b.0", "b.1"))
    said = plan.explain()
    for part in (
        "Plan for 4 ranks: tp 1, pp 2, sp 1, dp 2; ZeRO 3; fp32",
        "4 micro-batches of 2 samples on each rank along dp, 16 samples a step",
        "begin with: b.1",
        "recomputed in backward: b.0, b.1",
        "DEVICE 64.0 MiB, HOST 16.0 MiB, DISK 0 B",
        "the next best, tp 2, takes 1.75 s (+16.7%)",
        "compute: 1 s (67%)",
        "rank 1: DEVICE 8.0 MiB",
        "a step: pp 4.0 KiB",
        "tp 2: 1.75 s a step; sums over tp take 0.3 s",
        "sp 2: the model has one head",
    ):
        assert part in said


def test_a_difference_names_the_field_and_both_values() -> None:
    plan = plan_for()
    other = replace(plan, zero_stage=2, budgets=PlanBudgets(None, 3, 0), recompute=("b.0",))
    assert plan.diff(other).splitlines() == [
        "zero_stage: 3 -> 2",
        "budgets.device_bytes: 67108864 -> None",
        "budgets.host_bytes: 16777216 -> 3",
        "recompute: [] -> ['b.0']",
    ]


# -- which model ---------------------------------------------------------------------------------------


def two_layers(width: int = 4, *, device: str = "cpu") -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width, device=device) for _ in range(2)))


def test_a_fingerprint_is_of_what_parameters_are_and_not_of_their_values() -> None:
    first = fingerprint(two_layers())
    assert first == fingerprint(two_layers()) == fingerprint(two_layers(device="meta"))
    frozen, tied = two_layers(), two_layers()
    frozen[0].weight.requires_grad_(False)
    tied[0].weight = tied[1].weight
    others = [frozen, tied, two_layers(5), two_layers().to(torch.bfloat16), two_layers()[:1]]
    assert len({first, *map(fingerprint, others)}) == 6


def test_all_that_does_not_fit_is_named_at_once() -> None:
    plan = plan_for(layout=Layout(pp=2), begins=("h.1",), recompute=("0",), version="99.1")
    with pytest.raises(ConfigError) as caught:
        plan.check(two_layers(), 3)
    for part in ("for 2 ranks", "there are 3", "begin with 'h.1'", "fingerprint", "gemini-runtime 99.1"):
        assert part in str(caught.value)
    assert "recomputes" not in str(caught.value)
    plan_for(two_layers()).check(two_layers(), 1)


def with_adapters() -> nn.Module:
    """Return :func:`two_layers` with the names that PEFT gives them."""
    adapted, layers = nn.Module(), two_layers().requires_grad_(False)
    adapted.base_model = nn.Module()
    adapted.base_model.model = nn.Sequential()
    for layer in layers:
        part = nn.Module()
        part.base_layer, part.lora_A = layer, nn.Linear(4, 2)
        adapted.base_model.model.append(part)
    return adapted


@pytest.mark.parametrize(
    ("here", "said"),
    [
        (lambda: two_layers().bfloat16(), "same model in float32, and this one is in bfloat16"),
        (with_adapters, "same model without adapters, and this one has some"),
        (lambda: with_adapters().bfloat16(), "without adapters, .* in float32, and this one is in bfloat16"),
        (lambda: two_layers().requires_grad_(False), "all parameters trained, and of this one 0 of 4 train"),
        (lambda: two_layers(5), "it is of a model with the fingerprint"),
    ],
    ids=range(5),
)
def test_a_model_that_differs_by_types_or_adapters_is_refused_by_that(
    here: Callable[[], nn.Module], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_for(two_layers()).check(here(), 1)


# -- the plugin ----------------------------------------------------------------------------------------


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"tp_size": 1}, r"tp_size=1 \(the plan says 2\)"),
    ({"zero_stage": 2, "pp_style": "gpipe"}, r"zero_stage=2 .*, pp_style='gpipe'"),
    ({"device_bytes": "65MiB"}, "device_bytes='65MiB'"),
    ({"disk_bytes": "1MiB"}, "disk_bytes='1MiB'"),
    ({"mixed_precision": torch.bfloat16}, "mixed_precision=torch.bfloat16"),
    ({"recompute": ["x"]}, "recompute"),
    ({"costs": [1.0]}, "costs"),
    ({"split": "layers"}, "split='layers'"),
]


@pytest.mark.parametrize(("given_", "said"), CONTRADICTIONS, ids=[str(each[0]) for each in CONTRADICTIONS])
def test_a_keyword_that_contradicts_the_plan_is_refused_by_name(given_: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        HybridParallelPlugin(plan=plan_for(layout=Layout(tp=2)), **given_)


def test_keywords_that_say_the_same_or_something_else_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan_for(layout=Layout(pp=2), begins=("b",)).save(path)
    HybridParallelPlugin(
        pp_size=2, plan=path, device_bytes="64MiB", mixed_precision="fp32", split=["b"], max_norm=1.0
    )
    with pytest.raises(TypeError, match="'max_norms'"):
        HybridParallelPlugin(plan=path, max_norms=1.0)
    below = plan_for(zero_stage=1)
    assert "device_bytes" not in below.plugin_options()
    HybridParallelPlugin(plan=below)
