"""Whole tensors moved to disk and back; the tensor object stays, its memory goes back to the system."""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import TracebackType
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from gemini.errors import ConfigError, StateError
from gemini.offload.async_file import BLOCK_BYTES, Backend, Directories, checked_directories, chosen_backend
from gemini.offload.extent_file import ExtentFile
from gemini.offload.tensornvme_file import TensorNvmeFile

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


Callback: TypeAlias = Callable[[], None]


class Place(Enum):
    """Where a tensor's bytes are."""

    MEMORY = "memory"
    WRITING = "writing"
    DISK = "disk"
    READING = "reading"


class _File(Protocol):
    """The disk side. What ``write`` and ``read`` return is only given back to ``wait``."""

    @property
    def disk_bytes(self) -> int: ...
    def write(self, tensors: Sequence[torch.Tensor]) -> Any: ...
    def read(self, tensors: Sequence[torch.Tensor]) -> Any: ...
    def wait(self, transfer: Any) -> None: ...
    def close(self) -> None: ...


class _Entry:
    """What the offloader knows of one tensor; dies with it."""

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

    Between a finished write and the next read a tensor has no storage and must not be used. Not
    thread-safe; callbacks run on the thread that waits. The file disappears on ``close``, on exit, and when
    the offloader is collected.

    A tensor is dense, on the CPU or a CUDA GPU, of any dtype, and has its storage to itself. Host memory
    used: 16 MiB of staging at most (as much again, pinned, once a CUDA tensor came), of which large CPU
    tensors touch two blocks each; the page cache is not used where the file system allows it. CUDA tensors
    pass through the staging memory on the current stream of their device, and so do small ones: a call that
    needs more of it than is free waits for earlier transfers.

    The calls are those of TensorNVMe's ``DiskOffloader``. What differs: tensors are known by themselves, not
    by ``id()``; several written together may be read singly and the other way round; every failure raises;
    memory goes when a write was waited for, never inside a later call's callback; ``backend`` None is
    io_uring or threads, whichever works ("aio" and "pthread" are "threads" here); ``TENSORNVME_BACKEND``
    is not read.
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
            n_entries: most transfers under way; one more waits for the oldest first.
            backend: "uring", "threads" (as "aio" and "pthread", too, call it), or None, which chooses as
                ``AsyncFile`` does; "tensornvme" uses that package, for comparison.
            checksums: verify with CRC32C what is read, 5 bytes of memory per 4096 on disk.

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
            chosen_backend(own)  # refuses now, not at the first write
            self._file = ExtentFile(directories, backend=own, checksums=checksums)
        self._n_entries = n_entries
        self._entries = WeakTensorKeyDictionary()
        self._requests: deque[_Request] = deque()
        self._pid = os.getpid()
        self._closed = False
        self._abandon = weakref.finalize(self, _abandon, self._file, self._requests, self._pid)

    def async_write(self, tensor: torch.Tensor, callback: Callback | None = None) -> None:
        """Start moving ``tensor`` to disk.

        Its memory is released and ``callback`` called once the write is finished and waited for
        (``sync_write_events``, ``synchronize``, or a later call that makes room). Do not change the
        tensor before that.

        Raises:
            ConfigError: not a dense CPU or CUDA tensor that has its storage to itself.
            StateError: it is on disk already, or the offloader is closed.
            IoError: an earlier transfer failed, or the disk is full; the tensor is as before.
        """
        self.async_writev([tensor], callback)

    def async_read(self, tensor: torch.Tensor, callback: Callback | None = None) -> None:
        """Give ``tensor`` its memory again and start filling it; usable after ``sync_read_events``.

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
        """Start moving several tensors to disk, as one transfer: when a part fails, all stay in memory.

        Small neighbours share requests. ``callback`` is called once, when all are done (at once if there
        are none). Raises as ``async_write``, before anything is under way.
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
        """Start reading several tensors back, as one transfer: when a part fails, all stay on disk.

        ``callback`` is called once, when all are done (at once if there are none). Raises as ``async_read``,
        before anything is under way.
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
        """Wait for all writes; raises the first failure after all were waited for."""
        self._finish([request for request in self._requests if request.is_write])

    def sync_read_events(self) -> None:
        """Wait for all reads; raises the first failure after all were waited for."""
        self._finish([request for request in self._requests if not request.is_write])

    def synchronize(self) -> None:
        """Wait for everything; raises the first failure after all were waited for."""
        self._finish(list(self._requests))

    def close(self) -> None:
        """Wait for everything and give the disk space back; what is still on disk is lost. Idempotent."""
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
        """Say where the bytes of ``tensor`` are, as of the last wait."""
        entry: _Entry | None = self._entries.get(tensor)
        return Place.MEMORY if entry is None else entry.place

    def __enter__(self) -> DiskOffloader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prepare(self, tensors: Sequence[torch.Tensor]) -> None:
        """Wait until there is room for one more transfer and none of ``tensors`` is on its way."""
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
        """Wait for the transfers under way of ``tensors``, or of others with the same memory."""
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
        """Wait for ``requests``, all of them also when one fails, then raise the first failure."""
        failure: Exception | None = None
        for request in requests:
            if request not in self._requests:
                continue  # a callback has waited for it
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
            # The bytes are where they were: a failed write released nothing, a failed read can be repeated.
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
    """End what nobody will wait for: the disk must not write into memory that is freed."""
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
        raise ConfigError(
            f"{len(tensors)} tensors have {distinct} storages together; name each memory only once"
        )


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
            f"{what} uses {used} bytes of a storage of {storage.nbytes()}; it must own a whole one"
        )
    if not storage.resizable():
        raise ConfigError(f"{what} shares memory with its maker (numpy, a file); clone it first")
