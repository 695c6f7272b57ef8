"""Converts the result of a search into a :class:`ParallelPlan`, which can run and be saved."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from torch import nn

from gemini.errors import OutOfBudgetError
from gemini.forecast.machine import MachineSpeeds
from gemini.parallel.plan import (
    LeftOut,
    ParallelPlan,
    PlanBudgets,
    Prediction,
    RankPrediction,
    RunnerUp,
    fingerprint,
)
from gemini.planner.chunks import StageCapacity
from gemini.planner.prices import Misfit, Price, RankPrice
from gemini.planner.rotor import Item
from gemini.planner.search import Found, Question
from gemini.runtime.activation.block_groups import Names
from gemini.system.config import format_bytes, format_enough

_HASH_DIGITS = 16


def plan_of(
    found: Found, question: Question, model: nn.Module, dtype: str, *, place: int = 0
) -> ParallelPlan:
    """Return the plan of the fastest result, or of the result at index ``place``.

    Raises:
        OutOfBudgetError: nothing fits. The message names the smallest budget that is enough.
    """
    if not found.prices:
        raise OutOfBudgetError(_relaxation(found, question))
    best = found.prices[place]
    others = [each for each in found.prices if each is not best]
    choice, capacity = best.combination, question.capacity
    blocks = found.blocks
    return ParallelPlan(
        layout=choice.layout,
        sp_mode=choice.sp_mode,
        schedule=choice.schedule,
        stages_per_rank=choice.stages_per_rank,
        num_microbatches=choice.num_microbatches,
        microbatch_size=choice.microbatch_size,
        begins=tuple(blocks[at] for at in best.begins),
        zero_stage=choice.zero_stage,
        budgets=_budgets(best, capacity),
        recompute=tuple(blocks[at] for at in best.recompute),
        dtype=dtype,
        predicted=Prediction(
            best.step_seconds,
            best.seconds,
            tuple(_rank(each, capacity) for each in best.ranks),
            best.sent_bytes,
        ),
        runners_up=tuple(
            RunnerUp(str(each.combination), each.step_seconds, _why_slower(each, best)) for each in others
        ),
        left_out=tuple(
            [LeftOut(what, why) for what, why in found.left_out.items()]
            + [LeftOut(str(each.combination), misfit_text(each)) for each in found.misfits.values()]
        ),
        model=fingerprint(model),
        machine=machine_fingerprint(question.machine),
        groups=tuple(_named(each, blocks) for each in best.groups) or None,
        stage_budgets=_stage_budgets(best, capacity),
        activation_offload="auto" if choice.offloads else None,
    )


def _named(group: Item, blocks: Sequence[str]) -> Names:
    """Return the names of the blocks of a group."""
    return blocks[group] if isinstance(group, int) else tuple(_named(each, blocks) for each in group)


@dataclass(frozen=True)
class Trial:
    """The measured seconds of a step with a plan. ``seconds`` is None if it did not run; ``why`` is the
    reason."""

    predicted_seconds: float
    seconds: float | None
    why: str = ""


def after_trials(plan: ParallelPlan, settings: str, trials: Mapping[str, Trial]) -> ParallelPlan:
    """Return ``plan`` with measured times added.

    Args:
        plan: the plan that was chosen.
        settings: the key of ``plan`` in ``trials``.
        trials: the measured plans by settings. Those that ran become the first runners-up, fastest first;
            those that failed are added to ``left_out``.
    """
    ran = {name: each.seconds for name, each in trials.items() if each.seconds is not None}
    own = ran.pop(settings)
    behind = (
        RunnerUp(name, trials[name].predicted_seconds, f"took {ran[name] / own - 1:.1%} longer", ran[name])
        for name in sorted(ran, key=lambda name: ran[name])
    )
    failed = (LeftOut(name, each.why) for name, each in trials.items() if each.seconds is None)
    return replace(
        plan,
        runners_up=(*behind, *(each for each in plan.runners_up if each.settings not in trials)),
        left_out=(*failed, *plan.left_out),
        measured_seconds=own,
    )


def machine_fingerprint(machine: MachineSpeeds) -> str:
    """Return a hash of all recorded properties of a machine."""
    document = {**asdict(machine), "collectives": machine.collectives.to_json()}
    text = json.dumps(document, sort_keys=True)
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:_HASH_DIGITS]


def misfit_text(misfit: Misfit) -> str:
    """Return why a combination does not fit, with the number of missing bytes."""
    return (
        f"rank {misfit.rank} along pp needs {format_bytes(misfit.needed_bytes)} of {misfit.tier}, "
        f"{format_bytes(misfit.missing_bytes)} more than the {format_bytes(misfit.given_bytes)} that it has"
    )


def _budgets(best: Price, capacity: StageCapacity) -> PlanBudgets:
    """Return the budgets of each rank. Tiers below DEVICE get one only if chunks lie there."""
    if not best.combination.uses_lower:
        return PlanBudgets(capacity.device_bytes)
    return PlanBudgets(capacity.device_bytes, capacity.host_bytes, capacity.disk_bytes)


_SPARE_SHARE = 16  # a rank with less than 1/16 of DEVICE to spare also gets the tiers below


def _stage_budgets(best: Price, capacity: StageCapacity) -> tuple[PlanBudgets, ...] | None:
    """Return the budgets of each rank along pp; None if all are the same.

    A rank that fits on DEVICE with room to spare gets no file and no HOST memory.
    """
    spare = capacity.device_bytes // _SPARE_SHARE
    needs = [
        bool(each.lower_bytes) or each.device_bytes + spare > capacity.device_bytes for each in best.ranks
    ]
    if not best.combination.uses_lower or all(needs) or not any(needs):
        return None
    return tuple(_budgets(best, capacity) if each else PlanBudgets(capacity.device_bytes) for each in needs)


def _rank(rank: RankPrice, capacity: StageCapacity) -> RankPrediction:
    host = min(rank.lower_bytes, capacity.host_bytes)
    return RankPrediction(
        rank.device_bytes,
        host,
        rank.lower_bytes - host,
        rank.parameter_bytes,
        rank.gradient_bytes,
        rank.state_bytes,
        rank.activation_bytes,
    )


def _why_slower(other: Price, best: Price) -> str:
    """Name the resource that costs the most additional seconds compared with the best plan."""
    more = {
        name: other.seconds.get(name, 0.0) - best.seconds.get(name, 0.0)
        for name in {**other.seconds, **best.seconds}
    }
    worst = max(more, key=lambda name: more[name])
    return f"{more[worst]:.3g} s more of {worst}" if more[worst] > 0 else "as fast"


def _relaxation(found: Found, question: Question) -> str:
    """Return the message for a search in which nothing fits, with the budgets that would be enough."""
    nearest = min(found.misfits.values(), key=lambda each: each.missing_bytes, default=None)
    if nearest is None:
        reasons = "; ".join(f"{what}: {why}" for what, why in list(found.left_out.items())[:4])
        return f"no way to train this model over {question.num_ranks} ranks is left: {reasons}"
    text = f"nothing fits; the nearest is {nearest.combination}: {misfit_text(nearest)}"
    enough, given = found.enough, question.capacity
    if enough is None:
        return text
    larger = []
    if enough.device_bytes > given.device_bytes:
        larger.append(f"device_bytes {format_enough(enough.device_bytes)}")
    if enough.host_bytes > given.host_bytes:
        larger.append(f"host_bytes {format_enough(enough.host_bytes)}")
    if enough.disk_bytes > given.disk_bytes:
        larger.append(f"disk_bytes {format_enough(enough.disk_bytes)}")
    lower = "" if given.lower_bytes else ", or tiers below DEVICE (host_bytes, disk_bytes)"
    return f"{text}. For each rank {' and '.join(larger)} would do{lower}"
