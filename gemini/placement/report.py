"""PlanReport: describes a plan in text: which chunks stay where, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gemini.placement.planner import OPT, ChosenPlan
from gemini.placement.policies import KEEP, PlacementPlan
from gemini.placement.problem import Flags, Intervals, Iteration, Machine, find_intervals
from gemini.placement.promise import Pace, Promise
from gemini.placement.recompute import RecomputeReport
from gemini.system.config import format_bytes


@dataclass(frozen=True)
class PlannedStep:
    """A steady step, its machine, the plan chosen for it, the kind of each chunk, and the expected time of
    such steps.

    ``iteration``, ``machine`` and ``chosen`` have the times and speeds of planning, ``promise`` has those of
    the last steps.
    """

    iteration: Iteration
    machine: Machine
    chosen: ChosenPlan
    chunk_kinds: tuple[str, ...]
    promise: Promise

    @classmethod
    def of_plan(
        cls, iteration: Iteration, machine: Machine, chosen: ChosenPlan, chunk_kinds: tuple[str, ...]
    ) -> PlannedStep:
        """Return a step that has not run yet; its promise has the pace of planning."""
        pace = Pace(sum(iteration.seconds), machine.links)
        return cls(iteration, machine, chosen, chunk_kinds, Promise(pace, chosen.simulation))


@dataclass(frozen=True)
class KindShare:
    """How a step treats the chunks of one kind, in bytes: all of them, those that never leave DEVICE, those
    that leave at some time, and the bytes read and written below DEVICE for them."""

    kind: str
    nbytes: int
    staying: int
    leaving: int
    read: int
    written: int


@dataclass(frozen=True)
class PlanReport:
    """How a model uses its tiers. ``str()`` formats it for people.

    ``placement``: limits in force. ``step``: the planned step; None before the first step is recorded, if
    everything fits on DEVICE, and under policies that follow the order alone. ``recompute``: of blocks; None
    if it was not requested. ``stowed_bytes``: states that are in a file between updates, and on DEVICE or
    HOST only during them.
    """

    placement: PlacementPlan
    step: PlannedStep | None
    recompute: RecomputeReport | None = None
    stowed_bytes: int = 0

    @property
    def kinds(self) -> tuple[KindShare, ...]:
        """The treatment of each kind of chunk; empty without a planned step."""
        return tuple(_shares(self.step)) if self.step is not None else ()

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        limit = self.placement.device_limit_bytes
        reserve = max(self.placement.reserve_bytes, default=0)
        if reserve < limit:
            less = f"{format_bytes(reserve)} less where activations and temporaries need it"
        else:
            less = "none but what an operator uses where activations and temporaries need all of it"
        yield f"DEVICE: up to {format_bytes(limit)} of model data, {less}"
        if self.stowed_bytes:
            yield (
                f"Stowed: {format_bytes(self.stowed_bytes)} of states are in a file between updates "
                "(nvme_offload_fraction): every step reads and writes them there."
            )
        if self.recompute is not None:
            yield from self.recompute.lines()
        if self.step is None:
            yield (
                "No step is planned: none was recorded yet, or everything fits DEVICE, or the policy follows "
                "the order alone (OPT with prefetch)."
            )
            return
        yield from _times(self.step)
        chosen = self.step.chosen
        if chosen.hints is None:
            yield "What is used last leaves first (OPT): nothing else is faster, or moves less in that time."
            return
        for share in self.kinds:
            yield _sentence(share)
        yield f"Bound by {_bottleneck(self.step)}."


def _times(step: PlannedStep) -> Iterator[str]:
    chosen, promise = step.chosen, step.promise
    expected = promise.simulation
    waiting = max(expected.step_seconds - expected.compute_seconds, 0)
    yield (
        f"Plan: {chosen.name}, the best of {len(chosen.candidates)}. A step is expected to take "
        f"{expected.step_seconds:.3g} s: {expected.compute_seconds:.3g} s of computing and {waiting:.2g} s "
        "of waiting."
    )
    if promise.pace.num_steps:
        yield f"That is at the pace of the last {promise.pace.num_steps} steps."
    opt_seconds = dict(chosen.candidates)[OPT]
    yield (
        f"When it was planned: {chosen.simulation.step_seconds:.3g} s, OPT with prefetch "
        f"{opt_seconds:.3g} s, no plan less than {chosen.bound_seconds:.3g} s."
    )
    if chosen.hints is not None and chosen.simulation.step_seconds >= opt_seconds:
        moved = format_bytes(sum(chosen.simulation.link_bytes.values()))
        yield f"It moves {moved} per step, less than OPT would: transfers slow computing down."


def _shares(step: PlannedStep) -> Iterator[KindShare]:
    intervals = find_intervals(step.iteration)
    keep = _kept(step, intervals)
    leaves: set[int] = set(intervals.chunk[~keep].tolist())
    used = sorted({chunk for chunks in step.iteration.accesses for chunk in chunks})
    runs_gone = set(intervals.run[~keep].tolist()) - {-1}
    for kind in dict.fromkeys(step.chunk_kinds[chunk] for chunk in used):
        chunks = [chunk for chunk in used if step.chunk_kinds[chunk] == kind]
        mine = np.isin(intervals.chunk, chunks)
        ends = dict(zip(intervals.run[mine].tolist(), intervals.nbytes[mine].tolist(), strict=True))
        sizes = {chunk: step.iteration.chunk_bytes[chunk] for chunk in chunks}
        leaving = sum(size for chunk, size in sizes.items() if chunk in leaves)
        yield KindShare(
            kind=kind,
            nbytes=sum(sizes.values()),
            staying=sum(sizes.values()) - leaving,
            leaving=leaving,
            read=int(intervals.nbytes[mine & ~keep].sum()),
            written=sum(size for run, size in ends.items() if run in runs_gone),
        )


def _kept(step: PlannedStep, intervals: Intervals) -> Flags:
    if step.chosen.hints is None:
        return np.zeros(len(intervals), dtype=bool)
    flags = np.frombuffer(step.chosen.hints.intervals, dtype=np.uint8)
    kept: Flags = flags[intervals.access] & KEEP != 0
    return kept


def _sentence(share: KindShare) -> str:
    head = f"  {share.kind}: {format_bytes(share.nbytes)}"
    if not share.leaving:
        return f"{head}, all of it stays: it is used often for its size"
    moved = f"{format_bytes(share.read)} are read and {format_bytes(share.written)} written per step"
    if not share.staying:
        return f"{head}, all of it leaves DEVICE at some time; {moved}"
    stays, leaves = format_bytes(share.staying), format_bytes(share.leaving)
    return f"{head}: {stays} stay for the whole step, {leaves} leave at some time; {moved}"


def _bottleneck(step: PlannedStep) -> str:
    simulation = step.promise.simulation
    busiest = max(simulation.link_seconds, key=lambda name: simulation.link_seconds[name])
    if simulation.step_seconds <= 1.02 * simulation.compute_seconds:
        return "computing: the transfers are hidden behind it"
    share = simulation.link_seconds[busiest] / simulation.step_seconds
    return f"{busiest}, which is busy for {share:.0%} of the step"
