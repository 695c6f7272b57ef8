"""A process ends when the threads of torch that hold its tensors have let go of them."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gemini.system import threads
from gemini.system.threads import wait_until_idle

NAME = "a_busy_thread"
MANY = bytes(2**26)


def work_under_a_name(begun: threading.Event, done: list[str]) -> None:
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(NAME)
    begun.set()
    for _ in range(3):
        done.append(hashlib.sha256(MANY).hexdigest())  # without Python's lock
    threading.Event().wait(0.5)  # asleep, as a thread is that waits for work


def test_a_thread_that_runs_is_waited_for_and_one_that_sleeps_is_not() -> None:
    begun, done = threading.Event(), list[str]()
    thread = threading.Thread(target=work_under_a_name, args=(begun, done))
    thread.start()
    begun.wait()
    assert not wait_until_idle(NAME, 0.0)
    assert wait_until_idle("nobody has this name", 0.0)
    assert wait_until_idle(NAME, 60.0)
    assert len(done) == 3
    assert thread.is_alive()
    thread.join()


def test_a_system_that_does_not_show_its_threads_makes_nobody_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_TASKS", tmp_path / "task")
    assert wait_until_idle("", 0.0)


PROGRAM = """
import atexit, gemini.comm.heartbeats as heartbeats
heartbeats.wait_until_idle = lambda name, seconds: print(name)
heartbeats.end_gloo_gently()
heartbeats.end_gloo_gently()
atexit.register(print, "what it registers later")
"""


def test_a_program_waits_once_after_what_it_does_at_its_end() -> None:
    said = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[:2] == ["what it registers later", "pt_gloo_runloop"]
    assert said.count("pt_gloo_runloop") == 1
