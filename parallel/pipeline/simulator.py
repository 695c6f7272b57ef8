"""A schedule against a clock: how long ranks are idle, and how many activations they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemini.parallel.pipeline.orders import Action, Kind, Order


@dataclass(frozen=True)
class Costs:
    """What each half of a pass takes in the whole of what a rank has, for one micro-batch, in any unit of
    time; ``transfer``: what a tensor takes to the next rank."""

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    transfer: float = 0.0

    def of(self, kind: Kind) -> float:
        """Return what an action takes over all stages of a rank."""
        each = {Kind.FORWARD: self.forward, Kind.INPUT: self.input, Kind.WEIGHT: self.weight}
        return each.get(kind, self.input + self.weight)


@dataclass(frozen=True)
class Simulated:
    """``idle`` and ``busy``: time by rank; ``peak_activations`` by rank: of how many micro-batches it holds
    the activations, counted in all stages of a rank."""

    seconds: float
    busy: tuple[float, ...]
    peak_activations: tuple[float, ...]

    @property
    def idle(self) -> tuple[float, ...]:
        """How long each rank computes nothing: the bubble."""
        return tuple(self.seconds - busy for busy in self.busy)


def simulate(order: Order, costs: Costs | None = None, shares: Sequence[float] | None = None) -> Simulated:
    """Return what happens if every rank computes as soon as its input is there. ``shares``: which part of a
    rank's work each stage is; None: equal parts."""
    costs = costs or Costs()
    chunks = len(order.stages_of(0))
    shares = shares or [1 / chunks] * order.num_stages
    ends: dict[Action, float] = {}
    places, clocks = [0] * len(order.by_rank), [0.0] * len(order.by_rank)
    busy = [0.0] * len(order.by_rank)
    advances = True
    while advances:
        advances = False
        for rank, actions in enumerate(order.by_rank):
            while places[rank] < len(actions):
                action = actions[places[rank]]
                ready = _ready_at(action, order, ends, costs)
                if ready is None:
                    break
                takes = costs.of(action.kind) * shares[action.stage]
                clocks[rank] = ends[action] = max(clocks[rank], ready) + takes
                busy[rank] += takes
                places[rank] += 1
                advances = True
    stuck = [
        str(actions[place])
        for actions, place in zip(order.by_rank, places, strict=True)
        if place < len(actions)
    ]
    if stuck:
        raise ValueError(f"the order of {order.schedule} waits for itself: {stuck}")
    return Simulated(max(clocks), tuple(busy), tuple(_peak(actions, shares) for actions in order.by_rank))


def _ready_at(action: Action, order: Order, ends: dict[Action, float], costs: Costs) -> float | None:
    """Return when the input of an action is there; None: not known yet."""
    if action.kind is Kind.WEIGHT:
        return 0.0  # its other half went before, on this rank
    forward = action.kind is Kind.FORWARD
    if action.stage == (0 if forward else order.num_stages - 1):
        return 0.0
    source = action.stage + (-1 if forward else 1)
    kinds = (Kind.FORWARD,) if forward else (Kind.BACKWARD, Kind.INPUT)
    found = [ends[each] for kind in kinds if (each := Action(kind, source, action.micro_batch)) in ends]
    if not found:
        return None
    apart = order.rank_of[source] != order.rank_of[action.stage]
    return found[0] + (costs.transfer if apart else 0.0)


def _peak(actions: Sequence[Action], shares: Sequence[float]) -> float:
    held = highest = 0.0
    for action in actions:
        if action.kind is Kind.FORWARD:
            held += shares[action.stage]
        highest = max(highest, held)
        if action.kind in (Kind.BACKWARD, Kind.WEIGHT):
            held -= shares[action.stage]
    return highest
