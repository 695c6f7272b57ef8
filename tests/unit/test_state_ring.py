"""Extents that go round a ring of buffers: whatever the order of passes and requests, none is lost or old."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from gemini.errors import IoError, StateError
from gemini.optim.disk_states import NUM_BUFFERS, Extent, StateRing

EXTENT_BYTES = 4096
SEEDS = range(20)


class LateFile:
    """Carries every request out at a random time before the wait for it ends.

    A buffer that is used again too early, or an extent read before it was written, gives wrong bytes.
    """

    def __init__(self, num_extents: int, seed: int) -> None:
        self.data = bytearray(num_extents * EXTENT_BYTES)
        self.pending: dict[int, Callable[[], None]] = {}
        self.failing: set[int] = set()  # tickets, also of the future
        self.closed = False
        self.registered: int | None = None
        self.tickets = 0
        self._random = random.Random(seed)

    def register(self, address: int, _nbytes: int) -> bool:
        assert self.registered is None
        self.registered = address
        return True

    def unregister(self, address: int) -> None:
        assert self.registered == address
        assert not self.pending
        self.registered = None

    def read(self, address: int, nbytes: int, offset: int) -> int:
        ctypes.memset(address, 0xEE, nbytes)

        def carry_out() -> None:
            ctypes.memmove(address, bytes(self.data[offset : offset + nbytes]), nbytes)

        return self._start(carry_out)

    def write(self, address: int, nbytes: int, offset: int) -> int:
        def carry_out() -> None:
            self.data[offset : offset + nbytes] = ctypes.string_at(address, nbytes)

        return self._start(carry_out)

    def wait(self, ticket: int) -> None:
        assert not self.closed
        self._advance()
        self._finish([ticket])
        if ticket in self.failing:
            raise IoError(errno.EIO, "broken", "the disk", 4096)

    def wait_all(self) -> None:
        self._finish(list(self.pending))

    def close(self) -> None:
        self.wait_all()
        self.closed = True

    def counters(self) -> list[int]:
        """Return the first byte of every extent, of which all bytes are the same."""
        extents = [self.data[at : at + EXTENT_BYTES] for at in range(0, len(self.data), EXTENT_BYTES)]
        assert all(len(set(extent)) == 1 for extent in extents)
        return [extent[0] for extent in extents]

    def _start(self, request: Callable[[], None]) -> int:
        assert not self.closed
        self.tickets += 1
        self.pending[self.tickets] = request
        self._advance()
        return self.tickets

    def _advance(self) -> None:
        some = self._random.sample(list(self.pending), self._random.randrange(len(self.pending) + 1))
        self._finish(some)

    def _finish(self, tickets: Sequence[int]) -> None:
        for ticket in tickets:
            request = self.pending.pop(ticket, None)
            if request is not None:
                request()


def make(num_extents: int, seed: int = 0) -> tuple[StateRing, LateFile, list[Extent]]:
    file: Any = LateFile(num_extents, seed)
    ring = StateRing()
    ring.add(file, EXTENT_BYTES)
    return ring, file, [Extent(file, at * EXTENT_BYTES, EXTENT_BYTES) for at in range(num_extents)]


def count_up(ring: StateRing, extents: Sequence[Extent], old: bool = True) -> None:
    """Add one to every byte of ``extents``; set them to one when they are new."""

    def visit(_index: int, buffer: torch.Tensor) -> None:
        if old:
            buffer += 1
        else:
            buffer.fill_(1)

    ring.update(extents, [old] * len(extents), visit)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("num_extents", [1, 2, NUM_BUFFERS - 1, NUM_BUFFERS, 3 * NUM_BUFFERS])
def test_passes_over_any_extents_change_each_of_them_once(num_extents: int, seed: int) -> None:
    ring, file, extents = make(num_extents, seed)
    choice = random.Random(seed)
    count_up(ring, extents, old=False)
    want = [1] * num_extents
    for _ in range(12):
        some = [at for at in range(num_extents) if choice.random() < choice.choice([0.3, 0.9, 1.0])]
        if choice.random() < 0.3:
            seen: list[int] = []
            ring.read([extents[at] for at in some], lambda _, buffer, seen=seen: seen.append(int(buffer[-1])))
            assert seen == [want[at] for at in some]
            continue
        count_up(ring, [extents[at] for at in some])
        want = [count + (at in some) for at, count in enumerate(want)]
    ring.settle()
    assert file.counters() == want


def test_a_pass_reads_ahead_for_the_next_one() -> None:
    ring, file, extents = make(4 * NUM_BUFFERS)
    count_up(ring, extents, old=False)
    ahead = file.tickets - len(extents)
    assert 0 < ahead < NUM_BUFFERS
    for number in (1, 2):
        count_up(ring, extents)
        assert file.tickets == (1 + 2 * number) * len(extents) + ahead  # a read and a write for each


def test_memory_is_that_of_the_buffers_whatever_is_in_the_files() -> None:
    sizes = []
    for num_extents in (NUM_BUFFERS, 100 * NUM_BUFFERS):
        ring, _, extents = make(num_extents)
        count_up(ring, extents, old=False)
        sizes.append(ring.nbytes)
    assert sizes == [NUM_BUFFERS * EXTENT_BYTES] * 2


def test_a_file_with_larger_extents_joins() -> None:
    ring, file, extents = make(20)
    count_up(ring, extents, old=False)
    larger: Any = LateFile(40, 1)
    ring.add(larger, 2 * EXTENT_BYTES)
    extents += [Extent(larger, at * EXTENT_BYTES, 2 * EXTENT_BYTES) for at in range(0, 40, 2)]
    count_up(ring, extents[20:], old=False)
    count_up(ring, extents)
    ring.settle()
    assert file.counters() == [2] * 20
    assert larger.counters() == [2] * 40
    assert file.registered == larger.registered == ring._buffers[0].data_ptr()


@pytest.mark.parametrize("request_number", range(1, 70))
def test_any_failed_request_is_raised_once_and_nothing_stays_under_way(request_number: int) -> None:
    ring, file, extents = make(3 * NUM_BUFFERS, request_number)
    count_up(ring, extents, old=False)
    ring.settle()
    file.failing.add(file.tickets + request_number)

    def passes() -> None:
        for _ in range(3):
            count_up(ring, extents)

    with pytest.raises(IoError, match="broken"):
        passes()
    file.failing.clear()
    count_up(ring, extents, old=False)
    count_up(ring, extents)
    ring.settle()
    assert file.counters() == [2] * len(extents)


def test_late_write_that_fails_is_raised_before_the_next_pass_changes_anything() -> None:
    ring, file, extents = make(3 * NUM_BUFFERS)
    count_up(ring, extents, old=False)
    file.failing.add(ring._behind[-1].ticket)
    visited: list[int] = []
    with pytest.raises(IoError):
        ring.update(extents, [True] * len(extents), lambda index, _: visited.append(index))
    assert visited == []


def test_read_ahead_that_failed_and_is_not_needed_is_forgotten() -> None:
    ring, file, extents = make(3 * NUM_BUFFERS)
    count_up(ring, extents, old=False)
    file.failing.update(transfer.ticket for transfer in ring._ahead)
    count_up(ring, extents[NUM_BUFFERS:])
    ring.settle()
    assert file.counters() == [1] * NUM_BUFFERS + [2] * 2 * NUM_BUFFERS


class Stop(BaseException):
    """What no code expects."""


@pytest.mark.parametrize("index", [0, 1, 11, 23])
def test_pass_that_stops_leaves_nothing_under_way(index: int) -> None:
    ring, file, extents = make(3 * NUM_BUFFERS)
    count_up(ring, extents, old=False)

    def visit(at: int, _buffer: torch.Tensor) -> None:
        if at == index:
            raise Stop

    with contextlib.suppress(Stop):
        ring.update(extents, [True] * len(extents), visit)
    assert file.pending == {}
    count_up(ring, extents, old=False)
    ring.settle()
    assert file.counters() == [1] * len(extents)


def test_ring_that_is_dropped_ends_its_requests_while_the_buffers_are_there() -> None:
    ring, file, extents = make(3 * NUM_BUFFERS)
    count_up(ring, extents, old=False)
    del ring
    assert file.closed
    assert file.counters() == [1] * len(extents)


def test_forked_child_is_refused_and_closes_nothing() -> None:
    ring, file, extents = make(3 * NUM_BUFFERS)
    count_up(ring, extents, old=False)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(StateError):
            count_up(ring, extents)
            os._exit(1)
        ring.close()
        os._exit(2 if file.closed else 7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    count_up(ring, extents)
    ring.settle()
    assert file.counters() == [2] * len(extents)
