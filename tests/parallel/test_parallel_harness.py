"""The harness of this folder: what goes wrong on one rank is told, and spoils no later run."""

from __future__ import annotations

import ctypes
import os
import threading

import pytest
import torch
from processes import RanksFailed, run_on_ranks
from torch import distributed as dist

NOTE = "GEMINI_TEST_NOTE"


def _sum_of_ranks(factor: float) -> torch.Tensor:
    total = torch.tensor([factor * (dist.get_rank() + 1)])
    dist.all_reduce(total)
    return total


def _fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank 1 does not want to")
    dist.barrier()


def _hang_on_rank_1() -> None:
    if dist.get_rank() == 1:
        threading.Event().wait()


def _die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def _crash_on_rank_1() -> None:
    if dist.get_rank() == 1:
        ctypes.string_at(0)
    dist.barrier()


def test_every_rank_runs_in_a_group_of_the_asked_size() -> None:
    assert [float(value) for value in run_on_ranks(_sum_of_ranks, 2, 10.0)] == [30.0, 30.0]
    assert [float(value) for value in run_on_ranks(_sum_of_ranks, 3, 1.0)] == [6.0, 6.0, 6.0]


def test_error_of_a_rank_is_told_and_later_runs_work() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)rank 1.*rank 1 does not want to"):
        run_on_ranks(_fail_on_rank_1, 2)
    assert len(run_on_ranks(_sum_of_ranks, 2, 1.0)) == 2


def test_rank_that_dies_is_told_with_its_exit_code() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)rank 1:\ndied with exit code 7"):
        run_on_ranks(_die_on_rank_1, 2)


def _note_in_the_environment(said: str) -> str | None:
    os.environ["LANG"] = os.environ[NOTE] = said
    return os.environ.get(NOTE)


def _read_the_environment() -> tuple[str | None, str | None]:
    return os.environ.get(NOTE), os.environ.get("LANG")


def test_what_a_rank_does_to_its_environment_ends_with_the_run() -> None:
    before = run_on_ranks(_read_the_environment, 3)
    assert run_on_ranks(_note_in_the_environment, 3, "a run's") == ["a run's"] * 3
    assert run_on_ranks(_read_the_environment, 3) == before


def test_rank_that_crashes_is_told_with_its_stack() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)exit code -11\nFatal Python error: .*_crash_on_rank_1"):
        run_on_ranks(_crash_on_rank_1, 2)


def test_rank_that_hangs_is_told() -> None:
    with pytest.raises(RanksFailed, match=r"rank 1:\ndid not end in time"):
        run_on_ranks(_hang_on_rank_1, 2, timeout=2.0)


def _leave_at_once() -> None:
    pass


def test_rank_that_leaves_at_once_waits_until_all_have_met() -> None:
    for _ in range(100):  # without that one in 25 failed on a busy machine
        run_on_ranks(_leave_at_once, 2)
