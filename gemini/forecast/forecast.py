"""Forecasts a step from a rehearsal and a machine's speeds: whether it fits, how long it takes, and which
resource bounds it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from gemini.chunk.disk_file import lacking_space
from gemini.comm.peers import Share
from gemini.errors import OutOfBudgetError
from gemini.forecast.machine import MachineSpeeds
from gemini.forecast.meter import OperationCosts, TooManyCalls
from gemini.forecast.rehearsal import ModelSource, Recipe, Rehearsal, Stretch, rehearse, spans
from gemini.forecast.timing import sample
from gemini.memstats import Trace
from gemini.memstats.trace import OPTIMIZER
from gemini.placement.planner import ChosenPlan, choose_plan
from gemini.placement.problem import Iteration, Machine
from gemini.runtime.build import Blueprint, draw_blueprint
from gemini.runtime.config import GeminiConfig
from gemini.system.config import format_bytes


def ignore_progress(_doing: str) -> None:
    """Ignore progress messages."""


@dataclass(frozen=True)
class Settings:
    """The input of a forecast.

    Attributes:
        sample_seconds: how long operations are timed on this machine; 0 for a machine that is only described.
        disk_is_here: whether the directory of the DISK tier is on this machine.
        tell: called with a description of each phase of the forecast.
    """

    batch: int
    config: GeminiConfig
    machine: MachineSpeeds
    accumulation: int = 1
    clips_norm: bool = True
    sample_seconds: float = 0.0
    disk_is_here: bool = False
    tell: Callable[[str], None] = ignore_progress


@dataclass(frozen=True)
class BatchForecast:
    """The memory need of one batch size, and the reasons if it does not fit.

    Attributes:
        source: the model as it was rehearsed.
        obstacles: why a step cannot run; empty if it fits.
        stretch: set if the rehearsal used fewer tokens.
    """

    source: ModelSource
    batch: int
    rehearsal: Rehearsal
    blueprint: Blueprint
    obstacles: tuple[str, ...]
    stretch: Stretch | None = None

    @property
    def non_model_bytes(self) -> int:
        """The peak of non-model data over all periods."""
        return max(self.rehearsal.trace.non_model_bytes, default=0)


@dataclass(frozen=True)
class StepTime:
    """The time of a step, as the placement planner simulates it.

    Attributes:
        busy_seconds: seconds in which each resource works.
        bound: the busiest resource: ``"compute"``, ``"Adam"``, a link, or ``"disk"`` if both directions share
            a channel.
        sampled_share: share of the compute time that was timed on this machine rather than estimated.
    """

    seconds: float
    busy_seconds: dict[str, float]
    bound: str
    plan: ChosenPlan
    sampled_share: float


# A small DEVICE means small chunks and a long rehearsal. If the model data does not fit anyway, the rehearsal
# uses a DEVICE of at least 1/256 of the model data.
_FINEST = 256
# Takes some seconds. A longer pass has many layers, or loops over tokens; a loop needs only a few tokens.

_MOST_CALLS = 16_000
_FEW_TOKENS = 16


def forecast_batch(source: ModelSource, settings: Settings, batch: int) -> BatchForecast:
    """Rehearse a step with ``batch``, and check whether it fits the budgets of ``settings``.

    Raises:
        ConfigError: the model cannot be managed.
    """
    settings.tell(f"rehearsing a step of batch {batch}")
    source, blueprint, rehearsal, stretch = _rehearsed_in_bounds(source, settings, batch)
    obstacles = [*_lacking_space(blueprint, settings), *_obstacles(blueprint, rehearsal.trace, batch)]
    return BatchForecast(source, batch, rehearsal, blueprint, tuple(obstacles), stretch)


def forecast_rank(
    source: ModelSource, config: GeminiConfig, batch: int, copies: int, *, accumulation: int = 1
) -> BatchForecast:
    """Rehearse a step with ``batch`` on one of ``copies`` ranks of this machine that cut all chunks among
    them (ZeRO 3), and check whether it fits the rank's budgets. The rank computes the same as a single
    process; chunks are whole while operators use them.

    Raises:
        ConfigError: the model cannot be managed.
    """
    example = source.example(batch)
    blueprint = draw_blueprint(example.module, config, Share(0, copies), ranks_here=copies)
    whole = draw_blueprint(example.module, config)
    recipe = Recipe(source.loss, accumulation)
    rehearsal = rehearse(example.module, example.inputs, recipe, config, whole)
    obstacles = _obstacles(blueprint, rehearsal.trace, batch)
    return BatchForecast(source, batch, rehearsal, blueprint, tuple(obstacles))


def _rehearsed_in_bounds(
    source: ModelSource, settings: Settings, batch: int
) -> tuple[ModelSource, Blueprint, Rehearsal, Stretch | None]:
    """Rehearse a step, with fewer tokens if the model runs token by token. Return the source, blueprint,
    rehearsal, and the stretch (None if all tokens were rehearsed)."""
    if source.spans is None:
        try:
            most_calls = None if source.resized is None else _MOST_CALLS
            return source, *_rehearsed(source, settings, batch, most_calls=most_calls), None
        except TooManyCalls:
            source = _with_spans(source, settings, batch)
    if source.spans is None or source.resized is None:
        return source, *_rehearsed(source, settings, batch), None
    shorter = tuple(_rehearsed(source.resized(tokens), settings, batch)[1] for tokens in source.spans)
    stretch = Stretch(shorter, source.spans, source.tokens)
    blueprint = draw_blueprint(source.example(batch).module, settings.config)
    return source, blueprint, stretch.rehearsal(), stretch


def _with_spans(source: ModelSource, settings: Settings, batch: int) -> ModelSource:
    """Return the source with ``spans`` set to smaller numbers of tokens, if the model runs token by token."""
    assert source.resized is not None
    few, more = (_rehearsed(source.resized(n * _FEW_TOKENS), settings, batch)[1] for n in (1, 2))
    most_calls = _MOST_CALLS // 2 * settings.accumulation
    found = spans(_FEW_TOKENS, few.num_calls, more.num_calls, most_calls)
    return replace(source, spans=found, resized=source.resized if found else None)


def _rehearsed(
    source: ModelSource, settings: Settings, batch: int, *, most_calls: int | None = None
) -> tuple[Blueprint, Rehearsal]:
    example, config = source.example(batch), settings.config
    blueprint = rehearsed = draw_blueprint(example.module, config)
    least_bytes = blueprint.context.size.total_bytes // _FINEST
    if _misfit(blueprint) is not None and blueprint.context.capacity.device_bytes < least_bytes:
        config = replace(config, device_bytes=least_bytes)
        rehearsed = draw_blueprint(example.module, config)
    recipe = Recipe(source.loss, settings.accumulation, settings.clips_norm, most_calls)
    return blueprint, rehearse(example.module, example.inputs, recipe, config, rehearsed)


def time_step(forecast: BatchForecast, settings: Settings) -> StepTime:
    """Simulate the step within the budgets.

    Raises:
        OutOfBudgetError: it does not fit.
    """
    machine, rehearsal = settings.machine, forecast.rehearsal
    samples = {}
    if settings.sample_seconds > 0:
        settings.tell(f"timing operators for {settings.sample_seconds:g} s")
        most_bytes = forecast.blueprint.context.capacity.device_bytes
        samples = sample(
            rehearsal.periods, machine, limit_seconds=settings.sample_seconds, most_bytes=most_bytes
        )
    costs = OperationCosts(machine, samples)
    seconds = [costs.period_seconds(period) for period in rehearsal.periods]
    if forecast.stretch is not None:
        growth = forecast.stretch.growth(OperationCosts(machine).period_seconds)
        seconds = [each * factor for each, factor in zip(seconds, growth, strict=True)]
    trace = replace(rehearsal.trace, seconds=tuple(seconds), links=machine.links)
    budgets = _budgets(forecast, machine)
    settings.tell("planning what stays on DEVICE")
    plan = choose_plan(Iteration.of_trace(trace, overlap=True), budgets)
    busy = _busy_seconds(trace, plan, budgets.disk_shared)
    calls = Counter[bool]()
    for period in rehearsal.periods:
        for operation, count in period.operations.items():
            calls[operation in samples or operation.is_update] += int(1e9 * costs.seconds(operation) * count)
    return StepTime(
        seconds=plan.simulation.step_seconds,
        busy_seconds=busy,
        bound=max(busy, key=lambda name: busy[name]),
        plan=plan,
        sampled_share=calls[True] / max(calls.total(), 1) if samples else 0.0,
    )


def _budgets(forecast: BatchForecast, machine: MachineSpeeds) -> Machine:
    """Return the budgets for the placement planner. As in the runtime, the lower tiers are used only if
    DEVICE cannot keep everything permanently."""
    context = forecast.blueprint.context
    capacity = context.capacity
    if context.size.total_bytes + forecast.non_model_bytes <= capacity.device_bytes:
        return Machine(capacity.device_bytes, 0, 0, ())
    return Machine(
        capacity.device_bytes,
        capacity.host_bytes,
        capacity.disk_bytes,
        machine.links,
        transfers_take=machine.transfers_take,
    )


def largest_batch(source: ModelSource, settings: Settings, known: BatchForecast) -> int:
    """Return the largest batch that fits; 0 if a single sample does not fit.

    Memory of activations grows almost linearly with the batch, so two rehearsals give an estimate. Bisection
    between a batch that fits and one that does not finds the exact limit.
    """
    # These obstacles do not depend on the batch.
    if _misfit(known.blueprint) is not None or _lacking_space(known.blueprint, settings):
        return 0
    fits, fails = (known.batch, 0) if not known.obstacles else (0, known.batch)
    other = forecast_batch(source, settings, 1 if known.batch > 1 else 2)
    if other.obstacles:
        fails = min(fails or other.batch, other.batch)
    else:
        fits = max(fits, other.batch)
    guess = _extrapolated(known, other)
    tries = [guess - 1, guess + 1, guess]
    while (not fails or fails - fits > 1) and fits < _LARGEST:
        batch = tries.pop() if tries else (fits + fails) // 2 if fails else 2 * max(fits, 1)
        if not fits < batch < (fails or math.inf):
            continue
        if forecast_batch(source, settings, batch).obstacles:
            fails = batch
        else:
            fits = batch
    return fits


# Memory does not limit a batch beyond this.
_LARGEST = 1 << 20


def samples_to_compute_bound(step: StepTime, samples: int) -> int | None:
    """Return how many samples a forward pass needs until computing takes as long as the busiest link; None if
    nothing is transferred.

    Links move the same bytes for any number of samples. ``samples``: the number of samples of ``step``.
    """
    links = [seconds for name, seconds in step.busy_seconds.items() if name not in ("compute", "Adam")]
    slowest = max(links, default=0.0)
    if slowest == 0 or step.busy_seconds["compute"] == 0:
        return None
    return math.ceil(samples * slowest / step.busy_seconds["compute"])


def _extrapolated(first: BatchForecast, second: BatchForecast) -> int:
    """Return the batch at which the tightest moment fills DEVICE, by linear extrapolation of each moment's
    memory."""
    device_bytes = first.blueprint.context.capacity.device_bytes
    limit = math.inf
    pairs = zip(_moment_needs(first), _moment_needs(second), strict=False)
    for need, other in pairs:
        slope = (other - need) / (second.batch - first.batch)
        if slope > 0:
            limit = min(limit, first.batch + (device_bytes - need) / slope)
    return 0 if limit is math.inf or limit < 0 else int(limit)


def _moment_needs(forecast: BatchForecast) -> list[int]:
    trace = forecast.rehearsal.trace
    return [
        sum(trace.chunk_bytes[chunk] for chunk in chunks) + reserve
        for chunks, reserve in zip(trace.accesses, trace.non_model_bytes, strict=True)
    ]


def _misfit(blueprint: Blueprint) -> OutOfBudgetError | None:
    """Return the error if the model data alone does not fit the budgets, otherwise None."""
    try:
        blueprint.refuse_misfit()
    except OutOfBudgetError as error:
        return error
    return None


def _lacking_space(blueprint: Blueprint, settings: Settings) -> list[str]:
    """Return the reason, in a list, if wrapping would find too little disk space; otherwise an empty list."""
    if not settings.disk_is_here:
        return []
    lack = lacking_space(blueprint.budgets, blueprint.context.size.total_bytes)
    return [] if lack is None else [lack]


def _obstacles(blueprint: Blueprint, trace: Trace, batch: int) -> list[str]:
    """Return the reasons why a step cannot run within the budgets, each with its numbers and a remedy."""
    misfit = _misfit(blueprint)
    obstacles = [] if misfit is None else [str(misfit)]
    capacity = blueprint.context.capacity
    needs = [
        (sum(trace.chunk_bytes[chunk] for chunk in chunks), reserve, phase)
        for chunks, reserve, phase in zip(trace.accesses, trace.non_model_bytes, trace.phases, strict=True)
    ]
    pinned, reserve, phase = max(needs, key=lambda need: need[0] + need[1], default=(0, 0, ""))
    if pinned + reserve > capacity.device_bytes:
        obstacles.append(_activation_text(pinned, reserve, phase, capacity.device_bytes, batch))
    return obstacles


def _activation_text(pinned: int, reserve: int, phase: str, device_bytes: int, batch: int) -> str:
    missing, smaller = pinned + reserve - device_bytes, "the batch or " if batch > 1 else ""
    return (
        f"an operator of {phase} needs {format_bytes(pinned)} of model data beside "
        f"{format_bytes(reserve)} of activations and temporaries, {format_bytes(missing)} more than the "
        f"{format_bytes(device_bytes)} of DEVICE; raise device_bytes to at least "
        f"{format_bytes(pinned + reserve)}, lower {smaller}the sequence length, or recompute activations "
        "(--checkpointing)"
    )


def _busy_seconds(trace: Trace, plan: ChosenPlan, disk_shared: bool) -> dict[str, float]:
    """Return the seconds in which each resource works in a step."""
    update = sum(s for s, phase in zip(trace.seconds, trace.phases, strict=True) if phase == OPTIMIZER)
    busy = {"compute": sum(trace.seconds) - update, "Adam": update}
    links = {name: seconds for name, seconds in plan.simulation.link_seconds.items() if seconds > 0}
    if disk_shared and "disk_read" in links and "disk_write" in links:
        links["disk"] = links.pop("disk_read") + links.pop("disk_write")
    return busy | links
