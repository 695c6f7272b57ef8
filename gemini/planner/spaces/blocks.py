"""Prices each block of a model under each strategy, and a step of a layerwise plan, with the records and
prices of this project."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import ceil

from torch import nn

from gemini.errors import ConfigError
from gemini.parallel.layout_plan import DataCut
from gemini.parallel.pipeline.orders import Kind
from gemini.parallel.plan import ParallelPlan, PlanBudgets, Prediction, RankPrediction, fingerprint
from gemini.planner.chunks import StageCapacity
from gemini.planner.exchanges import Gathers, chunks_of, exchange_seconds, whole_sizes
from gemini.planner.plans import machine_fingerprint
from gemini.planner.price import CostsOf, Pricer
from gemini.planner.recomputation import alone
from gemini.planner.records import Part
from gemini.planner.search import Search
from gemini.planner.segment_costs import SegmentCosts, Speeds
from gemini.planner.spaces.layerwise import LayerwisePlan, Strategy, uneven

Unit = tuple[
    int, ...
]  # segments that share a strategy: a block, or the segments before and behind all blocks


@dataclass(frozen=True)
class UnitPrice:
    """The time and memory of a unit on one rank.

    Attributes:
        forward, backward: seconds of a micro-batch.
        tail: seconds of the gradient exchange and the update.
        memory: (segment, bytes that forward keeps, peak bytes while it runs) of each segment.
        input_bytes: size of the unit's input.
        seconds: of a step, by resource.
    """

    forward: float
    backward: float
    tail: float
    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    memory: tuple[tuple[int, int, int], ...]
    input_bytes: int
    seconds: Mapping[str, float]

    @property
    def model_bytes(self) -> int:
        """Bytes of parameters, gradients and states."""
        return self.parameter_bytes + self.gradient_bytes + self.state_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes that forward keeps for backward."""
        return sum(kept for _, kept, _ in self.memory)

    @property
    def extra_bytes(self) -> int:
        """Peak bytes of a running segment beyond the bytes that it keeps."""
        return max((peak - kept for _, kept, peak in self.memory if peak > kept), default=0)

    def step_seconds(self, chunks: int) -> float:
        """Return the seconds of the unit in a step of ``chunks`` micro-batches."""
        return chunks * (self.forward + self.backward) + self.tail


@dataclass(frozen=True)
class PlanPrice:
    """The time and memory of a step of a plan.

    Attributes:
        seconds: of the busiest stage, by resource.
        ranks: memory of a rank of each stage.
        missing_bytes: the bytes that the worst rank lacks; 0 if all fit.
    """

    step_seconds: float
    seconds: Mapping[str, float]
    ranks: tuple[RankPrediction, ...]
    missing_bytes: int


