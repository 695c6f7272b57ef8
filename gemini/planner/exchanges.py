"""Exchanges: what data ranks send each other in a step, in the messages in which they send it.

With ZeRO 0 to 2 gradients go in the buckets of the optimizer, and updated weights come back in them. With
ZeRO 3 chunks go: their gradients once a step, their weights before the operators that use them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gemini.planner.chunks import ChunkTable
from gemini.planner.figures import Speeds
from gemini.planner.records import ParameterSize

BUCKET_NUMEL = 2**20  # LowLevelZeroOptimizer's, unless it is told another
_ROUND_BYTES = 64  # about what ranks tell each other before they gather a chunk


class Message(NamedTuple):
    """Gradients that go at a time: their bytes when they are summed, and those of their weights."""

    wide_bytes: int
    own_bytes: int


class Gathers(NamedTuple):
    """What passes gather. ``sizes``: the chunks of each stage, in bytes. ``kept_share``: the share of chunks
    that are whole at the end of a pass; the next pass begins with them."""

    copies: int
    sizes: tuple[tuple[int, ...], ...] = ()
    kept_share: float = 0.0

    def times(self, num_microbatches: int) -> float:
        """Return how often a chunk is gathered in a pass, in the mean over a step: the first pass finds none
        whole, as weights were updated."""
        passes = 2 * num_microbatches
        return (1 + (passes - 1) * (1 - self.kept_share)) / passes

    def seconds(self, stage: int, num_microbatches: int, speeds: Speeds) -> float:
        """Return what a pass of a stage loses: each chunk is gathered beside operators, after a round in
        which ranks agree."""
        if self.copies <= 1 or not self.sizes:
            return 0.0
        agreed = speeds.collective("all_gather", self.copies, _ROUND_BYTES)
        beside = speeds.beside_computing
        once = (agreed + beside("all_gather", self.copies, each / self.copies) for each in self.sizes[stage])
        return self.times(num_microbatches) * sum(once)


def buckets_of(parameters: Sequence[ParameterSize]) -> tuple[Message, ...]:
    """Return the buckets of a rank that has these parameters, the last ones first."""
    found: list[tuple[int, int, int]] = []
    for each in reversed(parameters):
        if not each.trains:
            continue
        if not found or found[-1][0] + each.numel > BUCKET_NUMEL:
            found.append((0, 0, 0))
        numel, wide, own = found[-1]
        nbytes = each.numel * each.itemsize
        found[-1] = numel + each.numel, wide + max(nbytes, 4 * each.numel), own + nbytes
    return tuple(Message(wide, own) for _, wide, own in found)


def chunks_of(parameters: Iterable[ParameterSize], table: ChunkTable | None) -> tuple[Message, ...]:
    """Return the chunks of a rank that has these parameters; one of all where nobody has laid them out, so
    that nothing takes longer than it may."""
    if table is not None:
        trained = [each for each in table.groups if each.trainable]
        return tuple(Message(4 * each.numel, each.numel * each.dtype.itemsize) for each in trained)
    sizes = [each for each in parameters if each.trains]
    numel, own = sum(each.numel for each in sizes), sum(each.numel * each.itemsize for each in sizes)
    return (Message(4 * numel, own),) if sizes else ()


def whole_sizes(parameters: Iterable[ParameterSize], table: ChunkTable | None) -> tuple[int, ...]:
    """Return the bytes of the chunks in which these parameters are; one of all as in :func:`chunks_of`."""
    if table is None:
        return (sum(each.numel * each.itemsize for each in parameters),)
    places = dict.fromkeys(table.place_of[each.key] for each in parameters)
    return tuple(table.groups[place].numel * table.groups[place].dtype.itemsize for place in places)


def kept_share(table: ChunkTable | None) -> float:
    """Return which share of the chunks may stay whole from pass to pass; all where nobody knows."""
    if table is None:
        return 1.0
    total = sum(each.numel * each.dtype.itemsize for each in table.groups)
    return min(table.gather_bytes / max(total, 1), 1.0)


def exchange_seconds(messages: Sequence[Message], copies: int, zero_stage: int, speeds: Speeds) -> float:
    """Return how long gradients, and updated weights, take among data ranks at the end of a step."""
    if copies == 1 or not messages:
        return 0.0
    # Gradients go while backward computes more of them, except for the last ones; weights come when nothing
    # is computed.
    total = speeds.collective("all_to_all", copies, messages[-1].wide_bytes)
    total += sum(speeds.beside_computing("all_to_all", copies, each.wide_bytes) for each in messages[:-1])
    if zero_stage < 3:
        own = [each.wide_bytes if zero_stage == 0 else each.own_bytes for each in messages]
        total += sum(speeds.collective("all_gather", copies, each / copies) for each in own)
    return total
