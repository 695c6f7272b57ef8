"""MappedTensors: tensors mapped from a file, as large as the disk, in memory that the kernel can reclaim."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from pathlib import Path
from typing import TypeAlias

import torch

from gemini.errors import IoError, StateError
from gemini.system.config import format_bytes

_ALIGN = 64
_PART_BYTES = 4 * 2**20  # bytes in memory while a tensor is being copied
_WRITTEN_BACK_BYTES = 32 * 2**20  # bytes in the page cache that are not written back yet


class TensorsInMemory:
    """Creates tensors as :class:`MappedTensors` does, but in memory."""

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat, uninitialized tensor."""
        return torch.empty(count, dtype=dtype, device="cpu")

    def put(self, flat: torch.Tensor, start: int, values: torch.Tensor) -> None:
        """Copy flat ``values`` into ``flat``, beginning at its element ``start``."""
        flat[start : start + values.numel()].copy_(values)

    def release(self, flat: torch.Tensor) -> None:
        """Do nothing: the values stay in memory."""


class MappedTensors:
    """Copies of tensors, appended to one unlinked file and mapped from it.

    The copies are ordinary tensors. They read from the page cache, which the kernel reclaims if memory is
    short. The file is removed with the last copy. Only the user can open it.
    """

    def __init__(self, directory: str, capacity_bytes: int, num_tensors: int) -> None:
        """Reserve room for ``num_tensors`` tensors of ``capacity_bytes`` in total.

        Raises:
            IoError: the directory is missing, read-only or full; nothing is left behind.
        """
        self._directory = directory
        size = max(capacity_bytes + num_tensors * _ALIGN, 1)
        try:
            descriptor = _open_nameless(directory)
            try:
                _require_room(descriptor, size)
                _reserve(descriptor, size)
                self._map = mmap.mmap(descriptor, size)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _io_error(error, f"cannot export tensors of {format_bytes(size)}", directory) from error
        self._address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        self._offset = 0
        self._written = 0  # offset up to which pages were written back

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy of ``tensor`` in the file.

        Raises:
            StateError: there is not enough room left.
            IoError: the file cannot be written.
        """
        flat = self.empty(tensor.numel(), tensor.dtype)
        self.put(flat, 0, tensor.detach().reshape(-1))
        return flat.view(tensor.shape)

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor of zeros in the file. Raises StateError if there is not enough room left."""
        nbytes = count * dtype.itemsize
        if count == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        if self._offset + nbytes > len(self._map):
            raise StateError(
                f"a tensor of {nbytes} bytes exceeds the {len(self._map) - self._offset} bytes left in "
                "the export"
            )
        flat = torch.frombuffer(self._map, dtype=dtype, count=count, offset=self._offset)
        self._offset += (nbytes + _ALIGN - 1) // _ALIGN * _ALIGN
        return flat

    def put(self, flat: torch.Tensor, start: int, values: torch.Tensor) -> None:
        """Copy flat ``values`` into a tensor of :meth:`empty`, beginning at its element ``start``, using a
        few MiB of memory. Raises IoError if the file cannot be written."""
        for part in values.split(_PART_BYTES // flat.dtype.itemsize):
            target = flat[start : start + part.numel()]
            target.copy_(part)
            self.release(target)
            start += part.numel()

    def release(self, flat: torch.Tensor) -> None:
        """Unmap the written pages of ``flat``, so that only the page cache holds them and can be reclaimed.
        Writes them back from time to time. Raises IoError."""
        begin = flat.data_ptr() - self._address
        start = begin // mmap.PAGESIZE * mmap.PAGESIZE
        stop = (begin + flat.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if stop <= start:
            return
        if hasattr(self._map, "madvise") and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)
        if stop - self._written >= _WRITTEN_BACK_BYTES:
            try:
                self._map.flush(self._written, stop - self._written)
            except OSError as error:
                doing = f"cannot write {format_bytes(stop - self._written)} of exported tensors"
                raise _io_error(error, doing, self._directory, self._written) from error
            self._written = stop


Place: TypeAlias = TensorsInMemory | MappedTensors
IN_MEMORY = TensorsInMemory()


def _require_room(descriptor: int, nbytes: int) -> None:
    """Raise ENOSPC if the disk lacks ``nbytes``, without filling the disk first as reserving would."""
    found = os.fstatvfs(descriptor)
    if found.f_blocks and nbytes > found.f_bavail * found.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _reserve(descriptor: int, nbytes: int) -> None:
    """Reserve disk space; by writing zeros if a sandbox or the file system does not support fallocate."""
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
            raise
        zeros = bytes(min(nbytes, _PART_BYTES))
        done = 0
        while done < nbytes:
            done += os.pwrite(descriptor, zeros[: nbytes - done], done)


def _open_nameless(directory: str) -> int:
    """Open a private file without a name. If the file system does not support that, unlink a new file at
    once."""
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