class Blocks:
    """The blocks of one model on one machine. ``names`` are the names of the blocks. A model that is not a
    row of blocks is a single block without a name, and nothing lies outside it."""

    def __init__(
        self,
        speeds: Speeds,
        capacity: StageCapacity,
        costs_of: CostsOf,
        names: Sequence[str],
        why_one: str | None = None,
    ) -> None:
        self.names, self.capacity, self.speeds, self._why_one = tuple(names), capacity, speeds, why_one
        self._pricer = Pricer(speeds, capacity, costs_of)
        self._costs_of = self._pricer.costs_of
        self.price = cache(self._price)

    @classmethod
    def of(cls, searching: Search, capacity: StageCapacity) -> Blocks:
        """Return the blocks of the search's model."""
        names = searching.whole.blocks or ("",)
        return cls(searching.speeds, capacity, searching.costs_of, names, searching.whole.why_one)

    def require_row(self) -> None:
        """Raise ConfigError if the model has no blocks that run one after another."""
        if not self.is_row:
            raise ConfigError(f"the model has no row of blocks that could have strategies: {self._why_one}")

    @property
    def is_row(self) -> bool:
        """Whether the model has blocks that run one after another."""
        return self.names != ("",)

    def outside(self, pp: int) -> tuple[Unit, Unit]:
        """Return the unit before the blocks on the first stage, and the unit behind them on the last stage.
        On one stage both are one unit, because they may share parameters."""
        last = len(self.names) + 1
        if not self.is_row:
            return (), ()
        return ((0, last), ()) if pp == 1 else ((0,), (last,))

    def _price(self, unit: Unit, strategy: Strategy, samples: int, chunks: int) -> UnitPrice:
        """Return the price of a unit with ``samples`` per micro-batch and rank, and ``chunks`` micro-batches
        per step.

        Raises:
            ConfigError: the model cannot be cut as the strategy says.
        """
        part, copies, pricer = Part(strategy.tp, strategy.sp), strategy.copies, self._pricer
        costs = [self._costs_of(part, samples)[at] for at in unit]
        ranges = tuple((at, at + 1) for at in unit)
        own = part, samples, ranges
        gathers = self._gathers(own, strategy)
        again = alone(unit if strategy.recompute else ())
        takes = pricer.takes(*own, again, ("1f1b", 1, chunks, 1), gathers)
        forward, backward = (
            sum(takes[kind, stage] for stage in range(len(unit))) for kind in (Kind.FORWARD, Kind.BACKWARD)
        )
        parameters = pricer.parameters(*own)
        messages = chunks_of(parameters, None) if strategy.zero == 3 else pricer.buckets(*own)
        exchange = exchange_seconds(messages, copies, strategy.zero, self.speeds)
        update = pricer.update(*own, copies, strategy.zero)
        gathering = (
            sum(gathers.seconds(at, chunks, self.speeds) for at in range(len(unit))) if gathers else 0.0
        )
        seconds = {axis: chunks * _messages(costs, axis, strategy.recompute) for axis in ("tp", "sp")}
        computing = chunks * (forward + backward - 2 * gathering) - sum(seconds.values())
        seconds |= {"compute": computing, "dp": exchange + 2 * chunks * gathering, "Adam": update}
        again_bytes = [each.input_bytes if strategy.recompute else each.kept_bytes for each in costs]
        memory = zip(unit, again_bytes, costs, strict=True)
        return UnitPrice(
            forward,
            backward,
            exchange + update,
            *pricer.model_bytes(*own, DataCut(copies, strategy.zero, chunks)),
            tuple((at, ceil(kept), ceil(each.peak_bytes)) for at, kept, each in memory),
            ceil(costs[0].input_bytes) if costs else 0,
            seconds,
        )

    def _gathers(
        self, own: tuple[Part, int, tuple[tuple[int, int], ...]], strategy: Strategy
    ) -> Gathers | None:
        """Return the gathers of forward and backward, each unit as one chunk; None without ZeRO 3."""
        if strategy.zero < 3:
            return None
        sizes = tuple(whole_sizes(self._pricer.parameters(*own[:2], (each,)), None) for each in own[2])
        return Gathers(strategy.copies, sizes, 0.0)

    def switch_seconds(self, one: Strategy, other: Strategy, batch: int, chunks: int, at: int = 1) -> float:
        """Return the seconds per step between a segment with strategy ``one`` and the next segment, ``at``,
        with ``other``. Ranks with fewer samples or tokens gather those of other ranks, in forward or in
        backward."""
        few, many = sorted((one, other), key=lambda each: each.copies, reverse=True)
        if (one.dp, one.sp) == (other.dp, other.sp) or few.copies == 1:
            return 0.0
        samples = batch // (few.dp * chunks)
        nbytes = self._costs_of(Part(few.tp, few.sp), samples)[at].input_bytes
        ranks = few.copies // many.copies
        kind, ranks = ("all_gather", ranks) if ranks > 1 else ("all_to_all", max(few.sp, many.sp))
        return chunks * self.speeds.collective(kind, ranks, nbytes)

    def priced(self, plan: LayerwisePlan) -> PlanPrice:
        """Return the price of a step of a plan, whether it fits or not.

        A step takes the sum of all stages for one micro-batch, plus the slowest stage for every other one.
        Exchange and update are divided among the micro-batches.

        Raises:
            ConfigError: the model has another number of blocks, it cannot be cut as the plan says, or
                micro-batches are uneven.
        """
        if len(plan.strategies) != len(self.names):
            raise ConfigError(
                f"the plan has {len(plan.strategies)} layers, and the model has {len(self.names)} blocks"
            )
        stages = [self._stage(plan, stage) for stage in range(plan.pp)]
        between = [self._between(plan, stage, units) for stage, units in enumerate(stages)]
        takes = [
            sum(each.step_seconds(plan.chunks) for each in units) + sum(extra.values())
            for units, extra in zip(stages, between, strict=True)
        ]
        total = pipeline_seconds(takes, plan.chunks)
        busiest = takes.index(max(takes))
        seconds: Counter[str] = Counter()
        for each in (*(unit.seconds for unit in stages[busiest]), between[busiest]):
            seconds.update(each)
        seconds["idle"] += total - takes[busiest]  # type: ignore[assignment]
        ranks = tuple(self._rank(plan, stage, units) for stage, units in enumerate(stages))
        missing = max(each.device_bytes for each in ranks) - self.capacity.device_bytes
        return PlanPrice(
            total, {name: value for name, value in seconds.items() if value > 0}, ranks, max(missing, 0)
        )

    def _stage(self, plan: LayerwisePlan, stage: int) -> list[UnitPrice]:
        """Return the units of a stage."""
        first, last = plan.ranges[stage]
        before, behind = self.outside(plan.pp)
        row: list[tuple[Unit, Strategy]] = [
            ((at + self.is_row,), plan.strategies[at]) for at in range(first, last)
        ]
        if before and stage == 0:
            row.insert(0, (before, plan.outside[0]))
        if behind and stage == plan.pp - 1:
            row.append((behind, plan.outside[1]))
        return [self._even(plan, unit, strategy) for unit, strategy in row]

    def _between(self, plan: LayerwisePlan, stage: int, units: Sequence[UnitPrice]) -> dict[str, float]:
        """Return the seconds of a step between the units of a stage, and between the stage and the one
        before."""
        first, last = plan.ranges[stage]
        row = list(plan.strategies[first:last])
        row = [*plan.outside[: stage == 0], *row, *([plan.outside[1]] if stage == plan.pp - 1 else [])]
        switches = sum(self.switch_seconds(a, b, plan.batch, plan.chunks) for a, b in pairwise(row))
        return {"switches": switches, "pp": self.send_seconds(units[0], plan.chunks) if stage else 0.0}

    def send_seconds(self, unit: UnitPrice, chunks: int) -> float:
        """Return the seconds of a step for receiving the inputs of a stage that begins with ``unit``, and
        sending their gradients."""
        return 2 * chunks * self.speeds.collective("send", 2, unit.input_bytes)

    def _even(self, plan: LayerwisePlan, unit: Unit, strategy: Strategy) -> UnitPrice:
        samples = plan.microbatch(strategy)
        if samples is None:
            raise ConfigError(uneven(plan.batch, strategy.dp, plan.chunks))
        return self.price(unit, strategy, samples, plan.chunks)

    def _rank(self, plan: LayerwisePlan, stage: int, units: Sequence[UnitPrice]) -> RankPrediction:
        held = most = units[0].input_bytes if stage else 0
        for _, kept, peak in sorted(segment for each in units for segment in each.memory):
            most = max(most, held + peak)
            held += kept
        activations = most + (in_flight(plan.schedule, plan.pp, stage, plan.chunks) - 1) * held
        parameters = sum(each.parameter_bytes for each in units)
        gradients = sum(each.gradient_bytes for each in units)
        states = sum(each.state_bytes for each in units)
        total = parameters + gradients + states + activations
        return RankPrediction(total, 0, 0, parameters, gradients, states, activations)

    def runnable(self, plan: LayerwisePlan, model: nn.Module, dtype: str) -> ParallelPlan:
        """Return the plan for HybridParallelPlugin. ``model``: the model that the plugin will get.

        Raises:
            ConfigError: the plan is not uniform, or not for this model; the message lists the differences.
        """
        layout, price, one = plan.layout(), self.priced(plan), plan.strategies[0]
        samples = plan.microbatch(one)
        assert samples is not None
        return ParallelPlan(
            layout,
            "ulysses",
            plan.schedule,
            1,
            plan.chunks,
            samples,
            tuple(self.names[first] for first, _ in plan.ranges[1:]),
            one.zero if one.copies > 1 else 0,
            PlanBudgets(self.capacity.device_bytes),
            tuple(name for name, each in zip(self.names, plan.strategies, strict=True) if each.recompute),
            dtype,
            Prediction(price.step_seconds, dict(price.seconds), price.ranks, {}),
            (),
            (),
            fingerprint(model),
            machine_fingerprint(self.speeds.machine),
        )


