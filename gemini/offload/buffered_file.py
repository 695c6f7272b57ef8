"""BufferedFile: a file with a few buffers, which writes behind the caller and reads ahead of it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain

import torch

from gemini.errors import IoError
from gemini.offload.async_file import AsyncFile, direct_memory, round_to_block

_NUM_BUFFERS = 8
_NUM_AHEAD = 4  # buffers for reading ahead; the others are for writing behind
_MAX_BUFFER_BYTES = 4 * 2**20
_MIN_BUFFER_BYTES = 64 * 2**10
_SHARE = 40  # the buffers take at most 1 / share of the file, above a small minimum

Range = tuple[int, int]  # (offset, bytes)


class _Buffer:
    """A buffer that holds one range of the file, or none."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.range: Range = (0, 0)
        self.ticket: int | None = None  # of the running transfer
        self.is_new = False  # not yet known to be in the file


class BufferedFile:
    """``nbytes`` of disk space without a name, with at most 32 MiB of memory. For one thread.

    Written bytes are read back from their buffer until the disk has them, so a failed write loses nothing. It
    is repeated when its buffer is needed, and raises if it fails again.
    """

    def __init__(self, directories: list[str] | None, nbytes: int, *, checksums: bool = False) -> None:
        """Reserve the space, by default in the system's directory for temporary files.

        Raises:
            ConfigError: a directory is missing or read-only.
            IoError: there is not enough space.
        """
        share = round_to_block(nbytes // (_SHARE * _NUM_BUFFERS))
        self._buffer_bytes = min(max(share, _MIN_BUFFER_BYTES), _MAX_BUFFER_BYTES)
        directories = directories or [tempfile.gettempdir()]
        self.directory = directories[0]
        self._file = AsyncFile(directories, nbytes, checksums=checksums)
        memory = direct_memory(_NUM_BUFFERS * self._buffer_bytes)
        self._file.register(memory.data_ptr(), memory.numel())
        self._free = [_Buffer(part) for part in memory.split(self._buffer_bytes)]
        self._held: dict[int, _Buffer] = {}  # by the offset of their range, the oldest first

    @property
    def size(self) -> int:
        """The size in bytes."""
        return self._file.size

    def traffic(self) -> tuple[int, int]:
        """Return the bytes read and written so far."""
        done = self._file.stats()
        return int(done["bytes_read"]), int(done["bytes_written"])

    def write(self, offset: int, values: torch.Tensor) -> None:
        """Copy flat bytes into buffers and start to write them; ``values`` may be changed afterwards. Raises
        IoError if an earlier write failed; the rest of these bytes was not taken."""
        for begin, nbytes in self._parts((offset, values.numel())):
            buffer = self._held[begin] = self._take(begin)
            buffer.range, buffer.is_new = (begin, nbytes), True
            buffer.memory[:nbytes].copy_(values[begin - offset : begin - offset + nbytes])
            self._start_writing(buffer)

    def read(self, offset: int, values: torch.Tensor, following: Iterable[Range] = ()) -> None:
        """Read flat bytes, and start to read the ranges ``following``, as far as there are buffers. All
        ranges must be ranges that were written. Raises IoError."""
        parts = list(self._parts((offset, values.numel())))
        ahead = [part for each in following for part in self._parts(each)][:_NUM_AHEAD]
        for index, (begin, nbytes) in enumerate(parts):
            self._read_ahead(chain(parts[index:], ahead))
            buffer = self._held.get(begin) or self._start_reading((begin, nbytes), self._take(begin))
            self._await_read(buffer)
            values[begin - offset : begin - offset + nbytes].copy_(buffer.memory[:nbytes])
            if not buffer.is_new:
                self._free.append(self._held.pop(begin))
        self._read_ahead(ahead)

    def close(self) -> None:
        """Return the space. Idempotent."""
        self._file.close()
        self._free.clear()
        self._held.clear()

    # -- inside ----------------------------------------------------------------------------------

    def _parts(self, whole: Range) -> Iterator[Range]:
        offset, nbytes = whole
        for begin in range(offset, offset + nbytes, self._buffer_bytes):
            yield begin, min(self._buffer_bytes, offset + nbytes - begin)

    def _read_ahead(self, parts: Iterable[Range]) -> None:
        """Start to read the parts that no buffer holds, as far as there are free buffers."""
        num_ahead = sum(not buffer.is_new for buffer in self._held.values())
        for part in parts:
            if part[0] in self._held:
                continue
            if num_ahead == _NUM_AHEAD or not (self._free or self._reclaim_written()):
                return
            self._start_reading(part, self._free.pop())
            num_ahead += 1

    def _start_reading(self, part: Range, buffer: _Buffer) -> _Buffer:
        buffer.range, buffer.is_new = part, False
        buffer.ticket = self._file.read(buffer.memory.data_ptr(), part[1], part[0])
        self._held[part[0]] = buffer
        return buffer

    def _start_writing(self, buffer: _Buffer) -> None:
        offset, nbytes = buffer.range
        buffer.ticket = self._file.write(buffer.memory.data_ptr(), nbytes, offset)

    def _await_read(self, buffer: _Buffer) -> None:
        """Wait until ``buffer`` has its range. Raises IoError; the buffer is then free."""
        if buffer.is_new:
            return
        try:
            self._await(buffer)
        except IoError:
            self._free.append(self._held.pop(buffer.range[0]))
            raise

    def _await(self, buffer: _Buffer) -> None:
        ticket = buffer.ticket
        if ticket is not None:
            try:
                self._file.wait(ticket)
            finally:
                if self._file.done(ticket):  # not if Ctrl-C ended the wait
                    buffer.ticket = None

    def _take(self, offset: int) -> _Buffer:
        """Return a buffer for the range at ``offset``; its previous content is discarded. Raises IoError."""
        held = self._held.get(offset)
        if held is not None:
            with suppress(IoError):
                self._await(held)
            return self._held.pop(offset)
        if not self._free:
            written = next((buffer for buffer in self._held.values() if buffer.is_new), None)
            if written is not None:
                self._finish_writing(written)
            else:  # the range that is read furthest ahead
                last = next(reversed(self._held.values()))
                with suppress(IoError):
                    self._await(last)
                self._free.append(self._held.pop(last.range[0]))
        return self._free.pop()

    def _finish_writing(self, buffer: _Buffer) -> None:
        """Wait until the file has the content of ``buffer``, which becomes free. Raises IoError if the write
        failed twice: the buffer keeps its content."""
        try:
            if buffer.ticket is None:
                self._start_writing(buffer)
            self._await(buffer)
        except IoError:
            self._start_writing(buffer)
            self._await(buffer)
        self._free.append(self._held.pop(buffer.range[0]))

    def _reclaim_written(self) -> bool:
        """Free a buffer with a finished, successful write; say whether there was one."""
        for buffer in list(self._held.values()):
            if buffer.is_new and buffer.ticket is not None and self._file.done(buffer.ticket):
                with suppress(IoError):
                    self._await(buffer)
                    self._free.append(self._held.pop(buffer.range[0]))
                    return True
        return False
