"""Tensors that live in a file: as large as the disk, with memory the kernel can take back."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from pathlib import Path

import torch

from gemini.errors import IoError, StateError

_ALIGN = 64


class MappedTensors:
    """Copies of tensors appended to one unlinked file and mapped from it.

    The copies are ordinary tensors: they read from the page cache, which the kernel reclaims when memory is
    short, and the file is gone when the last of them is. Only the user can open it.
    """

    def __init__(self, directory: str, capacity_bytes: int, num_tensors: int) -> None:
        """Reserve room for ``num_tensors`` tensors of ``capacity_bytes`` together.

        Raises:
            IoError: the directory is missing, read-only or full; nothing is left behind.
        """
        self._directory = directory
        size = max(capacity_bytes + num_tensors * _ALIGN, 1)
        try:
            descriptor = _open_nameless(directory)
            try:
                _require_room(descriptor, size)
                os.posix_fallocate(descriptor, 0, size)
                self._map = mmap.mmap(descriptor, size)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _io_error(error, f"cannot export tensors of {size} bytes", directory) from error
        self._offset = 0

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``tensor`` (contiguous) that lives in the file.

        Raises:
            StateError: there is not so much room left.
            IoError: the file cannot be written.
        """
        count, nbytes = tensor.numel(), tensor.numel() * tensor.element_size()
        if count == 0:
            return tensor.detach().clone()
        if self._offset + nbytes > len(self._map):
            raise StateError(
                f"a tensor of {nbytes} bytes exceeds the {len(self._map) - self._offset} bytes left in "
                "the export"
            )
        copied = torch.frombuffer(self._map, dtype=tensor.dtype, count=count, offset=self._offset)
        copied = copied.view(tensor.shape)
        copied.copy_(tensor.detach())
        self._release_pages(self._offset, nbytes)
        self._offset += (nbytes + _ALIGN - 1) // _ALIGN * _ALIGN
        return copied

    def _release_pages(self, offset: int, nbytes: int) -> None:
        """Write the pages back and unmap them: only the page cache holds them, and it can be reclaimed."""
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        stop = (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if stop <= start:
            return
        try:
            self._map.flush(start, stop - start)
        except OSError as error:
            raise _io_error(
                error, f"cannot write {nbytes} exported bytes", self._directory, offset
            ) from error
        if hasattr(self._map, "madvise") and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)


def _require_room(descriptor: int, nbytes: int) -> None:
    """Raise what reserving more than there is would, without taking all there is before."""
    found = os.fstatvfs(descriptor)
    if found.f_blocks and nbytes > found.f_bavail * found.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _open_nameless(directory: str) -> int:
    """Open a private file that never had a name, or, where the file system has none, lost it at once."""
    flag = getattr(os, "O_TMPFILE", None)
    if flag is not None:
        try:
            return os.open(directory, flag | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
    descriptor, path = tempfile.mkstemp(prefix=".gemini-export-", dir=directory)
    Path(path).unlink()
    return descriptor


def _io_error(error: OSError, message: str, path: str, offset: int = 0) -> IoError:
    return IoError(error.errno or errno.EIO, f"{message}: {error.strerror or error}", path, offset)
