"""Weights that stay where a checkpoint has them: chunks of frozen parameters are read from its safetensors.

The files are the DISK tier of these chunks: no second copy is written, and nothing is read before it is used.
A loader gets tensors that were not read yet. What it only assigns stays unread; whatever else it does with
one, a cast or a merge, reads it, and the result is written into chunks as usual.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from gemini import _C
from gemini.chunk.manager import Parts
from gemini.errors import InputError
from gemini.integrations.safetensors_files import StoredTensor
from gemini.runtime.manager import GeminiManager
from gemini.runtime.storage.model_storage import ChunkGroup, ManagedSlot, ModelStorage
from gemini.system.input_files import AGAIN

_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_RESHAPES = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


class UnreadTensor(torch.Tensor):
    """A tensor of a file that nobody has read: an operator on it reads it."""

    stored: StoredTensor

    @staticmethod
    def __new__(cls, stored: StoredTensor) -> UnreadTensor:
        """Return what passes for the tensor that ``stored`` is."""
        made: UnreadTensor = torch.Tensor._make_wrapper_subclass(
            cls, stored.shape, dtype=stored.dtype, device=torch.device("cpu")
        )
        made.stored = stored
        return made

    def __init__(self, stored: StoredTensor) -> None:
        """Do nothing: it was made."""

    def read(self) -> torch.Tensor:
        """Return a copy in memory. Raises CheckpointError."""
        return self.stored.reads.take(self.stored)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Read what ``func`` is given, but where it only passes it on."""
        if func in _SAME or (func in _RESHAPES and tuple(args[1]) == tuple(args[0].shape)):
            return UnreadTensor(args[0].stored)
        args, kwargs = tree_map_only(UnreadTensor, UnreadTensor.read, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"UnreadTensor({self.stored.name}, {tuple(self.shape)}, {self.dtype})"


class StoredWeights:
    """Which parameters of one model lie in files as they are, while it is loaded."""

    def __init__(self, storage: ModelStorage, manager: GeminiManager) -> None:
        self._storage, self._manager = storage, manager
        self._stored: dict[ManagedSlot, StoredTensor] = {}

    def __contains__(self, slot: ManagedSlot) -> bool:
        return slot in self._stored

    def take(self, slot: ManagedSlot, stored: StoredTensor) -> bool:
        """Say whether a parameter can be read where ``stored`` is; then it need not be written."""
        view, chunks = slot.param_view, self._manager.chunks
        fits = view.dtype == stored.dtype and view.shape == stored.shape and view.is_contiguous()
        if not (fits and chunks.can_read_files and slot.group.shard is None and slot.group.grad is None):
            return False
        self._stored[slot] = stored
        return True

    def values_of(self, slot: ManagedSlot) -> torch.Tensor:
        """Return what a parameter that was taken has."""
        return self._stored[slot].read()

    def finish(self, write: Callable[[ManagedSlot, torch.Tensor], None]) -> None:
        """Have the chunks that hold nothing else read from the files; ``write`` gets the parameters of all
        others."""
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
        used = {self._stored[slot].path: self._stored[slot].descriptor for slot in slots}
        for path, descriptor in used.items():
            if not os.path.samestat(path.stat(), os.fstat(descriptor)):
                raise InputError(f"{path} was replaced while the model was loaded; {AGAIN}")
        places = {path: index for index, path in enumerate(used)}
        files = _C.SourceFiles([os.fspath(path) for path in used])
        chunks: dict[int, Parts] = {
            group.param.id: [self._part(slot, places[self._stored[slot].path]) for slot in group.members]
            for group in groups
        }
        tensors = [slot.param_ref.tensors[0] for slot in slots]
        self._manager.chunks.find_on_disk(tensors, files, chunks)

    def _part(self, slot: ManagedSlot, file: int) -> tuple[int, int, int, int]:
        stored = self._stored[slot]
        return file, stored.begin, slot.start * stored.dtype.itemsize, stored.nbytes
