"""A few cases of the campaign over layouts, its judgement and its draws."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if any(find_spec(library) is None for library in ("transformers", "peft")):
    pytest.skip("the extra 'test' is not installed", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))

from campaign import judge, reason, run
from layout_cases import draw
from layout_models import SUBJECTS
from layout_training import Trained
from processes import close_workers

from gemini.parallel.pipeline.orders import SCHEDULES

PROGRAMS = {"hybrid", "gemini", "zero", "ddp", "fsdp", "wrapper", "trainer"}


@pytest.fixture(autouse=True, scope="module")
def _workers_end() -> Iterator[None]:
    yield
    close_workers()


# Parts of sequences and then stages, from files; stages up and down; chunks that move, without a booster.
@pytest.mark.parametrize("seed", [31, 57, 61])
def test_a_drawn_layout_trains_as_one_process(seed: int) -> None:
    end = run(draw(seed))
    assert end.kind == "equal", f"{end.case}\n{end.said}"


def test_campaigns_draw_every_model_program_and_schedule_and_a_seed_draws_one_case() -> None:
    cases = [draw(seed) for seed in range(500)]
    layouts = [layout for case in cases for layout in case.layouts]
    assert cases == [draw(seed) for seed in range(500)]
    assert {case.subject for case in cases} == SUBJECTS.keys()
    assert {layout.program for layout in layouts} == PROGRAMS
    assert {dict(layout.options).get("pp_style") for layout in layouts} - {None} == set(SCHEDULES)
    assert {1, 2, 3, 4} == {case.world for case in cases}


def test_other_numbers_a_missing_step_and_a_refusal_of_some_ranks_are_no_equal_ends() -> None:
    case = replace(draw(31), precision="")
    want = Trained([2.0, 1.5], [1.0, 1.0], [1.9], [[3, 4]], {"w": torch.ones(2)})
    assert judge(case, want, [want, replace(want, weights={})])[0] == "equal"
    others = [
        replace(want, losses=[2.0, 1.5001]),
        replace(want, losses=[2.0]),
        replace(want, losses=[2.0, float("nan")]),
        replace(want, norms=[1.0, 1.0001]),
        replace(want, evaluated=[]),
        replace(want, generated=[[3, 5]]),
        replace(want, weights={"w": torch.tensor([1.0, 1.0001])}),
    ]
    for other in others:
        assert judge(case, want, [want, other])[0] == "differs", other
    assert judge(case, want, [others[3]], {"norm": 2e-5})[0] == "equal"
    refused = replace(want, refused="ConfigError: 4 heads for 3 ranks")
    heard = replace(want, refused="StateError: rank 0 failed")
    assert judge(case, want, [refused, heard])[:2] == ("refused", refused.refused)
    assert judge(case, want, [refused, want])[0] == "raw"
    assert reason(refused.refused) == "ConfigError: N heads for N ranks"
