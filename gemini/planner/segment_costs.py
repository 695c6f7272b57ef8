"""Converts a record into seconds and bytes on one machine, and extrapolates them to any number of samples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gemini.forecast.machine import MachineSpeeds
from gemini.forecast.meter import OperationCosts
from gemini.planner.records import Messages, ParameterSize, Record, Segment, Use
from gemini.runtime.activation.activations import SMALLEST_BYTES

# From the name of a collective in records to its name in machine files, if they differ.
_KIND_OF = {"pass_on": "send", "broadcast": "all_gather", "reduce": "reduce_scatter"}


class Moment(NamedTuple):
    """A :class:`Use` with its computing time."""

    keys: tuple[str, ...]
    seconds: float
    peak_bytes: int
    left_bytes: int
    is_lookup: bool


@dataclass(frozen=True)
class SegmentCosts:
    """The time and memory of a segment for one micro-batch.

    Attributes:
        forward, backward: seconds of computing.
        forward_messages, backward_messages: seconds of collectives, by axis.
        kept_bytes, input_bytes, saved_bytes: as in :class:`Segment`.
        peak_bytes: the larger peak of the two directions; ``forward_peak_bytes`` is that of forward.
        sent_bytes: bytes sent, by axis; ``forward_sent_bytes`` in forward, and ``again_sent_bytes`` by a
            block that is recomputed alone.
        output_bytes, received_bytes, rest_bytes, front_bytes, carried_bytes, half_bytes, recomputes: as in
            :class:`Segment`.
        uses, gradients: computing time between uses of parameters. Extrapolated costs keep the times of
            fewer samples here.
    """

    forward: float
    backward: float
    forward_messages: Mapping[str, float]
    backward_messages: Mapping[str, float]
    kept_bytes: float
    input_bytes: float
    peak_bytes: float
    sent_bytes: Mapping[str, float]
    parameters: tuple[ParameterSize, ...] = field(repr=False, default=())
    uses: tuple[Moment, ...] = field(repr=False, default=())
    gradients: tuple[Moment, ...] = field(repr=False, default=())
    forward_peak_bytes: float = 0.0
    saved_bytes: tuple[float, ...] = ()
    forward_sent_bytes: Mapping[str, float] = field(default_factory=dict)
    again_sent_bytes: Mapping[str, float] = field(default_factory=dict)
    output_bytes: float = 0.0
    received_bytes: float = 0.0
    rest_bytes: float = 0.0
    front_bytes: float = 0.0
    carried_bytes: float = 0.0
    half_bytes: float = 0.0
    recomputes: bool = False

    @property
    def begin_bytes(self) -> float:
        """What a stage that begins here holds of a micro-batch besides what its segments keep."""
        return self.received_bytes + self.front_bytes

    @property
    def storable_bytes(self) -> float:
        """Bytes of saved tensors that are large enough to be stored in chunks."""
        return min(sum(each for each in self.saved_bytes if each >= SMALLEST_BYTES), self.kept_bytes)

    @property
    def num_moments(self) -> tuple[int, int]:
        """Number of chunk accesses in forward and in backward. Backward reads parameters and writes
        gradients."""
        uses = [each for each in self.uses if each.keys]
        reads = sum(not each.is_lookup for each in uses)
        return len(uses), reads + sum(bool(each.keys) for each in self.gradients)

    @property
    def forward_seconds(self) -> float:
        """Seconds of forward, including collectives."""
        return self.forward + sum(self.forward_messages.values())

    @property
    def backward_seconds(self) -> float:
        """Seconds of backward, including collectives."""
        return self.backward + sum(self.backward_messages.values())


@dataclass(frozen=True)
class Speeds:
    """Converts operators and collectives into seconds."""

    machine: MachineSpeeds
    costs: OperationCosts

    def collective(self, name: str, ranks: int, nbytes: float) -> float:
        """Return the seconds of a collective to which each of ``ranks`` ranks gives ``nbytes``; 0 on one
        rank."""
        return self.machine.collectives.seconds(_KIND_OF.get(name, name), ranks, nbytes)

    def beside_computing(self, name: str, ranks: int, nbytes: float) -> float:
        """Return the seconds by which a collective slows down a rank that computes at the same time."""
        if ranks == 1:
            return 0.0
        speed = self.machine.collectives.speed(_KIND_OF.get(name, name), ranks)
        return speed.computing_share.value * speed.seconds(nbytes)

    def segment_costs(self, record: Record) -> tuple[SegmentCosts, ...]:
        """Return the costs of each segment."""
        sizes = {"tp": record.part.tp, "sp": record.part.sp}
        known: dict[int, float] = {}  # by id of the operators: equal blocks share one Counter
        return tuple(self._segment(each, sizes, known) for each in record.segments)

    def _segment(self, segment: Segment, sizes: Mapping[str, int], known: dict[int, float]) -> SegmentCosts:
        uses, gradients = self._moments(segment.uses, known), self._moments(segment.gradients, known)
        return SegmentCosts(
            sum(each.seconds for each in uses),
            sum(each.seconds for each in gradients),
            self._messages(segment.forward.messages, sizes),
            self._messages(segment.backward.messages, sizes),
            segment.kept_bytes,
            segment.input_bytes,
            max(segment.forward.peak_bytes, segment.backward.peak_bytes),
            _sent(segment.forward.messages + segment.backward.messages),
            segment.parameters,
            uses,
            gradients,
            segment.forward.peak_bytes,
            segment.saved_bytes,
            _sent(segment.forward.messages),
            _sent(segment.again_messages),
            segment.output_bytes,
            segment.received_bytes,
            segment.rest_bytes,
            segment.front_bytes,
            segment.carried_bytes,
            segment.half_bytes,
            segment.recomputes,
        )

    def _moments(self, uses: Sequence[Use], known: dict[int, float]) -> tuple[Moment, ...]:
        for each in uses:
            if id(each.operations) not in known:
                known[id(each.operations)] = self._computing(each)
        return tuple(
            Moment(each.keys, known[id(each.operations)], each.peak_bytes, each.left_bytes, each.is_lookup)
            for each in uses
        )

    def _computing(self, work: Use) -> float:
        return sum(self.costs.seconds(each) * count for each, count in work.operations.items())

    def _messages(self, messages: Messages, sizes: Mapping[str, int]) -> dict[str, float]:
        found: defaultdict[str, float] = defaultdict(float)
        for each, count in messages.items():
            found[each.axis] += count * self.collective(each.collective, sizes[each.axis], each.nbytes)
        return dict(found)


def _sent(messages: Messages) -> dict[str, float]:
    found: defaultdict[str, float] = defaultdict(float)
    for each, count in messages.items():
        found[each.axis] += count * each.sent_bytes
    return dict(found)


def scaled(
    less: Sequence[SegmentCosts], more: Sequence[SegmentCosts], samples: int
) -> tuple[SegmentCosts, ...]:
    """Return the costs for ``samples``, extrapolated linearly from those for two samples (``less``) and
    three (``more``)."""
    return tuple(_between(a, b, samples - 2) for a, b in zip(less, more, strict=True))


def _between(one: SegmentCosts, two: SegmentCosts, steps: int) -> SegmentCosts:
    def number(name: str) -> float:
        first, second = float(getattr(one, name)), float(getattr(two, name))
        return max(first + steps * (second - first), 0.0)

    def numbers(name: str) -> dict[str, float]:
        first, second = getattr(one, name), getattr(two, name)
        return {
            axis: first.get(axis, 0.0) + steps * (second.get(axis, 0.0) - first.get(axis, 0.0))
            for axis in {**first, **second}
        }

    return SegmentCosts(
        number("forward"),
        number("backward"),
        numbers("forward_messages"),
        numbers("backward_messages"),
        number("kept_bytes"),
        number("input_bytes"),
        number("peak_bytes"),
        numbers("sent_bytes"),
        one.parameters,
        one.uses,
        one.gradients,
        number("forward_peak_bytes"),
        _saved_of(one.saved_bytes, two.saved_bytes, steps),
        numbers("forward_sent_bytes"),
        numbers("again_sent_bytes"),
        number("output_bytes"),
        number("received_bytes"),
        number("rest_bytes"),
        number("front_bytes"),
        number("carried_bytes"),
        number("half_bytes"),
        one.recomputes,
    )


def _saved_of(one: Sequence[float], two: Sequence[float], steps: int) -> tuple[float, ...]:
    """Return the extrapolated sizes of saved tensors; empty if the two lists differ in length."""
    if len(one) != len(two):
        return ()
    return tuple(max(first + steps * (second - first), 0.0) for first, second in zip(one, two, strict=True))
