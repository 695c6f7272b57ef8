"""Orders: the actions of each rank in every schedule, and their simulation: how long ranks are idle, and how
many activations they hold.

Orders with several stages per rank are torch's (torch.distributed.pipelining); nothing is run here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property
from typing import Any

from torch import nn

from gemini.errors import ConfigError


class Kind(Enum):
    """The kind of an action; ``INPUT`` and ``WEIGHT`` are the halves of ``BACKWARD``."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"


@dataclass(frozen=True)
class Action:
    """One computation; ``str()`` gives torch's notation, for example 2F0."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"


@dataclass(frozen=True)
class Order:
    """The actions of each rank, in order. ``rank_of[stage]`` is the rank with a stage."""

    schedule: str
    num_micro_batches: int
    rank_of: tuple[int, ...]
    by_rank: tuple[tuple[Action, ...], ...]

    @property
    def num_stages(self) -> int:
        """The number of stages on all ranks."""
        return len(self.rank_of)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, ascending."""
        return tuple(stage for stage, owner in enumerate(self.rank_of) if owner == rank)

    def last_backward(self, stage: int, *, whole: bool = False) -> Action:
        """Return the action that completes the gradients of a stage's weights; ``whole``: if both halves run
        where the input's half is due."""
        ends = (Kind.BACKWARD, Kind.INPUT if whole else Kind.WEIGHT)
        actions = self.by_rank[self.rank_of[stage]]
        return next(a for a in reversed(actions) if a.stage == stage and a.kind in ends)

    @cached_property
    def splits(self) -> bool:
        """Whether backward runs as two halves."""
        return any(action.kind is Kind.WEIGHT for actions in self.by_rank for action in actions)

    @cached_property
    def places(self) -> Mapping[tuple[int, int, bool], int]:
        """Where the actions that receive something are in the order of their rank, by stage, micro-batch and
        whether they are forward."""
        return {
            (each.stage, each.micro_batch, each.kind is Kind.FORWARD): place
            for actions in self.by_rank
            for place, each in enumerate(actions)
            if each.kind is not Kind.WEIGHT
        }


@dataclass(frozen=True)
class _Schedule:
    """A kind of schedule. ``of_torch``: the name of torch's class; ``is_v``: stages go down the ranks and up
    again; ``splits``: backward runs as two halves.
    """

    of_torch: str | None = None
    is_v: bool = False
    splits: bool = False


SCHEDULES = {
    "gpipe": _Schedule(),
    "1f1b": _Schedule(),
    "interleaved": _Schedule("ScheduleInterleaved1F1B"),
    "zero_bubble": _Schedule("ScheduleInterleavedZeroBubble", splits=True),
    "zbv": _Schedule("ScheduleZBVZeroBubble", is_v=True, splits=True),
    "dualpipev": _Schedule("ScheduleDualPipeV", is_v=True, splits=True),
}


def unknown_schedule(name: str) -> ConfigError:
    """Return the error for an unknown schedule."""
    return ConfigError(f"there is no schedule {name!r}; there are {', '.join(SCHEDULES)}")


def ranks_of_stages(schedule: str, num_ranks: int, chunks: int) -> tuple[int, ...]:
    """Return the rank of each stage, with ``chunks`` stages on each rank.

    Raises:
        ConfigError: there is no such schedule, or it needs another number of stages per rank.
    """
    if schedule not in SCHEDULES:
        raise unknown_schedule(schedule)
    kind = SCHEDULES[schedule]
    if kind.is_v and chunks != 2:
        raise ConfigError(f"{schedule} needs 2 stages on each rank, not {chunks}; set num_model_chunks=2")
    if kind.of_torch is None and chunks != 1:
        raise ConfigError(
            f"{schedule} needs one stage on each rank, not {chunks}; use 'interleaved' or 'zero_bubble' for "
            "several"
        )
    if kind.is_v:
        return (*range(num_ranks), *reversed(range(num_ranks)))
    return tuple(range(num_ranks)) * chunks


