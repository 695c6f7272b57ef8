"""Weights written one after another: while the next is read, chunks leave DEVICE to make room for it."""

from __future__ import annotations

import torch

from gemini.runtime.adopt import write_values
from gemini.runtime.gate.gradients import MASTER
from gemini.runtime.gemini_mgr import GeminiManager
from gemini.runtime.storage.model_storage import ChunkGroup, ManagedSlot, ModelStorage

_AHEAD_BYTES = 32 * 2**20  # keeps a disk busy for about as long as a tensor is read
_AHEAD_SHARE = 8  # of DEVICE at most one in so many: what is being filled stays
_FILLED_SHARE = 0.75  # of DEVICE, where steps will leave more to other memory than reading takes


class Filling:
    """Gives the parameters of a model that has no values yet theirs, in any order; for one thread. Call
    :meth:`finish` after the last.

    A write that finds DEVICE full waits until a chunk has left. So each starts what will have to leave for
    those after it, and returns while that is under way: within the budget, and nothing where all fits.
    """

    def __init__(self, storage: ModelStorage, manager: GeminiManager) -> None:
        self._manager = manager
        budget_bytes = manager.chunks.budgets.device_bytes
        self._later_limit_bytes = manager.order.plan.device_limit_bytes
        self._limit_bytes = max(self._later_limit_bytes, int(_FILLED_SHARE * budget_bytes))
        self._ahead_bytes = min(_AHEAD_BYTES, self._limit_bytes // _AHEAD_SHARE)
        self._to_come = {
            chunk: nbytes for group in storage.groups for chunk, nbytes in _chunks_of(group).items()
        }
        self._to_come_bytes = sum(self._to_come.values())
        manager.chunks.table.set_limit(self._limit_bytes)

    def write(self, slot: ManagedSlot, values: torch.Tensor) -> None:
        """Do what :func:`gemini.runtime.write_values` does.

        Raises:
            IoError: also where a chunk of an earlier write cannot leave; no value is lost.
        """
        write_values(slot, values, self._manager)
        for chunk in _chunks_of(slot.group):
            self._to_come_bytes -= self._to_come.pop(chunk, 0)
        chunks = self._manager.chunks
        too_much = chunks.usages()[0] + self._to_come_bytes - self._limit_bytes
        if too_much > 0:
            chunks.make_way(min(self._ahead_bytes, too_much), self._limit_bytes)

    def finish(self) -> None:
        """Have the model's own limit in force again; what exceeds it leaves when there is a step."""
        self._manager.chunks.table.set_limit(self._later_limit_bytes)


def _chunks_of(group: ChunkGroup) -> dict[int, int]:
    """Return the bytes of the chunks that values of a group are written to, by id."""
    chunks = [group.updated[0], *(piece.chunks[MASTER] for piece in group.pieces if piece.has_master)]
    return {chunk.id: chunk.spec.nbytes for chunk in chunks}
