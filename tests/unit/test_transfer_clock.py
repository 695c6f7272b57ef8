"""The clock of the transfer engine is that of Python."""

from __future__ import annotations

import time

from gemini import _C


def test_transfers_are_timed_on_the_clock_of_perf_counter() -> None:
    engine = _C.TransferEngine()
    space, arena = _C.WindowSpace(2 << 20), _C.Arena(2 << 20)
    source, target = space.create(1 << 20), space.create(1 << 20)
    for window in (source, target):
        arena.map(window)
    before = time.perf_counter()
    engine.copy(target.address, source.address, source.nbytes, _C.Link.H2D)
    engine.drain()
    after = time.perf_counter()
    (done,) = engine.poll()
    assert before <= done.begin_s <= done.end_s <= after
    engine.close()
