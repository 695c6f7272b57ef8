"""Memory that a device reads and writes itself: huge pages, which a fork leaves alone."""

from __future__ import annotations

import errno
import mmap

import torch

HUGE_PAGE_BYTES = 2 * 2**20
_MADV_WIPEONFORK = 18  # Linux 4.14; the module mmap has no name for it


def direct_memory(nbytes: int) -> torch.Tensor:
    """Return ``nbytes`` zeros on a 2 MiB boundary for transfers with O_DIRECT.

    A request for ordinary pages has an entry per 4 KiB, and a virtual disk may have room for 256 entries in
    all: two requests of 1 MiB then cannot be at the device at once. Of a huge page it has one. Where the
    system has none to give, ordinary pages do as well, only slower.

    After a fork the child's copy is empty. Without that, of a page that the disk is just writing to the
    parent may get the old copy and the child the data (open(2), "O_DIRECT").
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=flags)
    if not _advise(memory, _MADV_WIPEONFORK):
        memory = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES)  # shared: never copied
    _advise(memory, mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[start : start + nbytes]


def _advise(memory: mmap.mmap, advice: int) -> bool:
    """Say whether the system took the advice."""
    try:
        memory.madvise(advice)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel without it
            raise
        return False
    return True
