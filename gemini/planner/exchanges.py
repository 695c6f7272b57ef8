"""Messages among data-parallel ranks in a step, and the time that they take.

With ZeRO 0 to 2, ranks exchange gradients in the optimizer's buckets and gather updated weights in the same
buckets. With ZeRO 3 they exchange chunks: gradients once per step, weights before the operators that use
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gemini.planner.chunks import ChunkTable
from gemini.planner.records import ParameterSize
from gemini.planner.segment_costs import Speeds

BUCKET_NUMEL = 2**20  # the default of LowLevelZeroOptimizer
_ROUND_BYTES = 64  # approximate message with which ranks agree before they gather a chunk


class GradientBucket(NamedTuple):
    """Gradients that are exchanged together: their number, their bytes in the type in which they are summed,
    and the bytes of their weights."""

    numel: int
    wide_bytes: int
    own_bytes: int


class Gathers(NamedTuple):
    """The chunks that forward and backward passes gather.

    Attributes:
        sizes: bytes of the chunks of each stage.
        kept_share: the share of chunks that are still whole at the end of a pass; the next pass need not
            gather them.
    """

    copies: int
    sizes: tuple[tuple[int, ...], ...] = ()
    kept_share: float = 0.0

    def times(self, num_microbatches: int) -> float:
        """Return how often a chunk is gathered per pass, on average over a step. In the first pass no chunk
        is whole, because weights were updated."""
        passes = 2 * num_microbatches
        return (1 + (passes - 1) * (1 - self.kept_share)) / passes

    def seconds(self, stage: int, num_microbatches: int, speeds: Speeds) -> float:
        """Return the seconds that a pass of a stage loses to gathering. Each chunk is gathered while
        operators run, after a round in which ranks agree."""
        if self.copies <= 1 or not self.sizes:
            return 0.0
        agreed = speeds.collective("all_gather", self.copies, _ROUND_BYTES)
        beside = speeds.beside_computing
        once = (agreed + beside("all_gather", self.copies, each / self.copies) for each in self.sizes[stage])
        return self.times(num_microbatches) * sum(once)


def buckets_of(parameters: Sequence[ParameterSize]) -> tuple[GradientBucket, ...]:
    """Return the gradient buckets of a rank with these parameters, those of the last parameters first."""
    found: list[tuple[int, int, int]] = []
    for each in reversed(parameters):
        if not each.trains:
            continue
        if not found or found[-1][0] + each.numel > BUCKET_NUMEL:
            found.append((0, 0, 0))
        numel, wide, own = found[-1]
        nbytes = each.numel * each.itemsize
        found[-1] = numel + each.numel, wide + max(nbytes, 4 * each.numel), own + nbytes
    return tuple(GradientBucket(*each) for each in found)


def chunks_of(parameters: Iterable[ParameterSize], table: ChunkTable | None) -> tuple[GradientBucket, ...]:
    """Return the gradient chunks of a rank with these parameters. Without a table: one chunk of everything,
    so that the time is not overestimated."""
    if table is not None:
        trained = [each for each in table.groups if each.trainable]
        return tuple(
            GradientBucket(each.numel, 4 * each.numel, each.numel * each.dtype.itemsize) for each in trained
        )
    sizes = [each for each in parameters if each.trains]
    numel, own = sum(each.numel for each in sizes), sum(each.numel * each.itemsize for each in sizes)
    return (GradientBucket(numel, 4 * numel, own),) if sizes else ()


def whole_sizes(parameters: Iterable[ParameterSize], table: ChunkTable | None) -> tuple[int, ...]:
    """Return the bytes of the chunks that hold these parameters; without a table, one chunk of everything."""
    if table is None:
        return (sum(each.numel * each.itemsize for each in parameters),)
    places = dict.fromkeys(table.place_of[each.key] for each in parameters)
    return tuple(table.groups[place].numel * table.groups[place].dtype.itemsize for place in places)


def kept_share(table: ChunkTable | None) -> float:
    """Return the share of the chunks that may stay whole from pass to pass; 1.0 without a table."""
    if table is None:
        return 1.0
    total = sum(each.numel * each.dtype.itemsize for each in table.groups)
    return min(table.gather_bytes / max(total, 1), 1.0)


def exchange_seconds(
    buckets: Sequence[GradientBucket], copies: int, zero_stage: int, speeds: Speeds
) -> float:
    """Return the seconds at the end of a step that data ranks spend on gradients and updated weights."""
    if copies == 1 or not buckets:
        return 0.0
    # Gradients are sent while backward still computes, except for the last message. Nothing is computed
    # while updated weights arrive.
    total = speeds.collective("all_to_all", copies, buckets[-1].wide_bytes)
    total += sum(speeds.beside_computing("all_to_all", copies, each.wide_bytes) for each in buckets[:-1])
    if zero_stage < 3:
        own = [each.wide_bytes if zero_stage == 0 else each.own_bytes for each in buckets]
        total += sum(speeds.collective("all_gather", copies, each / copies) for each in own)
    return total
