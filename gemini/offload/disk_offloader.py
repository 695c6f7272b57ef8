"""DiskOffloader: moves whole tensors to disk and back; the tensor object stays, its memory is returned to the
system."""

from __future__ import annotations

import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from gemini.errors import ConfigError, StateError
from gemini.offload.async_file import BLOCK_BYTES, Backend, Directories, checked_directories, chosen_backend
from gemini.offload.extent_file import ExtentFile
from gemini.offload.tensornvme_file import TensorNvmeFile
from gemini.system.pages import empty_pages


def release(tensor: torch.Tensor) -> None:
    """Free the memory of a tensor's storage; pages that belong only to it leave the process.

    The C library may keep all freed memory for later: glibc stops returning blocks of a size once the first
    such block was freed. So whole pages inside are emptied first. Pinned memory is left to its allocator,
    because the GPU knows its pages.
    """
    storage = tensor.untyped_storage()
    if tensor.device.type == "cpu" and sys.platform == "linux" and not tensor.is_pinned():
        start = -(-storage.data_ptr() // BLOCK_BYTES) * BLOCK_BYTES
        stop = (storage.data_ptr() + storage.nbytes()) // BLOCK_BYTES * BLOCK_BYTES
        # Only advice: if it is refused (larger pages, locked memory) the allocator decides as usual.
        empty_pages(start, stop)
    storage.resize_(0)


Callback: TypeAlias = Callable[[], None]


class Place(Enum):
    """The place of a tensor's bytes."""

    MEMORY = "memory"
    WRITING = "writing"
    DISK = "disk"
    READING = "reading"


class _File(Protocol):
    """The disk side. The results of ``write`` and ``read`` are only passed to ``wait``."""

    @property
    def disk_bytes(self) -> int: ...
    def write(self, tensors: Sequence[torch.Tensor]) -> Any: ...
    def read(self, tensors: Sequence[torch.Tensor]) -> Any: ...
    def wait(self, transfer: Any) -> None: ...
    def close(self) -> None: ...


class _Entry:
    """The record of one tensor; dies with it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.place = Place.MEMORY


@dataclass(frozen=True, eq=False)
class _Request:
    """A transfer under way; holds the tensors so that their memory outlives it."""

    tensors: tuple[torch.Tensor, ...]
    entries: tuple[_Entry, ...]
    is_write: bool
    transfer: Any
    callback: Callback | None


class DiskOffloader:
    """Write tensors to a private file under ``dir_name`` and read them back into the same objects.

    Between a finished write and the next read a tensor has no storage and must not be used. Not thread-safe;
    callbacks run on the thread that waits. The file disappears on ``close``, on exit, and when the offloader
    is garbage-collected.

    A tensor must be dense, on the CPU or a CUDA GPU, of any dtype, and the only one in its storage. Host
    memory used: at most 16 MiB of staging (as much again, pinned, after the first CUDA tensor); a large CPU
    tensor uses two blocks of it. The page cache is bypassed if the file system allows it. CUDA tensors pass
    through the staging memory on the current stream of their device, and so do small tensors. A call that
    needs more staging memory than is free waits for earlier transfers.

    The calls are those of TensorNVMe's ``DiskOffloader``, with these differences: tensors are identified by
    themselves, not by ``id()``; tensors written together may be read one by one and the other way round;
    every failure raises; memory is freed when a write was waited for, never inside a later call's callback;
    ``backend`` None is io_uring or threads, whichever works ("aio" and "pthread" are "threads" here);
    ``TENSORNVME_BACKEND`` is not read.
    """

    def __init__(
        self,
        dir_name: Directories,
        n_entries: int = 16,
        backend: Backend | Literal["aio", "pthread", "tensornvme"] | None = None,
        *,
        checksums: bool = False,
    ) -> None:
        """Prepare; disk space is reserved by the first write.

        Args:
            dir_name: an existing, writable directory, or several: large tensors are striped over them.
            n_entries: the most transfers under way; a further one waits for the oldest.
            backend: "uring", "threads" (also named "aio" and "pthread"), or None, which chooses as
                ``AsyncFile`` does; "tensornvme" uses that package, for comparison.
            checksums: verify reads with CRC32C; 5 bytes of memory per 4096 on disk.

        Raises:
            ConfigError: a directory, the number or the backend cannot be used.
        """
        if n_entries < 1:
            raise ConfigError(f"n_entries is {n_entries}; it must be 1 or more")
        directories = checked_directories(dir_name)
        self._file: _File
        if backend == "tensornvme":
            self._file = TensorNvmeFile(directories, num_entries=n_entries, checksums=checksums)
        else:
            own: Backend | None = "threads" if backend == "aio" or backend == "pthread" else backend
            chosen_backend(own)  # raises now, not at the first write
            self._file = ExtentFile(directories, backend=own, checksums=checksums)
        self._n_entries = n_entries
        self._entries = WeakTensorKeyDictionary()
        self._requests: deque[_Request] = deque()
        self._pid = os.getpid()
        self._closed = False
        self._abandon = weakref.finalize(self, _abandon, self._file, self._requests, self._pid)

    def async_write(self, tensor: torch.Tensor, callback: Callback | None = None) -> None:
        """Start moving ``tensor`` to disk.

        When the write is finished and waited for (``sync_write_events``, ``synchronize``, or a later call
        that makes room), its memory is released and ``callback`` is called. Do not change the tensor before
        that.

        Raises:
            ConfigError: not a dense CPU or CUDA tensor that is the only one in its storage.
            StateError: it is on disk already, or the offloader is closed.
            IoError: an earlier transfer failed, or the disk is full; the tensor is as before.
        """
        self.async_writev([tensor], callback)

    def async_read(self, tensor: torch.Tensor, callback: Callback | None = None) -> None:
        """Allocate the memory of ``tensor`` again and start filling it; usable after ``sync_read_events``.

        Raises:
            StateError: it is not on disk, or the offloader is closed.
            IoError: an earlier transfer failed.
        """
        self.async_readv([tensor], callback)

    def sync_write(self, tensor: torch.Tensor) -> None:
        """Move ``tensor`` to disk and release its memory. Raises as ``async_write``."""
        self.sync_writev([tensor])

    def sync_read(self, tensor: torch.Tensor) -> None:
        """Read ``tensor`` back. Raises as ``async_read``."""
        self.sync_readv([tensor])

    def async_writev(self, tensors: Sequence[torch.Tensor], callback: Callback | None = None) -> None:
        """Start moving several tensors to disk, as one transfer: if a part fails, all stay in memory.

        Small adjacent tensors share requests. ``callback`` is called once, when all are done (at once if
        there are none). Raises as ``async_write``, before any transfer starts.
        """
        self._prepare(tensors)
        places = [self.place(tensor) for tensor in tensors]
        for tensor, place in zip(tensors, places, strict=True):
            if place is Place.DISK:
                raise StateError(f"tensor of shape {tuple(tensor.shape)} is on disk already; read it first")
            _check_owns_storage(tensor)
        _check_distinct(tensors)
        if self._is_nothing(tensors, callback):
            return
        transfer = self._file.write(tensors)
        for tensor in tensors:
            self._entries[tensor] = _Entry(tensor.untyped_storage().nbytes())
        self._add(tensors, Place.WRITING, transfer, callback)

    def async_readv(self, tensors: Sequence[torch.Tensor], callback: Callback | None = None) -> None:
        """Start reading several tensors back, as one transfer: if a part fails, all stay on disk.

        ``callback`` is called once, when all are done (at once if there are none). Raises as ``async_read``,
        before any transfer starts.
        """
        self._prepare(tensors)
        for tensor in tensors:
            if self.place(tensor) is not Place.DISK:
                raise StateError(f"tensor of shape {tuple(tensor.shape)} is not on disk; write it first")
        _check_distinct(tensors)
        if self._is_nothing(tensors, callback):
            return
        try:
            for tensor in tensors:
                tensor.untyped_storage().resize_(self._entries[tensor].nbytes)
            transfer = self._file.read(tensors)
        except BaseException:
            _release(tensors)
            raise
        self._add(tensors, Place.READING, transfer, callback)

    def sync_writev(self, tensors: Sequence[torch.Tensor]) -> None:
        """Move several tensors to disk. Raises as ``async_writev``."""
        self.async_writev(tensors)
        self._settle(tensors)

    def sync_readv(self, tensors: Sequence[torch.Tensor]) -> None:
        """Read several tensors back. Raises as ``async_readv``."""
        self.async_readv(tensors)
        self._settle(tensors)

    def sync_write_events(self) -> None:
        """Wait for all writes; raises the first failure after all have ended."""
        self._finish([request for request in self._requests if request.is_write])

    def sync_read_events(self) -> None:
        """Wait for all reads; raises the first failure after all have ended."""
        self._finish([request for request in self._requests if not request.is_write])

    def synchronize(self) -> None:
        """Wait for all transfers; raises the first failure after all have ended."""
        self._finish(list(self._requests))

    def close(self) -> None:
        """Wait for all transfers and return the disk space; tensors that are still on disk are lost.
        Idempotent."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        try:
            self.synchronize()
        finally:
            self._file.close()
            self._abandon.detach()

    @property
    def disk_bytes(self) -> int:
        """Disk space held, used or not."""
        return self._file.disk_bytes

    def place(self, tensor: torch.Tensor) -> Place:
        """Return the place of the bytes of ``tensor``, as of the last wait."""
        entry: _Entry | None = self._entries.get(tensor)
        return Place.MEMORY if entry is None else entry.place

    def __enter__(self) -> DiskOffloader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prepare(self, tensors: Sequence[torch.Tensor]) -> None:
        """Wait until there is room for another transfer and none of ``tensors`` is in transit."""
        if self._closed:
            raise StateError("the DiskOffloader is closed")
        if os.getpid() != self._pid:
            raise StateError(
                f"the DiskOffloader belongs to process {self._pid}, not to its fork {os.getpid()}; "
                "make one there"
            )
        self._settle(tensors)
        while tensors and len(self._requests) >= self._n_entries:
            self._finish([self._requests[0]])

    def _settle(self, tensors: Sequence[torch.Tensor]) -> None:
        """Wait for running transfers of ``tensors``, or of other tensors with the same memory."""
        wanted = _storage_ids(tensors)
        self._finish([one for one in self._requests if not wanted.isdisjoint(_storage_ids(one.tensors))])

    def _is_nothing(self, tensors: Sequence[torch.Tensor], callback: Callback | None) -> bool:
        if not tensors and callback is not None:
            callback()
        return not tensors

    def _add(
        self, tensors: Sequence[torch.Tensor], place: Place, transfer: Any, callback: Callback | None
    ) -> None:
        entries = tuple(self._entries[tensor] for tensor in tensors)
        for entry in entries:
            entry.place = place
        request = _Request(tuple(tensors), entries, place is Place.WRITING, transfer, callback)
        self._requests.append(request)

    def _finish(self, requests: Sequence[_Request]) -> None:
        """Wait for all ``requests``, even if one fails, then raise the first failure."""
        failure: Exception | None = None
        for request in requests:
            if request not in self._requests:
                continue  # a callback has waited for it already
            try:
                self._finish_one(request)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _finish_one(self, request: _Request) -> None:
        try:
            self._file.wait(request.transfer)
        except Exception:
            # The bytes are unchanged: a failed write released nothing, and a failed read can be repeated.
            self._end(request, arrived=False)
            raise
        self._end(request, arrived=True)
        if request.callback is not None:
            request.callback()

    def _end(self, request: _Request, arrived: bool) -> None:
        on_disk = request.is_write == arrived
        self._requests.remove(request)
        for entry in request.entries:
            entry.place = Place.DISK if on_disk else Place.MEMORY
        if on_disk:
            _release(request.tensors)


def _abandon(file: _File, requests: Iterable[_Request], pid: int) -> None:
    """Wait for transfers that no caller will wait for: the disk must not write into freed memory."""
    if os.getpid() != pid:
        return
    for request in requests:
        with suppress(Exception):
            file.wait(request.transfer)
    file.close()


def _release(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        release(tensor)


def _storage_ids(tensors: Sequence[torch.Tensor]) -> set[int]:
    dense = (tensor for tensor in tensors if tensor.layout == torch.strided)
    return {tensor.untyped_storage()._cdata for tensor in dense}


def _check_distinct(tensors: Sequence[torch.Tensor]) -> None:
    distinct = len(_storage_ids(tensors))
    if distinct < len(tensors):
        raise ConfigError(f"{len(tensors)} tensors share {distinct} storages; give each storage only once")


def _check_owns_storage(tensor: torch.Tensor) -> None:
    what = f"tensor of shape {tuple(tensor.shape)} and {tensor.dtype}"
    if tensor.layout != torch.strided or tensor.device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"{what} is {tensor.layout} on {tensor.device}; only dense CPU and CUDA tensors go to disk"
        )
    storage = tensor.untyped_storage()
    used = tensor.numel() * tensor.element_size()
    if storage.nbytes() != used or tensor.storage_offset() != 0:
        raise ConfigError(
            f"{what} has {used:,} bytes and its storage {storage.nbytes():,}; give a tensor that "
            "uses its whole storage"
        )
    if not storage.resizable():
        raise ConfigError(f"{what} shares memory with its source (numpy, a file); clone it first")
