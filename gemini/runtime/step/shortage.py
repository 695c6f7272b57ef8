"""Shortage: what follows where the computing device runs out of memory within all budgets.

Non-model data needs more than was measured, or somebody else has the memory. See docs/notes/out-of-memory.md.
"""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import nn
from torch.autograd.graph import increment_version

from gemini import _C
from gemini.chunk import ChunkManager
from gemini.placement import ModelDataSize
from gemini.runtime.intercept.tensors import ManagedParameter
from gemini.system.device import asked_bytes, ran_out_of_memory

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Taker(Protocol):
    """Model data, as far as it takes memory that others lack."""

    chunks: ChunkManager
    resident: bool

    @property
    def is_sharded(self) -> bool: ...

    @property
    def size(self) -> ModelDataSize: ...

    @property
    def room_bytes(self) -> int:
        """What model data may take of DEVICE beside the non-model data that was measured."""
        ...

    def abandon(self) -> None:
        """Go on without recording: what ran so far does not say what an iteration does."""

    def end_residence(self) -> None:
        """Let chunks leave DEVICE again."""

    def withhold(self, nbytes: int) -> None:
        """Have plans leave ``nbytes`` of DEVICE free beyond their reserves."""


class Shortage:
    """Takes from model data what other data lacks on DEVICE, for good. Not thread-safe.

    Over several ranks it does nothing: their plans have to be alike.
    """

    def __init__(self, taker: Taker) -> None:
        self.count = 0  # how often memory ran out
        self.withheld_bytes = 0
        self.modules: WeakSet[nn.Module] = WeakSet()  # whose parameters graphs may have saved
        self._taker = taker

    @property
    def share_bytes(self) -> int:
        """What model data takes of DEVICE at most, but for what an operator holds."""
        taker = self._taker
        needed = max(taker.size.total_bytes, taker.chunks.table.usage(_C.Tier.DEVICE))
        return max(0, min(taker.room_bytes, needed))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Where memory runs out in the block, lower what model data may take; within blocks of this kind
        once."""
        count = self.count
        try:
            yield
        except Exception as error:
            if self.count == count and ran_out_of_memory(error):
                self._note(error)
            raise

    def twice(self, run: Callable[[], T]) -> T:
        """Call ``run``; where memory runs out, make room and call it once more. For what goes on where it
        stopped, or only reads."""
        if self._taker.is_sharded:
            return run()
        try:
            with self.watched():
                return run()
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            drop_locals(error)
        self.make_room()
        with self.watched():
            return run()

    def make_room(self) -> None:
        """Give back what torch keeps for later and what model data takes beyond its share.

        Raises:
            OutOfBudgetError, IoError: as :meth:`gemini.chunk.ChunkManager.acquire`.
        """
        gc.collect()
        self._taker.chunks.device.release_cache()
        self._taker.chunks.make_room()

    def _note(self, error: Exception) -> None:
        """Halve the share of model data, or lower it by what was asked for if that is more; to nothing where
        it is less than a chunk. So no more than a few shortages lower it before there is nothing to give."""
        taker = self._taker
        self.count += 1
        if taker.is_sharded:
            return
        taker.abandon()
        self.end_residence()
        before = self.share_bytes
        after = max(0, min(before // 2, before - asked_bytes(error)))
        if after < taker.size.largest_chunk_bytes:
            after = 0
        if before == 0:
            return
        self.withheld_bytes += taker.room_bytes - after
        taker.withhold(self.withheld_bytes)
        logger.warning(
            "the computing device ran out of memory: from now on model data takes %d bytes of it, not %d, "
            "beside what operators hold; a smaller batch or torch.utils.checkpoint needs less (%s)",
            after,
            before,
            str(error).partition("\n")[0],
        )

    def end_residence(self) -> None:
        """Let chunks leave DEVICE again. Graphs that were made while none could know nothing of that: their
        backward pass is refused."""
        if not self._taker.resident:
            return
        self._taker.end_residence()
        params = [param for module in self.modules for param in module.parameters()]
        with torch._C.DisableTorchFunctionSubclass():
            increment_version([param for param in params if isinstance(param, ManagedParameter)])


def drop_locals(error: BaseException) -> None:
    """Forget what the frames held that ``error`` went through: activations, of which it keeps all alive."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        left += [one.__cause__, one.__context__]
