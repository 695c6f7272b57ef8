"""Room for keys and values in chunks of a managed model: arrays that fill from their beginning, beside the
weights and within the same budgets.

An array has contiguous addresses, and only chunks with content take memory or disk. Plans do not cover these
chunks, because the length of texts is not known: they leave a part of DEVICE free, and chunks beyond it
compete with the weights that no plan keeps. The chunk table knows that a pass uses the chunks of the last one
(a certain choice, docs/notes/choices.md).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gemini.chunk import Chunk
from gemini.chunk.chunk import ChunkKind, ChunkSpec, whole_blocks
from gemini.errors import ConfigError
from gemini.runtime.activation.saved_tensors import Leases
from gemini.runtime.gate.gate import TensorState
from gemini.runtime.manager import GeminiManager
from gemini.system.config import format_bytes


class KVArray:
    """``nbytes`` of addresses in chunks of ``chunk_bytes``. ``tensor``: all of it, uint8; only pinned parts
    may be touched. A room may use less of an array than exists (:meth:`shorten`)."""

    def __init__(self, manager: GeminiManager, parts: Sequence[Chunk]) -> None:
        self.chunks = tuple(parts)
        self.chunk_bytes = parts[0].spec.nbytes
        self.nbytes = len(parts) * self.chunk_bytes
        self.tensor: torch.Tensor = manager.chunks.join(parts).tensor if len(parts) > 1 else parts[0].tensor
        self._tensors = [manager.chunks.add_tensor(part) for part in parts]
        manager.chunks.add_choice([[part.id] for part in parts], certain=True)

    @property
    def tensors(self) -> list[int]:
        """All its tensors in the chunk table, one per chunk."""
        return self._tensors

    def shorten(self, count: int) -> None:
        """Use only the first ``count`` chunks."""
        self.nbytes = count * self.chunk_bytes

    def holding(self, begin: int, end: int) -> list[int]:
        """Return the chunk-table tensors that contain bytes from ``begin`` to ``end``."""
        return self._tensors[begin // self.chunk_bytes : -(-end // self.chunk_bytes)]

    def within(self, begin: int, end: int) -> list[int]:
        """Return the chunk-table tensors that lie completely between ``begin`` and ``end``."""
        return self._tensors[-(-begin // self.chunk_bytes) : end // self.chunk_bytes]

    def part(self, begin: int, end: int) -> _Part:
        """Return the chunks with the bytes from ``begin`` to ``end``, to be leased."""
        return _Part(self.chunks[begin // self.chunk_bytes], tuple(self.holding(begin, end)))


@dataclass(frozen=True)
class _Part:
    """Consecutive chunks of an array, as a tenant of leases."""

    chunk: Chunk
    tensors: tuple[int, ...]
    fate: None = None


class _ArrayPool:
    """Arrays that rooms of one model pass on to later rooms, because chunks are never removed.

    ``taken``: arrays of the room that is ``open``; that room may be garbage-collected without being closed.
    """

    def __init__(self, manager: GeminiManager) -> None:
        self._spare: list[KVArray] = []
        self._lent: list[KVArray] = []  # of closed rooms, with live tensors over them
        self.taken: list[KVArray] = []
        self.open: weakref.ref[KVRoom] | None = None
        self.leases = Leases(manager)
        self._manager = manager

    @classmethod
    def of(cls, manager: GeminiManager) -> _ArrayPool:
        """Return the pool of a model; create it at the first call."""
        found = vars(manager).get("kv_pool")
        if not isinstance(found, cls):
            found = cls(manager)
            manager.keep_kv_pool(found)
        return found

    @property
    def spare_bytes(self) -> int:
        """The bytes of all arrays that no room uses."""
        return sum(len(array.chunks) * array.chunk_bytes for array in self._spare)

    def spare(self, chunk_bytes: int, count: int) -> KVArray | None:
        """Return the smallest unused array of at least ``count`` chunks; None if there is none."""
        fitting = [one for one in self._spare if one.chunk_bytes == chunk_bytes and len(one.chunks) >= count]
        if not fitting:
            return None
        found = min(fitting, key=lambda one: len(one.chunks))
        self._spare.remove(found)
        return found

    def put_back(self, array: KVArray) -> None:
        """Take back an array that its room no longer needs."""
        self.taken.remove(array)
        self._lent.append(array)
        self._settle()

    def _settle(self) -> None:
        """Free the content of returned arrays that no tensor uses any longer."""
        arrays, self._lent = self._lent, []
        state = self._manager.chunks.table.tensor_state
        for array in arrays:
            self.free(array.tensors)
            is_lent = any(state(tensor) == TensorState.COMPUTE for tensor in array.tensors)
            (self._lent if is_lent else self._spare).append(array)

    def tidy(self) -> None:
        """Take back the arrays of a garbage-collected room, and settle returned ones."""
        if self.open is not None and self.open() is None:
            self.close_room()
        self._settle()

    def free(self, tensors: Sequence[int]) -> None:
        """Free the content of ``tensors``, except for those in use."""
        if not self._manager.is_closed:
            state = self._manager.chunks.table.tensor_state
            self._manager.settle()
            held = [tensor for tensor in tensors if state(tensor) == TensorState.HOLD]
            if held:
                self._manager.chunks.free(held)

    def close_room(self) -> None:
        """Close the open room: its arrays become spare, and plans get all of DEVICE again."""
        manager, taken = self._manager, self.taken
        self.open, self.taken = None, []
        if manager.is_closed:
            return
        self._lent += taken
        self._settle()
        context = manager.context
        capacity = replace(
            context.capacity,
            device_bytes=context.capacity.device_bytes + context.other_device_bytes,
            disk_bytes=manager.chunks.budgets.disk_bytes,
        )
        manager.run_pending()
        manager.replan(replace(context, capacity=capacity, other_bytes=0, other_device_bytes=0))


class KVRoom:
    """``nbytes`` for keys and values until :meth:`close`; plans leave ``device_bytes`` of DEVICE to them. For
    the thread that runs the model, between passes; arrays may be created and used within a pass.

    Raises:
        ConfigError: chunks are cut among ranks, or the device cannot cut arrays into chunks, or the tiers
            below DEVICE are too small for the rest.
        OutOfBudgetError, IoError: the tiers cannot hold so much beside the model; nothing was changed.
    """

    def __init__(
        self, manager: GeminiManager, nbytes: int, device_bytes: int, *, raises_disk: bool = False
    ) -> None:
        """``raises_disk``: the DISK budget is a default, so it grows with new arrays."""
        manager.refuse_closed()
        self._pool = _ArrayPool.of(manager)
        self._pool.tidy()
        chunks, before = manager.chunks, manager.context
        self.nbytes, self.device_bytes = nbytes, min(nbytes, device_bytes)
        self.block_bytes = chunks.device.block_bytes
        self._manager = manager
        self._raises_disk = raises_disk and chunks.budgets.disk_dir is not None
        _refuse(manager, nbytes - self.device_bytes, self.device_bytes)
        more = max(0, nbytes - self._pool.spare_bytes) if self._raises_disk else 0
        capacity = replace(before.capacity, disk_bytes=chunks.budgets.disk_bytes + more)
        size = before.size
        before.policy.warmup_plan(replace(size, total_bytes=size.total_bytes + nbytes), capacity)
        left = replace(capacity, device_bytes=capacity.device_bytes - self.device_bytes)
        before.policy.warmup_plan(size, left)
        below_bytes = max(0, nbytes - self.device_bytes - chunks.budgets.host_bytes)
        chunks.prepare([self._spec(nbytes)], below_bytes, more)
        manager.run_pending()
        manager.replan(
            replace(before, capacity=left, other_bytes=nbytes, other_device_bytes=self.device_bytes)
        )
        self._pool.open = weakref.ref(self)

    @property
    def usable_device_bytes(self) -> int:
        """The DEVICE bytes that one operator may use."""
        context = self._manager.context
        limit = self._manager.order.plan.device_limit_bytes + context.other_device_bytes
        return min(limit, self._manager.chunks.budgets.device_bytes)

    def array(self, nbytes: int, chunk_bytes: int) -> KVArray:
        """Return an array of at least ``nbytes``, without content.

        Raises:
            ConfigError, IoError: there is no place for it.
        """
        spec = self._spec(chunk_bytes)
        count = -(-nbytes // spec.nbytes)
        array = self._pool.spare(spec.nbytes, count) or self._made(spec, count)
        array.shorten(count)
        self._pool.taken.append(array)
        return array

    def put_back(self, array: KVArray) -> None:
        """Return ``array``, which is no longer needed."""
        self._pool.put_back(array)

    def fetch(self, tensors: list[int]) -> None:
        """Pin ``tensors`` on DEVICE until :meth:`let_go`. Raises as a PreOp."""
        self._manager.pre_op(tensors)

    def let_go(self, tensors: list[int], written: list[int]) -> None:
        """Unpin ``tensors``; those in ``written`` were written."""
        self._manager.post_ops(tensors, written)

    def lend(self, array: KVArray, begin: int, end: int) -> tuple[torch.UntypedStorage, int]:
        """Return a storage with the bytes of ``array`` from ``begin`` to ``end``, and the offset of ``begin``
        in it. The chunks stay on DEVICE while the storage lives. Raises as a PreOp."""
        return self._pool.leases.storage(array.part(begin, end)), begin % array.chunk_bytes

    def free(self, tensors: Sequence[int]) -> None:
        """Free the content of ``tensors``, except for those in use."""
        self._pool.free(tensors)

    def close(self) -> None:
        """Return all arrays, and give plans all of DEVICE again. Idempotent."""
        if self._pool.open is not None and self._pool.open() is self:
            self._pool.close_room()

    def _spec(self, nbytes: int) -> ChunkSpec:
        numel = whole_blocks(nbytes, self.block_bytes)
        return ChunkSpec(ChunkKind.KV, numel, torch.uint8, self.block_bytes)

    def _made(self, spec: ChunkSpec, count: int) -> KVArray:
        chunks = self._manager.chunks
        specs = [replace(spec, follows=index > 0) for index in range(count)]
        more = count * spec.nbytes if self._raises_disk else 0
        chunks.prepare(specs, 0, more)
        chunks.expect(specs, more)
        return KVArray(self._manager, [chunks.add_chunk(each) for each in specs])


def _refuse(manager: GeminiManager, below_bytes: int, device_bytes: int) -> None:
    """Raise ConfigError if this model cannot have chunks of keys and values, if ``below_bytes`` of them do
    not fit below DEVICE, or if DEVICE has no ``device_bytes`` for them."""
    budgets = manager.chunks.budgets
    if manager.is_sharded:
        raise ConfigError(
            "the model's chunks are sharded over ranks, so keys and values must stay on "
            "DEVICE; leave kv_device_bytes out"
        )
    if not manager.chunks.device.cuts_chunks:
        raise ConfigError(
            f"keys and values cannot lie below DEVICE of {manager.chunks.device.name}; give them as much of "
            "DEVICE as they may take in all"
        )
    if manager.context.other_bytes:
        raise ConfigError("this model already has memory for keys and values; close it first")
    if device_bytes >= budgets.device_bytes:
        raise ConfigError(
            f"kv_device_bytes is {format_bytes(device_bytes)} of device_bytes "
            f"{format_bytes(budgets.device_bytes)}; nothing is left for weights: lower kv_device_bytes"
        )
    if budgets.disk_dir is None and below_bytes > budgets.host_bytes:
        raise ConfigError(
            f"{format_bytes(below_bytes)} of keys and values have to lie below DEVICE, and HOST has "
            f"{format_bytes(budgets.host_bytes)}; raise host_bytes to that, or give disk_dir"
        )
