"""Two cases of the campaign over plans, its judgement and its draws."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

if any(find_spec(library) is None for library in ("transformers", "peft")):
    pytest.skip("the extra 'test' is not installed", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
sys.path.insert(0, str(Path(__file__).parents[1] / "planner"))

from layout_models import SUBJECTS
from plan_campaign import Ran, draw, held, relaxed, run, too_much
from plan_samples import MIB, plan_for
from processes import close_workers

from gemini.planner.chunks import StageCapacity


@pytest.fixture(autouse=True, scope="module")
def _workers_end() -> Iterator[None]:
    yield
    close_workers()


# Experts under GeminiTrainer; an encoder-decoder in two stages a rank, half of its blocks recompute.
@pytest.mark.dear("a search rehearses models, and ranks train what it finds")
@pytest.mark.parametrize("seed", [7, 70])
def test_a_plan_that_was_searched_trains_as_one_process_and_holds_what_it_said(seed: int) -> None:
    end = run(draw(seed))
    assert end.kind == "equal", f"{end.case}\n{end.said}"


def test_campaigns_draw_every_model_and_tier_and_a_seed_draws_one_case() -> None:
    cases = [draw(seed) for seed in range(300)]
    assert cases == [draw(seed) for seed in range(300)]
    assert {case.trained.subject for case in cases} == SUBJECTS.keys()
    assert {case.below for case in cases} == {(), ("host",), ("disk",), ("host", "disk")}
    assert {1, 2, 3, 4} == {case.trained.world for case in cases}


def test_more_than_was_planned_is_found() -> None:
    plan = plan_for()  # 8 MiB of DEVICE, 16 MiB of HOST
    fits = Ran(device_bytes=[9 * MIB, 8 * MIB], lower_bytes={"host": 16 * MIB})
    assert not list(too_much(plan, [fits]))
    assert held(plan, [fits]) == {"above": 0.0, "below": 0.0, "first": 0.125}
    for more in (
        Ran(device_bytes=[0, 9 * MIB]),
        Ran(device_bytes=[0, MIB], lower_bytes={"host": 17 * MIB}),
        Ran(device_bytes=[0, MIB], model_bytes={"state_bytes": 3 * MIB + 65}),
    ):
        assert len(list(too_much(plan, [fits, more]))) == 1


def test_a_refusal_that_names_no_budget_is_found() -> None:
    text = "nothing fits. For each rank device_bytes 1.5MiB and disk_bytes 5B would do"
    assert relaxed(StageCapacity(1, 2, 3), text) == StageCapacity(3 * MIB // 2, 2, 5)
    with pytest.raises(AssertionError, match="names no budget"):
        relaxed(StageCapacity(1, 2, 3), "nothing fits")
