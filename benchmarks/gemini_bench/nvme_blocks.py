"""Steps in blocks, the bare disk between them."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gemini import _C
from gemini_bench.nvme_bare import BareDisk, process_io
from gemini_bench.nvme_settings import Settings
from gemini_bench.trainee import Batch, make_batches
from gemini_bench.watch import resident_bytes

Counters = Callable[[], Mapping[str, float]]


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step: forward and backward, the optimizer's step, and everything."""

    loss: float
    compute: float
    update: float
    whole: float


def timed(forward_backward: Callable[[], float], update: Callable[[], object]) -> StepTimes:
    """Run the two halves of a step."""
    begin = time.perf_counter()
    loss = forward_backward()
    middle = time.perf_counter()
    update()
    end = time.perf_counter()
    return StepTimes(loss, middle - begin, end - middle, end - begin)


def batches_of(settings: Settings) -> list[Batch]:
    """Return the batches of one process, the same in all."""
    return make_batches(settings.model, count=settings.num_steps, batch=settings.batch, seq=settings.seq)


def run_blocks(
    step: Callable[[Batch], StepTimes],
    settings: Settings,
    *,
    open_bare: Callable[[], BareDisk] | None = None,
    beside: Callable[[int], float] | None = None,
    counters: Counters = process_io,
) -> dict[str, Any]:
    """Train as ``settings`` say and return times as plain data.

    Each block has ``counters`` per step and, with a bare disk, its seconds before and after the block. It is
    opened after the warmup and closed. ``beside`` takes so many steps elsewhere and returns the seconds of
    one: it too is called before and after each block, for the steps taken here since the last call.
    """
    batches = iter(batches_of(settings))
    losses = [step(next(batches)).loss for _ in range(settings.warmup_steps)]
    blocks = []
    bare = open_bare() if open_bare else None
    before = bare.settled_run() if bare else None
    beside_before = beside(settings.warmup_steps) if beside else None
    for _ in range(settings.blocks):
        losses.append(step(next(batches)).loss)
        start = counters()
        steps = [step(next(batches)) for _ in range(settings.block_steps)]
        end = counters()
        losses += [one.loss for one in steps]
        after = bare.settled_run() if bare else None
        beside_after = beside(1 + settings.block_steps) if beside else None
        blocks.append(
            {
                **{part: [getattr(one, part) for one in steps] for part in ("compute", "update", "whole")},
                "per_step": {name: (end[name] - start[name]) / len(steps) for name in end},
                "bare_seconds": [before, after] if bare else [],
                "beside_seconds": [beside_before, beside_after] if beside else [],
            }
        )
        before, beside_before = after, beside_after
    if bare:
        bare.close()
    return {"losses": losses, "blocks": blocks, "bare_bytes": 2 * bare.nbytes if bare else 0}


def held_bytes() -> int:
    """Return the resident bytes of this process, without what was freed and the allocator still keeps."""
    gc.collect()
    _C.malloc_trim()
    return resident_bytes()


def median_of(blocks: Sequence[Mapping[str, Any]], part: str) -> float:
    """Return the median of a part of the step over the steps of all ``blocks``."""
    return float(statistics.median(value for block in blocks for value in block[part]))


def bare_seconds(block: Mapping[str, Any]) -> float:
    """Return the mean of the bare disk's seconds before and after a block."""
    return statistics.fmean(block["bare_seconds"])