def pipeline_seconds(stages: Sequence[float], chunks: int) -> float:
    """Return the seconds of a pipeline step of ``chunks`` micro-batches. ``stages``: seconds of each stage
    for all of them."""
    return (sum(stages) + (chunks - 1) * max(stages)) / chunks


def _messages(costs: Sequence[SegmentCosts], axis: str, recompute: bool) -> float:
    """Return the seconds of a micro-batch's collectives along an axis."""
    return sum(
        each.forward_messages.get(axis, 0.0) * (2 if recompute else 1) + each.backward_messages.get(axis, 0.0)
        for each in costs
    )


def in_flight(schedule: str, pp: int, stage: int, chunks: int) -> int:
    """Return the largest number of micro-batches with activations on a stage."""
    return chunks if schedule == "gpipe" and pp > 1 else min(pp - stage, chunks)


def layerwise_of(plan: ParallelPlan, names: Sequence[str]) -> LayerwisePlan:
    """Return a plan of this project as a layerwise plan for the blocks with these names.

    Raises:
        ConfigError: the plan has several stages per rank, or names blocks that are not in ``names``.
    """
    if plan.stages_per_rank > 1 or {*plan.begins, *plan.recompute} - set(names):
        raise ConfigError("the plan has several stages on a rank, or names blocks that the model has not")
    layout = plan.layout
    one = Strategy(layout.tp, layout.sp, layout.dp, plan.zero_stage if layout.dp * layout.sp > 1 else 0)
    begins = [0, *(list(names).index(name) for name in plan.begins), len(names)]
    return LayerwisePlan(
        plan.num_microbatches * plan.microbatch_size * layout.dp,
        plan.num_microbatches,
        tuple(replace(one, recompute=name in plan.recompute) for name in names),
        (one, one),
        tuple(b - a for a, b in pairwise(begins)),
        plan.schedule,
    )
