"""Leases: tensors over windows that may outlive the operator they were made for."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Protocol

import torch

from gemini.chunk import Chunk, ChunkKind
from gemini.errors import OutOfBudgetError
from gemini.memstats.trace import BACKWARD
from gemini.runtime.activation.chunk_pool import too_large_now
from gemini.runtime.activation.keep_plan import Fate
from gemini.runtime.gate.gate import Gate


class Tenant(Protocol):
    """What a lease keeps alive: ``tensor`` is its id in the chunk table, ``fate`` what to note before it is
    fetched."""

    @property
    def tensor(self) -> int: ...

    @property
    def chunk(self) -> Chunk: ...

    @property
    def fate(self) -> Fate | None: ...


def pin(gate: Gate, tenant: Tenant) -> None:
    """Fetch the tenant's chunk and pin it.

    Raises:
        OutOfBudgetError, IoError, EvictedAccessError: as a PreOp; nothing is pinned.
    """
    try:
        gate.pre_op((tenant.tensor,))
    except OutOfBudgetError as error:
        is_saved = tenant.chunk.spec.kind is ChunkKind.ACTIVATION
        too_large = too_large_now(gate.chunks, tenant.chunk) if is_saved else None
        if too_large is None:
            raise
        raise too_large from error


class Leases:
    """Pins that last as long as a storage does.

    Who gets a saved tensor may keep it: checkpointing runs a whole block again from one, a graph of second
    derivatives saves it anew. So the pin is not the node's but the storage's: it ends when the last tensor
    over it is gone. That may be at any moment and on any thread; it is only noted then, and the next PreOp
    unpins.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._living: dict[int, tuple[weakref.ref[object], Tenant]] = {}  # by the id of the reference
        self.ended: deque[int] = deque()  # tensors to unpin, once per entry
        gate.settle_before(self.ended, self.settle)

    def storage(self, tenant: Tenant) -> torch.UntypedStorage:
        """Fetch the tenant's chunk and pin it for the life of the storage that is returned, its window.

        Raises:
            OutOfBudgetError, IoError, EvictedAccessError: as a PreOp; nothing is pinned.
        """
        gate = self._gate
        if torch._C._current_graph_task_id() != -1:
            gate.enter(BACKWARD)
        if tenant.fate is not None:
            tenant.fate.settle(gate.chunks.table, tenant.chunk.id)
        pin(gate, tenant)
        try:
            storage, life = gate.chunks.lend(tenant.chunk)
            lease = weakref.ref(life, self._end)
            self._living[id(lease)] = lease, tenant
        except BaseException:
            gate.post_op((tenant.tensor,), False)
            raise
        return storage

    def settle(self) -> None:
        """Unpin what nobody looks at any more."""
        while self.ended:
            self._gate.chunks.release((self.ended.popleft(),), dirty=False)

    def repin(self) -> None:
        """Pin again after everything was unpinned; nothing may have been evicted meanwhile."""
        self.ended.clear()
        living = [tenant.tensor for _, tenant in list(self._living.values())]
        if living:
            self._gate.chunks.acquire(living, traced=False)

    def _end(self, lease: weakref.ref[object]) -> None:
        _, tenant = self._living.pop(id(lease))
        self.ended.append(tenant.tensor)
