"""Shortage: what follows where the computing device runs out of memory within all budgets.

Non-model data needs more than was measured, or somebody else has the memory. See docs/notes/out-of-memory.md.
"""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakSet

import torch
from torch import nn
from torch.autograd.graph import increment_version

from gemini import _C
from gemini.device import asked_bytes, ran_out_of_memory
from gemini.runtime.param import ManagedParameter

if TYPE_CHECKING:
    from gemini.runtime.gemini_mgr import GeminiManager

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Shortage:
    """Takes from model data what other data lacks on DEVICE, for good. Not thread-safe.

    Over several ranks it does nothing: their plans have to be alike.
    """

    def __init__(self, manager: GeminiManager) -> None:
        self.count = 0  # how often memory ran out
        self.withheld_bytes = 0
        self.modules: WeakSet[nn.Module] = WeakSet()  # whose parameters graphs may have saved
        self._manager = manager

    @property
    def share_bytes(self) -> int:
        """What model data takes of DEVICE at most, but for what an operator holds."""
        manager = self._manager
        needed = max(manager.context.size.total_bytes, manager.chunks.table.usage(_C.Tier.DEVICE))
        return max(0, min(manager.order.room_bytes, needed))

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
        if self._manager.sharding is not None:
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
        self._manager.chunks.device.release_cache()
        self._manager.chunks.make_room()

    def _note(self, error: Exception) -> None:
        """Halve the share of model data, or lower it by what was asked for if that is more; to nothing where
        it is less than a chunk. So no more than a few shortages lower it before there is nothing to give."""
        manager = self._manager
        self.count += 1
        if manager.sharding is not None:
            return
        manager.abandon()  # what ran so far does not say what an iteration does
        self.end_residence()
        before = self.share_bytes
        after = max(0, min(before // 2, before - asked_bytes(error)))
        if after < manager.context.size.largest_chunk_bytes:
            after = 0
        if before == 0:
            return
        self.withheld_bytes += manager.order.room_bytes - after
        manager.evaluations.withhold(self.withheld_bytes)
        manager.order.withhold(self.withheld_bytes)
        manager.order.resume(manager.pending.all())
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
        manager = self._manager
        if not manager.resident:
            return
        manager.resident = manager.snapshot.residence(False)
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
