"""Where a thread is, asked by another one."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gemini.comm.place import ProgramPlace, find_place

# While a place is looked for, garbage is collected, and its finalizer lets the other thread leave its frames,
# which look like torch's, and fill their memory with others: the process died.
GARBAGE = """
import _thread
import gc
import threading

import torch

from gemini.comm.place import find_place

arrived, leave, left, go_on = (_thread.allocate_lock() for _ in range(4))
armed = []
for lock in (arrived, leave, left, go_on):
    lock.acquire()


class Garbage:
    def __init__(self):
        self.itself = self

    def __del__(self):
        if armed:
            armed.clear()
            leave.release()
            left.acquire()


TORCH = '''
def wait_deep(depth):
    if depth:
        wait_deep(depth - 1)
    else:
        arrived.release()
        leave.acquire()


def fill(depth, *more):
    if depth:
        one, two, three = [depth], [depth, depth], {depth: depth}
        return fill(depth - 1, one, two, three)
    left.release()
    go_on.acquire()
'''
exec(compile(TORCH, torch.__file__, "exec"))


def serve():
    while True:
        wait_deep(30)
        fill(9)


thread = threading.Thread(target=serve, daemon=True)
thread.start()
gc.disable()
gc.freeze()  # what torch has made, for speed
for turn in range(100):
    arrived.acquire()
    gc.collect()
    Garbage()
    armed.append(True)
    gc.enable()
    gc.set_threshold(1 + turn % 50)
    place = find_place(thread.ident)
    gc.set_threshold(700)
    gc.disable()
    gc.collect()
    assert not armed
    go_on.release()
"""


def _deep(depth: int, wait: Callable[[], object]) -> None:
    if depth:
        _deep(depth - 1, wait)
    else:
        wait()


def _find(target: Callable[[Callable[[], object]], object], wanted: str) -> ProgramPlace:
    """Return the place of a thread in which ``target`` waits by calling what it is given, once it is as
    ``wanted``."""
    lock, ends = threading.Lock(), time.monotonic() + 20.0
    with lock:
        thread = threading.Thread(target=target, args=(lock.acquire,))
        thread.start()
        assert thread.ident is not None
        place = find_place(thread.ident)
        while place.text != wanted and time.monotonic() < ends:
            place = find_place(thread.ident)
    thread.join()
    return place


@pytest.mark.parametrize("depth", [0, 500])
def test_the_innermost_line_is_named(depth: int) -> None:
    wanted = f"test_place.py:{_deep.__code__.co_firstlineno + 4} in _deep"
    assert _find(lambda wait: _deep(depth, wait), wanted) == ProgramPlace(wanted, in_collective=False)


def test_a_file_may_have_any_name(tmp_path: Path) -> None:
    names: dict[str, Callable[[Callable[[], object]], object]] = {}
    file = tmp_path / 'gr\N{LATIN SMALL LETTER O WITH DIAERESIS} "als", line 3.py'
    exec(compile("def trains(wait):\n    wait()\n", str(file), "exec"), names)
    wanted = f"{file.name}:2 in trains"
    assert _find(names["trains"], wanted).text == wanted


def test_a_thread_that_is_none_is_nowhere() -> None:
    assert find_place(1) == ProgramPlace("", in_collective=False)


def test_finding_a_place_keeps_no_frame_that_is_left() -> None:
    done = subprocess.run([sys.executable, "-c", GARBAGE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
