"""Tensors of files read before they are asked for, in no more memory than the largest of them takes."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from typing import Protocol

import torch

from gemini import _C
from gemini.system.threads import Workers

# Of what is freed the C library keeps up to 64 MiB for each thread, once it has seen blocks as large.
_MOST_FREED_BYTES = 48 * 2**20


class Readable(Protocol):
    """A tensor in a file."""

    @property
    def name(self) -> str: ...

    @property
    def nbytes(self) -> int: ...

    def read(self) -> torch.Tensor:
        """Return a copy in memory of its own; may be called on another thread."""
        ...


class TensorReads:
    """Hands out tensors of files, for one thread; close it before the files.

    Whoever has written a tensor's values where they belong puts it into ``spent``: its memory goes before
    there is more. What was handed out last and what waits for its turn take at most what the largest tensor
    of the order does.
    """

    def __init__(self) -> None:
        self.spent: list[torch.Tensor] = []
        self._order: list[Readable] = []
        self._places: dict[str, int] = {}
        self._next = 0  # in the order: what nobody has read yet
        self._most_bytes = 0
        self._freed_bytes = 0  # since the system was given back what was freed
        self._ahead: dict[str, _Read] = {}
        self._workers: Workers | None = None

    def expect(self, order: Iterable[Readable]) -> None:
        """Say in which order tensors will be asked for, as far as that is known: one that comes at another
        time is read then, one that never comes holds its memory until the end.

        Raises:
            ThreadError: the system starts no thread.
        """
        self.close()
        self._order = list(order)
        self._places = {tensor.name: place for place, tensor in enumerate(self._order)}
        self._next = 0
        self._most_bytes = max((tensor.nbytes for tensor in self._order), default=0)
        self._workers = Workers(1)

    def take(self, tensor: Readable) -> torch.Tensor:
        """Return the values of ``tensor``, which are the caller's, and begin to read those that follow.
        Raises what reading it raised."""
        self._free_spent()
        read = self._ahead.pop(tensor.name, None)
        values = read.result() if read is not None else tensor.read()
        if read is None:
            self._next = max(self._next, self._places.get(tensor.name, -1) + 1)
        self._begin(tensor.nbytes)
        return values

    def _free_spent(self) -> None:
        while self.spent:
            storage = self.spent.pop().untyped_storage()
            self._freed_bytes += storage.nbytes()
            storage.resize_(0)
        if self._workers is not None and self._freed_bytes >= _MOST_FREED_BYTES:
            self._freed_bytes = 0
            self._workers.submit(_give_back)

    def _begin(self, in_use_bytes: int) -> None:
        room = self._most_bytes - in_use_bytes - sum(read.nbytes for read in self._ahead.values())
        while self._workers is not None and self._next < len(self._order):
            tensor = self._order[self._next]
            room -= tensor.nbytes
            if room < 0:
                return
            self._ahead[tensor.name] = _Read(tensor, self._workers)
            self._next += 1

    def close(self) -> None:
        """End the thread, and give the system back what reading took. Idempotent."""
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.close()
            self._ahead.clear()
            _give_back()  # what each thread had


def _give_back() -> None:
    """Have the C library give the system what was freed."""
    _C.malloc_trim()


class _Read:
    """A tensor that is being read on another thread."""

    def __init__(self, tensor: Readable, workers: Workers) -> None:
        self.nbytes = tensor.nbytes
        self._tensor = tensor
        self._values: torch.Tensor | None = None
        self._done: Future[None] = workers.submit(self._run)

    def _run(self) -> None:
        self._values = self._tensor.read()

    def result(self) -> torch.Tensor:
        """Wait for the values and return them; raise what reading raised."""
        self._done.result()
        assert self._values is not None
        return self._values
