"""Return pages of memory to the system: those of freed buffers, and those of tensors that map a file."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch

_MADV_DONTNEED = 4
_PAGE = mmap.PAGESIZE
LEAST_BYTES = 2**18  # of a tensor for which looking is worth the system calls
_ENTRY_BYTES = 8  # of a page in /proc/self/pagemap
_IS_THERE = np.uint64(3 << 62)  # in memory, or in swap
_IS_SHARED = np.uint64(1 << 61)  # a page of a file, or of shared memory


def empty_pages(start: int, stop: int) -> None:
    """Return the pages between two page-aligned addresses to the system. Private memory reads as zeros
    afterwards; mapped files and shared memory keep their content. If the system refuses (huge or locked
    pages), nothing changes."""
    if stop > start:
        _madvise()(start, stop - start, _MADV_DONTNEED)


def release_file_pages(tensor: torch.Tensor) -> None:
    """Remove the pages of a tensor that maps a file from this process's memory. A later read gets the same
    values from the file. Nothing happens if any page is private: it was written to, or no file backs it."""
    if tensor.device.type != "cpu" or tensor.untyped_storage().nbytes() < LEAST_BYTES:
        return
    begin = tensor.data_ptr()
    start, stop = -(-begin // _PAGE) * _PAGE, (begin + tensor.nbytes) // _PAGE * _PAGE
    if stop - start < LEAST_BYTES or not tensor.is_contiguous():
        return
    try:
        with Path("/proc/self/pagemap").open("rb", buffering=0) as pages:
            entries = os.pread(
                pages.fileno(), (stop - start) // _PAGE * _ENTRY_BYTES, start // _PAGE * _ENTRY_BYTES
            )
    except OSError:
        return
    found = np.frombuffer(entries, dtype=np.uint64)
    is_private = ((found & _IS_THERE) != 0) & ((found & _IS_SHARED) == 0)
    if not is_private.any():
        empty_pages(start, stop)


@cache
def _madvise() -> Callable[[int, int, int], int]:
    call = ctypes.CDLL(None).madvise
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    call.restype = ctypes.c_int
    return call
