"""Staging: page-aligned memory of a fixed size for bytes that the disk cannot read or write directly."""

from __future__ import annotations

import ctypes

import torch

from gemini.offload.async_file import BLOCK_BYTES, direct_memory
from gemini.offload.disk_space import Holes

# The most bytes staged at a time, in host memory; for CUDA tensors the same again, pinned.
STAGING_BYTES = 16 * 2**20


class Staging:
    """Allocates slices of the memory, first fit, so that a small amount of staging touches little memory.

    Offsets count from the start of the memory. A copy is complete when its call returns.
    """

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self._memory = _pinned_memory(nbytes) if pinned else direct_memory(nbytes)
        self._holes = Holes(nbytes)
        self.address = self._memory.data_ptr()

    def take(self, nbytes: int) -> int | None:
        """Allocate a slice and return its offset; None if there is no room now."""
        return self._holes.take(nbytes)

    def give(self, offset: int, nbytes: int) -> None:
        """Free a slice."""
        self._holes.give(offset, nbytes)

    def fill(self, offset: int, storage: torch.UntypedStorage, start: int, nbytes: int) -> None:
        """Copy bytes of a storage into the staging memory. CUDA: on the current stream of its device."""
        if _on_cpu(storage):
            ctypes.memmove(self.address + offset, storage.data_ptr() + start, nbytes)
        else:
            self._slice(offset, nbytes).copy_(_bytes_of(storage)[start : start + nbytes])

    def drain(self, offset: int, storage: torch.UntypedStorage, start: int, nbytes: int) -> None:
        """Copy bytes from the staging memory into a storage. CUDA: on the current stream of its device."""
        if _on_cpu(storage):
            ctypes.memmove(storage.data_ptr() + start, self.address + offset, nbytes)
        else:
            _bytes_of(storage)[start : start + nbytes].copy_(self._slice(offset, nbytes))

    def _slice(self, offset: int, nbytes: int) -> torch.Tensor:
        return self._memory[offset : offset + nbytes]


def _pinned_memory(nbytes: int) -> torch.Tensor:
    memory = torch.empty(nbytes + BLOCK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
    skip = -memory.data_ptr() % BLOCK_BYTES
    return memory[skip : skip + nbytes]


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _on_cpu(storage: torch.UntypedStorage) -> bool:
    return storage.device.type == "cpu"
