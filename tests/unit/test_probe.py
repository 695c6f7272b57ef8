"""Link speeds: fitted from two sizes, measured by real transfers, taken from use where there is enough."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gemini.chunk import TierBudgets
from gemini.chunk.cpu_memory import CPU
from gemini.chunk.gpu_memory import SimulatedDevice
from gemini.errors import IoError
from gemini.memstats.trace import LinkSpeed
from gemini.placement import probe
from gemini.runtime.step import recorder as recorder_module
from gemini.runtime.step.recorder import ENOUGH_BYTES, LinkMeter, PeriodTimer


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test a process that knows no link."""
    monkeypatch.setattr(probe, "_known", {})


@given(st.floats(1e6, 1e12), st.floats(0, 1))
def test_the_fit_finds_the_link_that_two_transfers_went_over(rate: float, latency: float) -> None:
    link = LinkSpeed("h2d", rate, latency)
    small, large = probe.SMALL_BYTES, probe.LARGE_BYTES
    found = probe.fitted("h2d", (small, link.seconds(small)), (large, link.seconds(large)))
    assert found.seconds(small) == pytest.approx(link.seconds(small))
    assert found.seconds(large) == pytest.approx(link.seconds(large))


@pytest.mark.parametrize("small_seconds", [0.1, 1.0, 3.0, 0.0001])
def test_noise_never_makes_a_link_that_cannot_be(small_seconds: float) -> None:
    found = probe.fitted("h2d", (100, small_seconds), (1000, 1.0))
    assert found.bytes_per_second > 0
    assert found.latency_seconds >= 0


@pytest.mark.parametrize("seconds", [0.0, 0.02])
def test_every_link_between_tiers_that_exist_is_measured_and_no_file_is_left(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_LINK_SECONDS", seconds)
    names = [speed.name for speed in probe.probe_links(disk_dir=str(tmp_path), host=True)]
    assert names == ["h2d", "d2h", "disk_write", "disk_read"]
    assert probe.probe_links(disk_dir=None, host=False) == ()
    assert list(tmp_path.iterdir()) == []


def test_a_probe_leaves_the_random_numbers_of_training_alone(tmp_path: Path) -> None:
    states = torch.get_rng_state(), random.getstate()
    probe.probe_links(disk_dir=str(tmp_path), host=True)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_a_drive_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = probe.probe_links(disk_dir=str(tmp_path), host=True)
    monkeypatch.setattr(probe, "_probe", None)  # what is called raises
    (tmp_path / "other").mkdir()
    assert probe.probe_links(disk_dir=str(tmp_path / "other"), host=True) == first


def test_each_of_several_ranks_has_its_part_of_a_drive(tmp_path: Path) -> None:
    alone = probe.probe_links(disk_dir=str(tmp_path), host=False)
    four = probe.probe_links(disk_dir=str(tmp_path), host=False, ranks=4)
    assert [each.bytes_per_second for each in four] == [each.bytes_per_second / 4 for each in alone]
    assert [each.latency_seconds for each in four] == [each.latency_seconds for each in alone]


def test_a_directory_that_takes_no_file_has_no_links_and_may_have_some_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object) -> Any:
        raise IoError(28, "No space left on device", str(tmp_path))

    assert probe.probe_links(disk_dir=str(tmp_path / "gone"), host=False) == ()
    with monkeypatch.context() as patch:
        patch.setattr(probe, "AsyncFile", full)
        assert probe.probe_links(disk_dir=str(tmp_path), host=False) == ()
    assert len(probe.probe_links(disk_dir=str(tmp_path), host=False)) == 2


class UsedChunks:
    """A chunk manager's links, whose counts the test sets."""

    def __init__(self, disk_dir: str | None) -> None:
        self.budgets = TierBudgets(1, 1, 1, disk_dir)
        self.device = CPU
        self.stall_seconds = 0.0
        self.moved = dict.fromkeys(recorder_module.LINKS, 0)
        self.shared_seconds = 0.0

    def link_stats(self) -> dict[str, dict[str, float]]:
        return {
            name: {"bytes": nbytes, "seconds": nbytes / 2**30, "shared_seconds": self.shared_seconds}
            for name, nbytes in self.moved.items()
        }


def test_a_link_that_moved_enough_in_the_step_is_judged_by_that(tmp_path: Path) -> None:
    chunks: Any = UsedChunks(str(tmp_path))
    chunks.moved["disk_read"] = ENOUGH_BYTES
    meter = LinkMeter(chunks)
    meter.begin()
    chunks.moved.update(d2h=ENOUGH_BYTES, h2d=ENOUGH_BYTES - 1, disk_read=2 * ENOUGH_BYTES - 1)
    speeds = {speed.name: speed for speed in meter.speeds()}
    assert list(speeds) == list(recorder_module.LINKS)
    assert speeds["d2h"] == LinkSpeed("d2h", 2**30, 0.0)
    assert [name for name, speed in speeds.items() if speed.bytes_per_second == 2**30] == ["d2h"]


def test_half_of_the_time_in_which_a_disk_was_shared_counts(tmp_path: Path) -> None:
    chunks: Any = UsedChunks(str(tmp_path))
    meter = LinkMeter(chunks)
    chunks.moved.update(disk_read=2**30, disk_write=2**30)  # a second each
    chunks.shared_seconds = 0.5
    speeds = {speed.name: speed.bytes_per_second for speed in meter.speeds()}
    assert speeds["disk_read"] == speeds["disk_write"] == 2**30 / 0.75


def test_nothing_is_probed_where_use_says_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_probe", None)
    chunks: Any = UsedChunks(None)
    meter = LinkMeter(chunks)
    chunks.moved.update(d2h=ENOUGH_BYTES, h2d=ENOUGH_BYTES)
    assert [speed.name for speed in meter.speeds()] == ["h2d", "d2h"]


def test_a_device_with_its_own_memory_is_probed_by_its_own_clock(tmp_path: Path) -> None:
    gpu = SimulatedDevice(2**26, max_delay_us=2000)
    speeds = {each.name: each for each in probe.probe_links(disk_dir=str(tmp_path), host=True, device=gpu)}
    assert set(speeds) == {"h2d", "d2h", "disk_read", "disk_write"}
    assert all(speed.bytes_per_second > 0 and speed.latency_seconds >= 0 for speed in speeds.values())
    assert gpu.free_bytes() == 2**26
    assert list(tmp_path.iterdir()) == []


def test_a_period_is_what_lies_between_preops_without_the_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks: Any = UsedChunks(None)
    clock = iter([10.0, 13.0, 20.0, 25.0])
    monkeypatch.setattr("gemini.runtime.step.recorder.time.perf_counter", lambda: next(clock))
    timer = PeriodTimer(chunks)
    timer.close_period()  # before the first PreOp there is none
    timer.open_period()
    timer.close_period()
    timer.open_period()
    chunks.stall_seconds = 2.0
    timer.close_period()
    timer.close_period()
    assert timer.seconds == [3.0, 3.0]
