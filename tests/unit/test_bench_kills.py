"""Case ``kills`` of ``gemini bench programs``: signals come when they should; what is wrong is noticed."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

from gemini_bench.killed_processes import Kill, Program, Setting, live
from gemini_bench.killed_runs import Left, Run
from gemini_bench.programs_kills import Campaign, Found

_STEPS = 4


class Counting(Run):
    """A run whose checkpoint is one file, the number of its steps. ``forgets``: it always begins again;
    ``repeats``: the step after a checkpoint is another one than without it."""

    name = "counting"
    is_command = False

    def __init__(self, *, forgets: bool = False, repeats: bool = False) -> None:
        self._forgets, self._repeats = forgets, repeats

    def program(self, place: Path, *, fresh: bool) -> Program:
        def count() -> int:
            done = 0 if self._forgets else self.saved_step(place)
            print(f"begins after {done}", flush=True)
            shift = done if self._repeats else 0
            for step in range(done, _STEPS):
                (place / f"step-{step}").write_text(str(step + shift))
                (place / "saved.tmp").write_text(str(step + 1))
                (place / "saved.tmp").replace(place / "saved")
            return 0

        return count

    def left(self, place: Path) -> Left:
        steps = {step: (place / f"step-{step}").read_text() for step in range(_STEPS)}
        return Left(steps, {}, frozenset(path.name for path in place.iterdir()))

    def saved_step(self, place: Path) -> int:
        return int((place / "saved").read_text()) if (place / "saved").exists() else 0

    def first_step(self, place: Path, said: str, processes: int) -> int | None:
        found = re.search(r"begins after (\d+)", said)
        return int(found[1]) if found else None


def campaign(tmp_path: Path, run: Run, kills: int = 8) -> Found:
    return Campaign(tmp_path, {run.name: run}, seed=0, importing=0.0).kill(kills)


def test_a_run_that_goes_on_where_it_was_has_nothing_wrong(tmp_path: Path) -> None:
    found = campaign(tmp_path, Counting())
    assert found.wrong == []
    assert found.kills["counting"] >= 8
    assert found.resumed > 0


def test_a_run_that_begins_again_is_noticed_although_its_losses_are_right(tmp_path: Path) -> None:
    assert "went on after step 0, and step" in campaign(tmp_path, Counting(forgets=True)).wrong[0]


def test_a_step_that_is_another_after_a_kill_is_noticed(tmp_path: Path) -> None:
    assert any("steps differ" in each for each in campaign(tmp_path, Counting(repeats=True)).wrong)


def test_a_process_is_killed_right_before_a_change_of_its_files(tmp_path: Path) -> None:
    def write() -> int:
        for number in range(5):
            (tmp_path / str(number)).write_text("")
        return 0

    (lived,) = live([write], [Setting(tmp_path)], [Kill(operation=4)])
    assert (lived.code, lived.killed) == (-signal.SIGKILL, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "tmp"]
    (lived,) = live([write], [Setting(tmp_path)], [None])
    assert (lived.code, lived.killed, lived.operations) == (0, False, 5)


def test_a_process_that_waits_for_ever_is_ended_and_named(tmp_path: Path) -> None:
    (lived,) = live([lambda: signal.pause() or 0], [Setting(tmp_path, most_seconds=0.2)], [None])
    assert lived.code is None


def test_ranks_are_told_when_one_of_them_has_died(tmp_path: Path) -> None:
    def wait() -> int:
        time.sleep(60)
        return 0

    first, second = live([wait] * 2, [Setting(tmp_path)] * 2, [None, Kill(seconds=0.1)])
    assert (first.code, second.code) == (-signal.SIGTERM, -signal.SIGKILL)


def test_a_file_that_may_not_grow_fails_the_program(tmp_path: Path) -> None:
    def write() -> int:
        print("writes", flush=True)
        with (tmp_path / "file").open("wb", buffering=0) as file:
            file.write(bytes(os.sysconf("SC_PAGE_SIZE")))
            return int(file.write(bytes(1)) or 0)

    size = os.sysconf("SC_PAGE_SIZE")
    (lived,) = live([write], [Setting(tmp_path, file_bytes=size)], [None])
    assert lived.code == 1
    assert "File too large" in lived.said
