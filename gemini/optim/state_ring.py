"""A ring of buffers through which extents of files are read, changed and written back, overlapped.

A pass goes over extents in order. While one is being changed, the next ones are being read and the last ones
written, so that the disk always has work. Passes follow each other in a circle: the first extents of the next
pass are read ahead at the end of this one, and its last writes go on after it has returned.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gemini.errors import IoError, StateError
from gemini.offload.async_file import AsyncFile, direct_memory

NUM_BUFFERS = 8
_MAX_AHEAD = NUM_BUFFERS // 2 + 1  # half are being read, one is being changed; the others are being written


@dataclass(frozen=True, eq=False)
class Extent:
    """A range of a file that one buffer holds; blocks of 4096 bytes."""

    file: AsyncFile
    offset: int
    nbytes: int


@dataclass(eq=False)
class _Transfer:
    """A buffer in use, which stays until the transfer has ended; ticket 0: nothing is being read into it."""

    extent: Extent
    slot: int
    buffer: torch.Tensor
    ticket: int = 0

    def read(self) -> None:
        """Begin to read the extent into the buffer."""
        self.ticket = self.extent.file.read(self.buffer.data_ptr(), self.extent.nbytes, self.extent.offset)

    def write(self) -> None:
        """Begin to write the extent from the buffer."""
        self.ticket = self.extent.file.write(self.buffer.data_ptr(), self.extent.nbytes, self.extent.offset)

    def wait(self) -> None:
        if self.ticket != 0:
            self.extent.file.wait(self.ticket)


# visit(index of the extent, its buffer): reads or changes the extent's bytes.
Visit = Callable[[int, torch.Tensor], None]


class StateRing:
    """Owns the buffers, closes the files; for the process that added the first file. Not thread-safe."""

    def __init__(self) -> None:
        """Own nothing yet: memory is taken with the first file."""
        self._memory: torch.Tensor | None = None
        self._buffers: list[torch.Tensor] = []
        self._ahead: deque[_Transfer] = deque()  # the next extents of a pass, in order
        self._behind: deque[_Transfer] = deque()  # oldest first
        self._files: list[AsyncFile] = []
        self._owner: int | None = None

    def add(self, file: AsyncFile, extent_bytes: int) -> None:
        """Take over ``file``, whose extents have at most ``extent_bytes``."""
        if self._owner is None:
            self._owner = os.getpid()
            # Requests must end before the buffers go away, also when nobody calls close().
            weakref.finalize(self, _close, self._files, self._owner)
        self.settle()
        self._forget()
        if self._memory is None or self._memory.nbytes < NUM_BUFFERS * extent_bytes:
            memory = direct_memory(NUM_BUFFERS * extent_bytes)
            for other in self._files:
                if self._memory is not None:
                    other.unregister(self._memory.data_ptr())
                other.register(memory.data_ptr(), memory.nbytes)
            self._memory, self._buffers = memory, list(memory.split(extent_bytes))
        self._files.append(file)
        file.register(self._memory.data_ptr(), self._memory.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return 0 if self._memory is None else self._memory.nbytes

    def update(self, extents: Sequence[Extent], old: Sequence[bool], visit: Visit) -> None:
        """Read (where ``old``, else the buffer has anything), visit and write every extent.

        On return the last writes are under way, and first extents are being read for a next pass over the
        same ones: see ``settle``.

        Raises:
            IoError: a transfer failed; some extents are new, others old.
            StateError: this is a forked child.
        """
        self._pass(extents, old, visit, writes=True)

    def read(self, extents: Sequence[Extent], visit: Visit) -> None:
        """Read and visit every extent. Raises as ``update``; nothing has changed."""
        self._pass(extents, [True] * len(extents), visit, writes=False)

    def settle(self) -> None:
        """Wait for the writes that the last pass left under way.

        Raises:
            IoError: one has failed: what the extent has is undefined.
            StateError: this is a forked child.
        """
        self._require_owner()
        while self._behind:
            self._end_oldest_write()

    def close(self) -> None:
        """End all requests, whatever becomes of them, and close the files. Idempotent."""
        if self._owner is not None:
            _close(self._files, self._owner)
        self._files.clear()
        for transfers in (self._ahead, self._behind):
            transfers.clear()
        self._memory, self._buffers = None, []

    def _pass(self, extents: Sequence[Extent], old: Sequence[bool], visit: Visit, *, writes: bool) -> None:
        self.settle()
        try:
            if any(one.extent is not other for one, other in zip(self._ahead, extents, strict=False)):
                self._forget()
            for index in range(len(extents)):
                self._read_ahead(extents, index, old, cyclic=writes)
                transfer = self._ahead[0]
                transfer.wait()
                visit(index, transfer.buffer)
                self._ahead.popleft()
                if writes:
                    transfer.write()
                    self._behind.append(transfer)
        except BaseException:
            self._abandon()
            raise

    def _read_ahead(
        self, extents: Sequence[Extent], index: int, old: Sequence[bool], *, cyclic: bool
    ) -> None:
        """Start reading until enough is ahead of ``index``; past the end, what the next pass starts with."""
        while len(self._ahead) < _MAX_AHEAD:
            at = index + len(self._ahead)
            has_content = at >= len(extents) or old[at]
            if at >= len(extents):
                at -= len(extents)
                if not cyclic or at >= index or self._is_being_written(extents[at]):
                    return
            slot = self._free_slot()
            transfer = _Transfer(extents[at], slot, self._buffers[slot])
            if has_content:
                transfer.read()
            self._ahead.append(transfer)

    def _is_being_written(self, extent: Extent) -> bool:
        return any(transfer.extent is extent for transfer in self._behind)

    def _free_slot(self) -> int:
        used = {transfer.slot for transfer in (*self._ahead, *self._behind)}
        if len(used) == NUM_BUFFERS:
            used.remove(self._end_oldest_write())
        return next(slot for slot in range(NUM_BUFFERS) if slot not in used)

    def _end_oldest_write(self) -> int:
        """Return the buffer that is free now."""
        self._behind[0].wait()
        return self._behind.popleft().slot

    def _forget(self) -> None:
        """Give up what was read ahead. A read that failed is nobody's concern: it will be tried again."""
        while self._ahead:
            with contextlib.suppress(IoError):
                self._ahead[0].wait()
            self._ahead.popleft()

    def _abandon(self) -> None:
        """Let no request touch the buffers any more; what failed is being raised already."""
        for file in self._files:
            with contextlib.suppress(IoError):
                file.wait_all()
        self._ahead.clear()
        self._behind.clear()

    def _require_owner(self) -> None:
        if self._owner not in (None, os.getpid()):
            raise StateError(
                f"these optimizer states are in a file of process {self._owner}; a forked child cannot use "
                "them: give it state_dict() and an optimizer of its own"
            )


def _close(files: Sequence[AsyncFile], owner: int) -> None:
    if os.getpid() == owner:  # else they are the parent's
        for file in files:
            file.close()
