"""Our side of ``gemini bench io``: one AsyncFile, written and read through a ring."""

from __future__ import annotations

import mmap
import os
import stat
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from gemini.errors import StateError
from gemini.offload import AsyncFile
from gemini_bench.io_settings import Settings, pieces
from gemini_bench.io_turns import Mover

_SLOTS = 8  # parts of the buffer that are reused one by one


def page_aligned(nbytes: int) -> Tensor:
    """Return bytes that begin with a page, every page touched."""
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8).fill_(1)


class OwnFile:
    """An AsyncFile with a buffer; close it."""

    def __init__(
        self,
        directory: Path,
        settings: Settings,
        *,
        backend: Any = None,
        checksums: bool = False,
    ) -> None:
        """Make the file; ``backend`` and ``checksums`` as for AsyncFile, whose errors this raises."""
        before = set(_open_files())
        self.file = AsyncFile(
            directory,
            settings.size_bytes,
            backend=backend,
            depth=settings.depth,
            request_bytes=settings.block_bytes,
            checksums=checksums,
        )
        self._new = {inode: number for inode, number in _open_files().items() if inode not in before}
        self._size = settings.size_bytes
        self._memory = page_aligned(settings.buffer())
        blocks = self._memory.numel() // settings.block_bytes
        self._slot_bytes = -(-blocks // _SLOTS) * settings.block_bytes
        self._num_slots = max(1, self._memory.numel() // self._slot_bytes)
        self.registered = bool(self.file.register(self._memory.data_ptr(), self._memory.numel()))

    def write(self) -> float:
        """Write the file once; return the seconds."""
        return self._move(self.file.write)

    def read(self) -> float:
        """Read the file once; return the seconds."""
        return self._move(self.file.read)

    def verify(self) -> bool:
        """Write a pattern, read it, and compare what the ring holds in the end."""
        pattern = torch.arange(self._memory.numel(), dtype=torch.int32).to(torch.uint8)
        self._memory.copy_(pattern)
        self.write()
        self._memory.zero_()
        self.read()
        touched = min(self._size, self._num_slots * self._slot_bytes)
        return torch.equal(self._memory[:touched], pattern[:touched])

    def descriptor(self) -> int:
        """Return a descriptor of the file, by which others can open it.

        Raises:
            StateError: none of this process's open files is it.
        """
        for number in self._new.values():
            if os.fstat(number).st_size >= self._size:
                return number
        raise StateError("the file that AsyncFile made is not among the open files of this process")

    def mover(self, name: str) -> Mover:
        """Return this file as a contender."""
        return Mover(name, self.write, self.read, self.verify)

    def close(self) -> None:
        """Give the disk space back."""
        self.file.close()

    def __enter__(self) -> OwnFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _move(self, start: Callable[[int, int, int], int]) -> float:
        begin = time.perf_counter()
        address = self._memory.data_ptr()
        tickets: deque[int] = deque()
        for number, (offset, nbytes) in enumerate(pieces(self._size, self._slot_bytes)):
            if len(tickets) == self._num_slots:
                self.file.wait(tickets.popleft())
            slot = number % self._num_slots
            tickets.append(start(address + slot * self._slot_bytes, nbytes, offset))
        self.file.wait_all()
        return time.perf_counter() - begin


def _open_files() -> dict[tuple[int, int], int]:
    """Return a descriptor of every regular file that this process has open, by the file's identity."""
    found = {}
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            about = os.fstat(int(entry.name))
        except OSError:  # the one that listed the directory
            continue
        if stat.S_ISREG(about.st_mode):
            found[about.st_dev, about.st_ino] = int(entry.name)
    return found
