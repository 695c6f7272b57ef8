"""Tensors of files read before they are asked for, in no more memory than the largest of them takes, and in
the same memory again and again: pages that a process gets anew are zeroed first, which takes as long as
reading them from the page cache."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Protocol

import torch

from gemini import _C
from gemini.system.threads import Workers

# More keeps a disk no busier, and leaves less for memory that is used again.
_MOST_AHEAD_BYTES = 64 * 2**20
# Of what is freed the C library keeps up to 64 MiB for each thread, once it has seen blocks as large.
_MOST_FREED_BYTES = 48 * 2**20


class Readable(Protocol):
    """A tensor in a file."""

    @property
    def name(self) -> str: ...

    @property
    def nbytes(self) -> int: ...

    def read(self, memory: torch.UntypedStorage | None = None) -> torch.Tensor:
        """Return a copy in ``memory``, which is of its size, or in some of its own; may be called on another
        thread."""
        ...


class TensorReads:
    """Hands out tensors of files, for one thread; close it before the files.

    A caller that has written a tensor's values where they belong puts it into ``spent``: the next of its size
    gets its memory. Spare memory, what was handed out last and what waits for its turn take at most what the
    largest tensor of the order does.
    """

    def __init__(self) -> None:
        self.spent: list[torch.Tensor] = []
        self._order: list[Readable] = []
        self._places: dict[str, int] = {}
        self._next = 0  # in the order: what nobody has read yet
        self._most_bytes = 0
        self._spare = _Spare()
        self._freed_bytes = 0  # since the system was given back what was freed
        self._ahead: dict[str, _Read] = {}
        self._ahead_bytes = 0
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
        while self.spent:
            self._spare.add(self.spent.pop().untyped_storage())
        read = self._ahead.pop(tensor.name, None)
        self._ahead_bytes -= 0 if read is None else read.nbytes
        memory = self._spare.take(tensor.nbytes) if read is None else None
        self._keep_within(tensor.nbytes)
        if read is not None:
            values = read.result()
        else:
            values = tensor.read(memory)
            self._next = max(self._next, self._places.get(tensor.name, -1) + 1)
        self._begin(tensor.nbytes)
        return values

    def _begin(self, in_use_bytes: int) -> None:
        """Begin to read what follows, as far as there is room beside what is in use."""
        most_bytes = min(self._most_bytes - in_use_bytes, _MOST_AHEAD_BYTES)
        while self._workers is not None and self._next < len(self._order):
            tensor = self._order[self._next]
            if self._ahead_bytes + tensor.nbytes > most_bytes:
                return
            memory = self._spare.take(tensor.nbytes)
            self._keep_within(in_use_bytes + tensor.nbytes)
            self._ahead[tensor.name] = _Read(tensor, memory, self._workers)
            self._ahead_bytes += tensor.nbytes
            self._next += 1

    def _keep_within(self, in_use_bytes: int) -> None:
        """Free spare memory for which there is no room beside what is in use and read ahead."""
        room_bytes = max(0, self._most_bytes - in_use_bytes - self._ahead_bytes)
        self._freed_bytes += self._spare.shrink_to(room_bytes)
        if self._workers is not None and self._freed_bytes >= _MOST_FREED_BYTES:
            self._freed_bytes = 0
            self._workers.submit(_give_back)

    def close(self) -> None:
        """End the thread, and give the system back what reading took. Idempotent."""
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.close()
            self._ahead.clear()
            self._ahead_bytes = 0
            self._spare.shrink_to(0)
            _give_back()  # what each thread had


def _give_back() -> None:
    """Have the C library give the system what was freed."""
    _C.malloc_trim()


class _Spare:
    """Memory that nobody uses, for tensors of the same size. Every call takes constant time: there may be as
    many pieces as tensors."""

    def __init__(self) -> None:
        self._storages: OrderedDict[int, torch.UntypedStorage] = OrderedDict()  # the oldest first
        self._of_size: defaultdict[int, deque[int]] = defaultdict(deque)  # their keys, in the same order
        self._next = 0
        self._nbytes = 0

    def add(self, storage: torch.UntypedStorage) -> None:
        if storage.nbytes():
            self._storages[self._next] = storage
            self._of_size[storage.nbytes()].append(self._next)
            self._next += 1
            self._nbytes += storage.nbytes()

    def take(self, nbytes: int) -> torch.UntypedStorage | None:
        """Return some of exactly ``nbytes``, which is the caller's, if there is any."""
        keys = self._of_size.get(nbytes)
        if not keys:
            return None
        self._nbytes -= nbytes
        return self._storages.pop(keys.popleft())

    def shrink_to(self, most_bytes: int) -> int:
        """Free what is more than ``most_bytes``, the oldest first; return how many bytes that was."""
        freed_bytes = 0
        while self._nbytes > most_bytes:
            _, storage = self._storages.popitem(last=False)
            self._of_size[storage.nbytes()].popleft()  # the oldest of all is the oldest of its size
            freed_bytes += storage.nbytes()
            self._nbytes -= storage.nbytes()
            storage.resize_(0)
        return freed_bytes


class _Read:
    """A tensor that is being read on another thread."""

    def __init__(self, tensor: Readable, memory: torch.UntypedStorage | None, workers: Workers) -> None:
        self.nbytes = tensor.nbytes
        self._tensor, self._memory = tensor, memory
        self._values: torch.Tensor | None = None
        self._done: Future[None] = workers.submit(self._run)

    def _run(self) -> None:
        self._values = self._tensor.read(self._memory)

    def result(self) -> torch.Tensor:
        """Wait for the values and return them; raise what reading raised."""
        self._done.result()
        assert self._values is not None
        return self._values
