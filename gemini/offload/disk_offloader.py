"""Whole tensors moved to disk and back; the tensor object stays, its memory goes."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from types import TracebackType

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from gemini.errors import ConfigError, StateError

from .async_file import checked_directory
from .disk_space import DiskSpace, Extent

Callback = Callable[[], None]

_MAX_THREADS = 4


class Place(Enum):
    """Where a tensor's bytes are."""

    MEMORY = "memory"
    WRITING = "writing"
    DISK = "disk"
    READING = "reading"


class _Entry:
    """What the offloader knows of one tensor; dies with it."""

    def __init__(self, extent: Extent, nbytes: int) -> None:
        self.extent = extent
        self.nbytes = nbytes
        self.place = Place.MEMORY


@dataclass(frozen=True, eq=False)
class _Request:
    """A transfer under way; holds the tensor so that its memory outlives the transfer."""

    tensor: torch.Tensor
    entry: _Entry
    ticket: int
    callback: Callback | None


class DiskOffloader:
    """Write tensors to a private file under ``dir_name`` and read them back into the same objects.

    Between a finished write and the next read a tensor has no storage and must not be used. Not
    thread-safe; callbacks run on the thread that waits. The file disappears on ``close`` or exit.
    """

    def __init__(
        self, dir_name: str | os.PathLike[str], n_entries: int = 16, backend: str | None = None
    ) -> None:
        """Prepare; disk space is reserved by the first write.

        Args:
            dir_name: an existing, writable directory.
            n_entries: most transfers under way; one more waits for the oldest first.
            backend: "threads" or None, which chooses it.

        Raises:
            ConfigError: the directory, the number or the backend cannot be used.
        """
        if backend == "uring":
            raise ConfigError("backend 'uring' is not compiled in this release; use None or 'threads'")
        if backend not in (None, "threads"):
            raise ConfigError(f"backend {backend!r} is unknown; it is None or 'threads'")
        if n_entries < 1:
            raise ConfigError(f"n_entries is {n_entries}; it must be 1 or more")
        self._n_entries = n_entries
        self._space = DiskSpace(checked_directory(dir_name), threads=min(n_entries, _MAX_THREADS))
        self._entries = WeakTensorKeyDictionary()
        self._requests: deque[_Request] = deque()
        self._pid = os.getpid()
        self._closed = False

    def async_write(self, tensor: torch.Tensor, callback: Callback | None = None) -> None:
        """Start moving ``tensor`` to disk.

        Its memory is released and ``callback`` called once the write is finished and waited for
        (``sync_write_events``, ``synchronize``, or a later call that makes room). Do not change the
        tensor before that.

        Raises:
            ConfigError: not a dense CPU tensor that has its storage to itself.
            StateError: it is on disk already, or the offloader is closed.
            IoError: an earlier transfer failed, or the disk is full; the tensor is as before.
        """
        self._require_open()
        entry = self._settled(tensor)
        if entry is not None and entry.place is Place.DISK:
            raise StateError(f"tensor of shape {tuple(tensor.shape)} is on disk already; read it first")
        _check_owns_storage(tensor)
        self._make_room()
        nbytes = tensor.untyped_storage().nbytes()
        if entry is None or entry.nbytes != nbytes:
            entry = self._new_entry(tensor, nbytes)
        self._start(tensor, entry, Place.WRITING, callback)

    def async_read(self, tensor: torch.Tensor, callback: Callback | None = None) -> None:
        """Give ``tensor`` its memory again and start filling it; usable after ``sync_read_events``.

        Raises:
            StateError: it is not on disk, or the offloader is closed.
            IoError: an earlier transfer failed.
        """
        self._require_open()
        entry = self._settled(tensor)
        if entry is None or entry.place is not Place.DISK:
            raise StateError(f"tensor of shape {tuple(tensor.shape)} is not on disk; write it first")
        self._make_room()
        tensor.untyped_storage().resize_(entry.nbytes)
        self._start(tensor, entry, Place.READING, callback)

    def sync_write(self, tensor: torch.Tensor) -> None:
        """Move ``tensor`` to disk and release its memory. Raises as ``async_write``."""
        self.async_write(tensor)
        self._settled(tensor)

    def sync_read(self, tensor: torch.Tensor) -> None:
        """Read ``tensor`` back. Raises as ``async_read``."""
        self.async_read(tensor)
        self._settled(tensor)

    def async_writev(self, tensors: Sequence[torch.Tensor], callback: Callback | None = None) -> None:
        """Start moving several tensors to disk; ``callback`` is called once, when all are done (at once if
        there are none)."""
        self._each(self.async_write, tensors, callback)

    def async_readv(self, tensors: Sequence[torch.Tensor], callback: Callback | None = None) -> None:
        """Start reading several tensors back; ``callback`` is called once, when all are done (at once
        if there are none)."""
        self._each(self.async_read, tensors, callback)

    def sync_write_events(self) -> None:
        """Wait for all writes; raises the first failure after all were waited for."""
        self._finish([request for request in self._requests if request.entry.place is Place.WRITING])

    def sync_read_events(self) -> None:
        """Wait for all reads; raises the first failure after all were waited for."""
        self._finish([request for request in self._requests if request.entry.place is Place.READING])

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
            self._space.close()

    @property
    def disk_bytes(self) -> int:
        """Disk space held, used or not."""
        return self._space.reserved_bytes

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

    def _require_open(self) -> None:
        if self._closed:
            raise StateError("the DiskOffloader is closed")
        if os.getpid() != self._pid:
            raise StateError(
                f"the DiskOffloader belongs to process {self._pid}, not to its fork {os.getpid()}; "
                "make one there"
            )

    def _settled(self, tensor: torch.Tensor) -> _Entry | None:
        """Wait for the transfer of ``tensor`` under way, if any, and return its entry."""
        self._finish([request for request in self._requests if request.tensor is tensor])
        entry: _Entry | None = self._entries.get(tensor)
        return entry

    def _make_room(self) -> None:
        while len(self._requests) >= self._n_entries:
            self._finish([self._requests[0]])

    def _new_entry(self, tensor: torch.Tensor, nbytes: int) -> _Entry:
        extent = self._space.allocate(nbytes)
        entry = _Entry(extent, nbytes)
        weakref.finalize(entry, self._space.free, extent).atexit = False
        self._entries[tensor] = entry
        return entry

    def _start(self, tensor: torch.Tensor, entry: _Entry, place: Place, callback: Callback | None) -> None:
        file, offset = entry.extent.file, entry.extent.offset
        submit = file.write if place is Place.WRITING else file.read
        try:
            ticket = submit(tensor.untyped_storage().data_ptr(), entry.nbytes, offset)
        except BaseException:
            if place is Place.READING:
                tensor.untyped_storage().resize_(0)
            raise
        entry.place = place
        self._requests.append(_Request(tensor, entry, ticket, callback))

    def _finish(self, requests: Sequence[_Request]) -> None:
        """Wait for ``requests``, all of them also when one fails, then raise the first failure."""
        failure: Exception | None = None
        for request in requests:
            if request not in self._requests:
                continue  # a callback has waited for it
            self._requests.remove(request)
            try:
                self._finish_one(request)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _finish_one(self, request: _Request) -> None:
        entry = request.entry
        writing = entry.place is Place.WRITING
        try:
            entry.extent.file.wait(request.ticket)
        except BaseException:
            # The bytes are where they were: a failed write released nothing, a failed read can be repeated.
            entry.place = Place.MEMORY if writing else Place.DISK
            if not writing:
                request.tensor.untyped_storage().resize_(0)
            raise
        entry.place = Place.DISK if writing else Place.MEMORY
        if writing:
            request.tensor.untyped_storage().resize_(0)
        if request.callback is not None:
            request.callback()

    def _each(
        self,
        start: Callable[[torch.Tensor, Callback | None], None],
        tensors: Sequence[torch.Tensor],
        callback: Callback | None,
    ) -> None:
        self._require_open()
        waiting = len(tensors)
        if waiting == 0 and callback is not None:
            callback()

        def count_down() -> None:
            nonlocal waiting
            waiting -= 1
            if waiting == 0 and callback is not None:
                callback()

        for tensor in tensors:
            start(tensor, count_down)


def _check_owns_storage(tensor: torch.Tensor) -> None:
    what = f"tensor of shape {tuple(tensor.shape)} and {tensor.dtype}"
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise ConfigError(f"{what} is {tensor.layout} on {tensor.device}; only dense CPU tensors go to disk")
    storage = tensor.untyped_storage()
    used = tensor.numel() * tensor.element_size()
    if used == 0 or storage.nbytes() != used or tensor.storage_offset() != 0:
        raise ConfigError(
            f"{what} uses {used} bytes of a storage of {storage.nbytes()}; it must own a whole, non-empty one"
        )
    if not storage.resizable():
        raise ConfigError(f"{what} shares memory with its maker (numpy, a file); clone it first")
