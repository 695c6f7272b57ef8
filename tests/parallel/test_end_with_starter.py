"""Ranks end with the process that has started them, also where that was killed."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

import pytest

from gemini.jobs.run import ranks
from gemini.parallel.launch import local_ranks
from gemini.system.process import end_with_parent

_SECONDS = 30.0


def test_a_rank_of_a_process_that_is_killed_ends() -> None:
    alive, held = os.pipe()
    starter = os.fork()
    if starter == 0:
        if os.fork() == 0:
            os.environ[local_ranks._STARTER] = str(os.getppid())
            local_ranks.end_with_starter()
            os.write(held, b"x")
        signal.pause()  # both, until they are killed
    os.close(held)
    try:
        assert os.read(alive, 1) == b"x"
        os.kill(starter, signal.SIGKILL)
        os.waitpid(starter, 0)
        assert select.select([alive], [], [], _SECONDS)[0]
        assert os.read(alive, 1) == b"", "the rank has ended, too"
    finally:
        os.close(alive)


def test_a_rank_that_begins_after_its_starter_has_ended_ends_at_once() -> None:
    rank = os.fork()
    if rank == 0:
        end_with_parent(os.getpid())  # no parent of this process
        os._exit(0)
    assert os.waitpid(rank, 0)[1] == signal.SIGKILL


def test_every_rank_looks_for_its_starter_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ended_with: list[int] = []
    monkeypatch.setattr(local_ranks, "end_with_parent", ended_with.append)
    for name, value in ranks._variables(Path("errors"), 2).items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        with ranks.errors_of_rank():
            pass
    assert ended_with == [os.getpid()]
