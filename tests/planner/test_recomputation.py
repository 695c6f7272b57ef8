"""What groups of blocks hold is what was predicted, when they run."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from planner_models import machine, net, run_of

from gemini.forecast.meter import Meter, OperationCosts
from gemini.planner.recomputation import Groups, Held, again, alone, groups_of, rotor_of, under_way
from gemini.planner.records import CutModel, Part
from gemini.planner.rotor import blocks_of
from gemini.planner.segment_costs import SegmentCosts, Speeds
from gemini.runtime.activation.recomputed_blocks import recompute_blocks

INNER, SAMPLES = (32, 64, 16, 64, 32, 64), 8
GROUPS: dict[str, Groups] = {
    "none": (),
    "single": alone((1, 2, 5)),
    "all": alone(range(1, 7)),
    "pairs": ((1, 2), (3, 4), (5, 6)),
    "half": ((1, 2, 3),),
    "nested": (((1, (2, 3), 4), 5, 6),),
    "twice": (((1, 2), (3, 4), 5),),
}


def figures() -> tuple[SegmentCosts, ...]:
    speeds = Speeds(machine(), OperationCosts(machine()))
    return speeds.segment_costs(CutModel(net(*INNER), Part()).record(run_of(SAMPLES)))


def named(group: object) -> object:
    return f"blocks.{group - 1}" if isinstance(group, int) else tuple(map(named, group))  # type: ignore[call-overload]


def measured(groups: Groups) -> int:
    """Return the most non-model bytes of a step that runs, forward and backward, with gradients that go."""
    model = net(*INNER)
    recompute_blocks(model, [named(each) for each in groups])  # type: ignore[misc]
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None))
    with torch.device("meta"), Meter() as meter:
        meter.open_period()
        run_of(SAMPLES)(model, None).backward()
    return max(period.peak_bytes for period in meter.periods)


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_a_step_holds_no_more_than_predicted_and_nearly_as_much(groups: Groups) -> None:
    own = figures()
    predicted, found = Held(own, groups).most(0, len(own)), measured(groups)
    assert found <= predicted
    assert found >= 0.7 * predicted


def test_groups_that_fit_a_budget_hold_no_more_when_they_run() -> None:
    own = figures()
    rotor = rotor_of(own, 0, len(own))
    whole = int(Held(own, ()).most(0, len(own)))
    seen = set()
    for budget in range(whole // 3, whole + 1, whole // 8):
        found = rotor.spread(budget, 0)
        if found is None:
            continue
        groups = tuple(groups_of(found.items, 0))
        assert measured(groups) <= budget
        seen.add(groups)
        more = sum(count * own[at].forward_seconds for at, count in again(groups).items())
        assert found.seconds == pytest.approx(
            more + sum(each.forward_seconds + each.backward_seconds for each in own)
        )
    assert len(seen) > 2
    most = rotor.spread(2 * whole, 0)
    assert most is not None
    assert not list(groups_of(most.items, 0))


def test_what_runs_again_is_counted_once_for_each_group_around_it() -> None:
    assert again(((1, (2, (3,)), 4), (6,))) == {1: 1, 2: 2, 3: 3, 4: 1, 6: 1}
    assert blocks_of((1, (2, (3,)), 4)) == (1, 2, 3, 4)
    kept = partial(Held(figures(), ((1, 2),)).kept_of)
    assert kept(2) == 0
    assert kept(1) == figures()[1].input_bytes


def test_between_the_halves_of_backward_what_ran_again_and_gradients_of_outputs_are_held() -> None:
    own = figures()
    tokens = SAMPLES * 8
    outputs = [4 * tokens * (inner + 16) for inner in INNER]
    assert [each.output_bytes for each in own[1:-1]] == outputs
    assert Held(own, ()).between_halves(1, 3) == sum(outputs[:2])
    again_bytes = own[1].kept_bytes - own[1].input_bytes
    assert Held(own, alone((1,))).between_halves(1, 3) == again_bytes + sum(outputs[:2])
    moments = under_way(("zbv", 2, 4, 2), 1)
    assert any(sum(each.halves) for each in moments)
    assert not any(sum(each.halves) or each.is_half for each in under_way(("1f1b", 2, 4, 1), 0))
