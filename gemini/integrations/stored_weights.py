"""Weights that stay in a checkpoint's safetensors: chunks are read from there until they are written.

The files are the DISK tier of these chunks: no copy is written, and nothing is read before it is used. A
chunk that is changed, for example by the first step, moves to the file of the DISK tier.

The loader gets tensors that are not read yet. A tensor that it only assigns, or concatenates with others,
stays unread; any other operator, such as a cast, reads it, and its result is written into chunks as usual.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from gemini import _C
from gemini.chunk import Chunk
from gemini.chunk.chunk import CutChunk
from gemini.chunk.manager import Parts
from gemini.errors import InputError
from gemini.integrations.safetensors_files import SafetensorsFiles, StoredTensor
from gemini.runtime.build import Built
from gemini.runtime.growth import Filling
from gemini.runtime.manager import GeminiManager
from gemini.runtime.storage.model_storage import ChunkGroup, ManagedSlot, ModelStorage
from gemini.system.input_files import AGAIN

_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_RESHAPES = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
_MOST_PIECES = 2**16


class Piece(NamedTuple):
    """Bytes of a tensor that are in a file. ``offset``: their start within ``stored``. ``begin``: their start
    within the tensor.
    """

    stored: StoredTensor
    offset: int
    begin: int
    nbytes: int


class UnreadTensor(torch.Tensor):
    """A tensor of a file that has not been read, or a concatenation of such tensors. An operator on it reads
    it.
    """

    pieces: Sequence[Piece]
    _read: Callable[[], torch.Tensor]

    @staticmethod
    def __new__(cls, stored: StoredTensor) -> UnreadTensor:
        """Return an unread tensor for ``stored``."""
        pieces = [Piece(stored, 0, 0, stored.nbytes)]
        return cls._made(stored.shape, stored.dtype, pieces, lambda: stored.reads.take(stored))

    def __init__(self, stored: StoredTensor) -> None:
        """Do nothing: ``__new__`` has made it."""

    @classmethod
    def _made(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        pieces: Sequence[Piece],
        read: Callable[[], torch.Tensor],
    ) -> UnreadTensor:
        made: UnreadTensor = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=dtype, device=torch.device("cpu")
        )
        made.pieces, made._read = pieces, read
        return made

    def read(self) -> torch.Tensor:
        """Return a copy in memory. Raises CheckpointError."""
        return self._read()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Read the arguments and run ``func``. Operators that only pass a tensor on or concatenate tensors,
        as loaders do with experts that are stored one by one, return unread tensors.
        """
        if func in _SAME or (func in _RESHAPES and tuple(args[1]) == tuple(args[0].shape)):
            return cls._made(args[0].shape, args[0].dtype, args[0].pieces, args[0].read)
        if func in (torch.ops.aten.stack.default, torch.ops.aten.cat.default) and not kwargs:
            joined = cls._joined(func, *args)
            if joined is not None:
                return joined
        args, kwargs = tree_map_only(UnreadTensor, UnreadTensor.read, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def _joined(cls, func: Any, tensors: Sequence[Any], dim: int = 0) -> UnreadTensor | None:
        """Return a concatenation as one unread tensor; None if the tensors do not fit together, or if it
        would have very many pieces.
        """
        alike = all(type(t) is UnreadTensor and t.dtype == tensors[0].dtype for t in tensors)
        if not alike or len({t.dim() for t in tensors}) > 1:
            return None
        with torch._C._DisableTorchDispatch():
            described = [torch.empty(tuple(t.shape), dtype=t.dtype, device="meta") for t in tensors]
        shape = func(described, dim).shape
        outer = math.prod(shape[: dim % len(shape)])
        # An upper bound: each boundary between parts splits at most one piece.
        if outer * len(tensors) + sum(len(t.pieces) for t in tensors) > _MOST_PIECES:
            return None
        pieces: list[Piece] = []
        at = 0
        for index in range(outer):
            for tensor in tensors:
                nbytes = tensor.numel() * tensor.itemsize // outer
                pieces += _part(tensor.pieces, index * nbytes, nbytes, at)
                at += nbytes
        return cls._made(shape, tensors[0].dtype, pieces, lambda: func([t.read() for t in tensors], dim))

    def __repr__(self) -> str:  # type: ignore[override]
        names = ", ".join(dict.fromkeys(piece.stored.name for piece in self.pieces[:2]))
        return f"UnreadTensor({names}, {tuple(self.shape)}, {self.dtype})"


def _part(pieces: Sequence[Piece], first: int, nbytes: int, at: int) -> Iterator[Piece]:
    """Yield ``nbytes`` of the ascending ``pieces``, from byte ``first`` on, placed at byte ``at`` of another
    tensor.
    """
    place = max(0, bisect_right(pieces, first, key=lambda piece: piece.begin) - 1)
    for piece in islice(pieces, place, None):
        if piece.begin >= first + nbytes:
            return
        begin, end = max(first, piece.begin), min(first + nbytes, piece.begin + piece.nbytes)
        if begin < end:
            yield Piece(piece.stored, piece.offset + begin - piece.begin, at + begin - first, end - begin)


class StoredWeights:
    """The parameters of one model that stay in files, while it is loaded."""

    def __init__(self, storage: ModelStorage, manager: GeminiManager) -> None:
        self._storage, self._manager = storage, manager
        self._stored: dict[ManagedSlot, UnreadTensor] = {}

    @classmethod
    def of(cls, built: Built, filling: Filling, files: SafetensorsFiles) -> StoredWeights | None:
        """Return the weights of a model that is about to be loaded from ``files``, and make its tensors
        unread until they are used. None if weights are copied instead: because copying writes nothing to
        disk, or because most weights could not stay in the files.
        """
        manager = built.manager
        if not manager.chunks.can_read_files:
            budgets, is_alone = manager.chunks.budgets, not manager.is_sharded and manager.part is None
            if budgets.disk_dir is None or manager.chunks.device.has_own_memory or not is_alone:
                return None
            if not filling.overflows or manager.size.total_bytes > budgets.disk_bytes:
                return None
            if 2 * _kept_bytes(built.storage, files) < sum(each.nbytes for each in files.values()):
                return None
        files.reads.hand_out(UnreadTensor)
        return cls(built.storage, manager)

    def __contains__(self, slot: ManagedSlot) -> bool:
        return slot in self._stored

    def take(self, slot: ManagedSlot, tensor: UnreadTensor) -> bool:
        """Return whether the parameter can be read from the place of ``tensor``; if so it need not be
        written.
        """
        view = slot.param_view
        fits = view.dtype == tensor.dtype and view.shape == tensor.shape and view.is_contiguous()
        if not fits or slot.group.shard is not None or slot.group.has_master:
            return False
        self._stored[slot] = tensor
        return True

    def values_of(self, slot: ManagedSlot) -> torch.Tensor:
        """Read the values of a parameter that was taken."""
        return self._stored[slot].read()

    def finish(self, module: nn.Module, write: Callable[[ManagedSlot, torch.Tensor], None]) -> None:
        """Make chunks that contain only stored parameters read from the files. ``write`` gets the stored
        parameters of all other chunks; unread buffers of ``module`` are read.
        """
        for part in module.modules():
            for name, buffer in part._buffers.items():
                if isinstance(buffer, UnreadTensor):
                    part._buffers[name] = buffer.read()
        whole: list[ChunkGroup] = []
        for group in self._storage.groups:
            if group.members and all(slot in self._stored for slot in group.members):
                whole.append(group)
                continue
            for slot in group.members:
                if slot in self._stored:
                    write(slot, self.values_of(slot))
        if whole:
            self._leave(whole)

    def _leave(self, groups: list[ChunkGroup]) -> None:
        slots = [slot for group in groups for slot in group.members]
        used = {
            piece.stored.path: piece.stored.descriptor
            for slot in slots
            for piece in self._stored[slot].pieces
        }
        for path, descriptor in used.items():
            if not os.path.samestat(path.stat(), os.fstat(descriptor)):
                raise InputError(f"{path} was replaced while the model was loaded; {AGAIN}")
        places = {path: index for index, path in enumerate(used)}
        files = _C.SourceFiles([os.fspath(path) for path in used])
        chunks: dict[int, Parts] = {}
        for group in groups:
            pieces = [piece for slot in group.members for piece in self._placed(slot)]
            for chunk, first in _chunks_of(group):
                parts = _part(pieces, first, chunk.spec.nbytes, 0)
                chunks[chunk.id] = [
                    (places[p.stored.path], p.stored.begin + p.offset, p.begin, p.nbytes) for p in parts
                ]
        tensors = [tensor for slot in slots for tensor in slot.param_ref.tensors]
        self._manager.chunks.find_on_disk(tensors, files, chunks)

    def _placed(self, slot: ManagedSlot) -> Iterator[Piece]:
        """Yield the pieces of a parameter, placed within its chunk."""
        tensor = self._stored[slot]
        for piece in tensor.pieces:
            yield piece._replace(begin=piece.begin + slot.start * tensor.itemsize)


def _kept_bytes(storage: ModelStorage, files: SafetensorsFiles) -> int:
    """Return an upper bound of the bytes of ``files`` that can stay there: parameters in their dtype and
    without masters, which are copies in another dtype.
    """
    room: Counter[torch.dtype] = Counter()
    for slot in storage.slots.values():
        if not slot.group.has_master:
            room[slot.param_view.dtype] += slot.param_view.nbytes
    held: Counter[torch.dtype] = Counter()
    for each in files.values():
        held[each.dtype] += each.nbytes
    return sum((room & held).values())


def _chunks_of(group: ChunkGroup) -> Iterator[tuple[Chunk, int]]:
    """Yield (chunk, first byte) for the chunks of a group's parameters."""
    first = 0
    for chunk in group.param.parts if isinstance(group.param, CutChunk) else (group.param,):
        yield chunk, first
        first += chunk.spec.nbytes
