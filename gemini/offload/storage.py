"""Memory of tensors given back to the system, not only to the allocator."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache

import torch

from gemini.offload.async_file import BLOCK_BYTES

_MADV_DONTNEED = 4


def release(tensor: torch.Tensor) -> None:
    """Free the memory of a tensor's storage; the pages that were its own leave the process.

    The C library keeps much of what is freed for later, up to everything: glibc stops returning blocks of a
    size once the first such block was freed. So the whole pages inside are emptied before. Pinned memory
    is left to its allocator: the GPU knows its pages.
    """
    storage = tensor.untyped_storage()
    if tensor.device.type == "cpu" and sys.platform == "linux" and not tensor.is_pinned():
        start = -(-storage.data_ptr() // BLOCK_BYTES) * BLOCK_BYTES
        stop = (storage.data_ptr() + storage.nbytes()) // BLOCK_BYTES * BLOCK_BYTES
        if stop > start:
            # Advice: where it is refused (larger pages, locked memory) the allocator decides as usual.
            _madvise()(start, stop - start, _MADV_DONTNEED)
    storage.resize_(0)


@cache
def _madvise() -> Callable[[int, int, int], int]:
    call = ctypes.CDLL(None).madvise
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    call.restype = ctypes.c_int
    return call