@cache
def make_order(
    schedule: str, num_ranks: int, num_micro_batches: int, chunks: int = 1, whole: tuple[int, ...] = ()
) -> Order:
    """Return the order of a schedule over ``num_ranks``, each with ``chunks`` stages. ``whole``: the stages
    that do both halves of backward where the schedule has the input's half.

    Raises:
        ConfigError: the schedule does not support these numbers; the message says which it does.
    """
    rank_of = ranks_of_stages(schedule, num_ranks, chunks)
    if num_micro_batches < 1:
        raise ConfigError(f"there are {num_micro_batches} micro-batches; give 1 or more")
    kind = SCHEDULES[schedule]
    if schedule in ("interleaved", "zero_bubble") and num_micro_batches % num_ranks:
        raise ConfigError(
            f"{schedule} over {num_ranks} ranks needs a multiple of {num_ranks} micro-batches, not "
            f"{num_micro_batches}"
        )
    if schedule == "dualpipev" and num_micro_batches < 2 * num_ranks:
        raise ConfigError(
            f"dualpipev over {num_ranks} ranks needs {2 * num_ranks} micro-batches or more, not "
            f"{num_micro_batches}; zbv takes any number"
        )
    if kind.of_torch is None:
        make = _gpipe if schedule == "gpipe" else _one_forward_one_backward
        found: Iterable[Iterable[Action]] = (make(r, num_ranks, num_micro_batches) for r in range(num_ranks))
    else:
        found = _of_torch(kind.of_torch, num_ranks, num_micro_batches, chunks)
    return Order(schedule, num_micro_batches, rank_of, tuple(tuple(_joined(each, whole)) for each in found))


def _joined(actions: Iterable[Action], whole: tuple[int, ...]) -> Iterator[Action]:
    """Yield the actions of a rank, with the halves of backward of the stages ``whole`` as one."""
    for action in actions:
        if action.stage not in whole or action.kind not in (Kind.INPUT, Kind.WEIGHT):
            yield action
        elif action.kind is Kind.INPUT:
            yield Action(Kind.BACKWARD, action.stage, action.micro_batch)


def _gpipe(rank: int, _num_ranks: int, count: int) -> Iterator[Action]:
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        yield from (Action(kind, rank, number) for number in range(count))


def _one_forward_one_backward(rank: int, num_ranks: int, count: int) -> Iterator[Action]:
    ahead = min(num_ranks - 1 - rank, count)
    yield from (Action(Kind.FORWARD, rank, number) for number in range(ahead))
    for number in range(count):
        if number + ahead < count:
            yield Action(Kind.FORWARD, rank, number + ahead)
        yield Action(Kind.BACKWARD, rank, number)


@dataclass
class _Stage:
    """The attributes of a stage that a schedule of torch reads to make its order."""

    stage_index: int
    num_stages: int
    group_size: int
    group_rank: int = 0
    submod: nn.Module | None = None
    is_first: bool = False
    is_last: bool = False
    has_backward: bool = True


def _of_torch(name: str, num_ranks: int, count: int, chunks: int) -> list[list[Action]]:
    """Return the order of a schedule of torch.

    Raises:
        ConfigError: this version of torch has no such schedule.
    """
    # Not imported at the top: it takes a second, and gemini.parallel is used without pipelines.
    from torch.distributed.pipelining import schedules

    make: Callable[..., Any] | None = getattr(schedules, name, None)
    if make is None:
        raise ConfigError(
            f"this version of torch has no {name}; install a later one, or choose another schedule"
        )
    stages = [
        _Stage(index * num_ranks, chunks * num_ranks, num_ranks, submod=nn.Identity())
        for index in range(chunks)
    ]
    order: dict[int, list[Any]] = make(stages, count).pipeline_order
    return [[_converted(a) for action in order[rank] for a in _apart(action)] for rank in range(num_ranks)]


def _apart(action: Any) -> Iterable[Any]:
    """Return the parts of an action of torch: none, itself, or several that may overlap."""
    return () if action is None else getattr(action, "sub_actions", None) or (action,)


def _converted(action: Any) -> Action:
    return Action(Kind(action.computation_type.value), action.stage_index, action.microbatch_index)


@dataclass(frozen=True)
class Costs:
    """The time for one micro-batch of each part of a pass over all stages of a rank, in any unit;
    ``transfer``: the time to send a tensor to the next rank.
    """

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    transfer: float = 0.0

    def of(self, kind: Kind) -> float:
        """Return the time of an action over all stages of a rank."""
        each = {Kind.FORWARD: self.forward, Kind.INPUT: self.input, Kind.WEIGHT: self.weight}
        return each.get(kind, self.input + self.weight)


@dataclass(frozen=True)
class Simulated:
    """The result of a simulation. By rank: the time ``busy``, and ``peak_activations``, the largest number of
    micro-batches with activations held at once, counted in all stages of a rank. ``waits``: the time that a
    rank is idle before an action.
    """

    seconds: float
    busy: tuple[float, ...]
    peak_activations: tuple[float, ...]
    waits: Mapping[Action, float]

    @property
    def idle(self) -> tuple[float, ...]:
        """The time in which each rank computes nothing: the bubble."""
        return tuple(self.seconds - busy for busy in self.busy)


def simulate(order: Order, costs: Costs | None = None, shares: Sequence[float] | None = None) -> Simulated:
    """Simulate an order in which every rank computes as soon as its input is there. ``shares``: the fraction
    of a rank's work in each stage; None: equal fractions.
    """
    costs = costs or Costs()
    shares = shares or [1 / len(order.stages_of(0))] * order.num_stages

    def takes(action: Action) -> float:
        return costs.of(action.kind) * shares[action.stage]

    return simulate_actions(order, takes, costs.transfer, shares)


def simulate_actions(
    order: Order,
    takes: Callable[[Action], float],
    transfer: float = 0.0,
    shares: Sequence[float] | None = None,
) -> Simulated:
    """Simulate an order with times from ``takes``; ``transfer``: the time to send to another rank."""
    shares = shares or [1 / len(order.stages_of(0))] * order.num_stages
    ends: dict[Action, float] = {}
    waits: dict[Action, float] = {}
    places, clocks = [0] * len(order.by_rank), [0.0] * len(order.by_rank)
    busy = [0.0] * len(order.by_rank)
    advances = True
    while advances:
        advances = False
        for rank, actions in enumerate(order.by_rank):
            while places[rank] < len(actions):
                action = actions[places[rank]]
                ready = _ready_at(action, order, ends, transfer)
                if ready is None:
                    break
                seconds = takes(action)
                waits[action] = max(ready - clocks[rank], 0.0)
                clocks[rank] = ends[action] = clocks[rank] + waits[action] + seconds
                busy[rank] += seconds
                places[rank] += 1
                advances = True
    stuck = [
        str(actions[place])
        for actions, place in zip(order.by_rank, places, strict=True)
        if place < len(actions)
    ]
    if stuck:
        raise ValueError(
            f"the order of {order.schedule} deadlocks: these actions wait for each other: {stuck}"
        )
    peaks = tuple(_peak(actions, shares) for actions in order.by_rank)
    return Simulated(max(clocks), tuple(busy), peaks, waits)


def _ready_at(action: Action, order: Order, ends: dict[Action, float], transfer: float) -> float | None:
    """Return when the input of an action is there; None: not known yet."""
    if action.kind is Kind.WEIGHT:
        return 0.0  # its input half ran before, on this rank
    forward = action.kind is Kind.FORWARD
    if action.stage == (0 if forward else order.num_stages - 1):
        return 0.0
    source = action.stage + (-1 if forward else 1)
    kinds = (Kind.FORWARD,) if forward else (Kind.BACKWARD, Kind.INPUT)
    found = [ends[each] for kind in kinds if (each := Action(kind, source, action.micro_batch)) in ends]
    if not found:
        return None
    apart = order.rank_of[source] != order.rank_of[action.stage]
    return found[0] + (transfer if apart else 0.0)


def _peak(actions: Sequence[Action], shares: Sequence[float]) -> float:
    held = highest = 0.0
    for action in actions:
        if action.kind is Kind.FORWARD:
            held += shares[action.stage]
        highest = max(highest, held)
        if action.kind in (Kind.BACKWARD, Kind.WEIGHT):
            held -= shares[action.stage]
    return highest
