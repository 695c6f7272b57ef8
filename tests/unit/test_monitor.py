"""Measured memory: peaks of periods, and what of them is not model data."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini.errors import StateError
from gemini.memstats.collector import MemStatsCollector
from gemini.memstats.monitor import FakeMonitor, ProcessMonitor

MIB = 2**20
NOISE_BYTES = 8 * MIB  # what the interpreter may take meanwhile


def touch(nbytes: int) -> mmap.mmap:
    """Return fresh memory of which every page is resident."""
    memory = mmap.mmap(-1, nbytes)
    for offset in range(0, nbytes, mmap.PAGESIZE):
        memory[offset] = 1
    return memory


@pytest.fixture
def process() -> Iterator[ProcessMonitor]:
    monitor = ProcessMonitor()
    if "sampled" in monitor.method:
        monitor.close()
        pytest.skip("this kernel does not let a process reset its high-water mark")
    yield monitor
    monitor.close()


@pytest.fixture
def proc_without_reset(tmp_path: Path) -> Path:
    """A procfs folder as it looks where the high-water mark cannot be reset."""
    (tmp_path / "statm").write_text("900 100 50 1 0 200 0\n")
    return tmp_path


def test_a_period_sees_memory_that_was_freed_within_it(process: ProcessMonitor) -> None:
    process.start_period()
    before = process.resident_bytes()
    touch(64 * MIB).close()
    assert abs(process.end_period() - before - 64 * MIB) < NOISE_BYTES


def test_a_new_period_forgets_the_peak_of_the_one_before(process: ProcessMonitor) -> None:
    process.start_period()
    touch(64 * MIB).close()
    process.end_period()
    process.start_period()
    assert abs(process.end_period() - process.resident_bytes()) < NOISE_BYTES


def test_a_period_keeps_its_peak_while_another_monitor_measures(process: ProcessMonitor) -> None:
    other = ProcessMonitor()
    process.start_period()
    before = process.resident_bytes()
    touch(64 * MIB).close()
    for _ in range(2):
        other.start_period()
        assert other.end_period() < before + NOISE_BYTES
    assert abs(process.end_period() - before - 64 * MIB) < NOISE_BYTES
    other.close()


def test_a_status_file_is_read_in_bytes(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("Name:\tx\nVmHWM:\t     300 kB\nVmRSS:\t     200 kB\n")
    (tmp_path / "clear_refs").write_text("")
    monitor = ProcessMonitor(tmp_path)
    monitor.start_period()
    assert (tmp_path / "clear_refs").read_text().endswith("5")
    assert (monitor.end_period(), monitor.resident_bytes()) == (300 * 1024, 200 * 1024)
    monitor.close()


def test_without_the_reset_a_thread_samples_and_says_so(proc_without_reset: Path) -> None:
    monitor = ProcessMonitor(proc_without_reset)
    assert "sampled every 1 ms" in monitor.method
    monitor.start_period()
    assert monitor.end_period() == monitor.resident_bytes() == 100 * mmap.PAGESIZE
    monitor.close()


def test_the_thread_sees_a_peak_that_has_passed_and_the_next_period_forgets_it(
    proc_without_reset: Path,
) -> None:
    monitor = ProcessMonitor(proc_without_reset)
    statm = SteppedStatm(monitor, [100, 700, 100])
    monitor.start_period()
    assert statm.passed.wait(timeout=30)
    assert monitor.end_period() == 700 * mmap.PAGESIZE
    monitor.start_period()
    assert monitor.end_period() == 100 * mmap.PAGESIZE
    monitor.close()


class SteppedStatm:
    """Gives one number of pages per reading and says when all were read; then the last one for ever."""

    def __init__(self, monitor: ProcessMonitor, pages: list[int]) -> None:
        self.passed = threading.Event()
        self._pages = pages
        monitor._peak._resident.read = self.read  # type: ignore[union-attr, method-assign]

    def read(self) -> int:
        pages = self._pages[0]
        if len(self._pages) > 1:
            del self._pages[0]
        else:
            self.passed.set()
        return pages * mmap.PAGESIZE


def test_closing_twice_ends_the_thread_once(proc_without_reset: Path) -> None:
    before = threading.active_count()
    monitor = ProcessMonitor(proc_without_reset)
    monitor.start_period()
    assert threading.active_count() == before + 1
    monitor.close()
    monitor.close()
    assert threading.active_count() == before


class Memory:
    """A process made of model data and the rest, seen by a fake monitor."""

    def __init__(self, *, rest: int = 0, model: int = 0) -> None:
        self.monitor = FakeMonitor(rest + model)
        self.model = model
        self.collector = MemStatsCollector(self.monitor, lambda: self.model)

    def resize_model(self, nbytes: int) -> None:
        self.model += nbytes
        self.resize_rest(nbytes)

    def resize_rest(self, nbytes: int) -> None:
        (self.monitor.allocate if nbytes > 0 else self.monitor.free)(abs(nbytes))

    def temporary(self, nbytes: int) -> None:
        self.resize_rest(nbytes)
        self.resize_rest(-nbytes)


def test_temporaries_count_in_their_own_period_only() -> None:
    memory = Memory(rest=1000, model=500)
    memory.collector.start()
    for moment, nbytes in enumerate([10, 70, 30]):
        memory.collector.sample(moment, "forward")
        memory.collector.note_model_data()
        memory.temporary(nbytes)
    assert memory.collector.finish() == (10, 70, 30)
    assert memory.collector.baseline_bytes == 1000


def test_memory_that_stays_counts_in_every_later_period() -> None:
    memory = Memory(rest=1000)
    memory.collector.start()
    for moment in range(3):
        memory.collector.sample(moment, "forward")
        memory.resize_rest(10)
    assert memory.collector.finish() == (10, 20, 30)


@pytest.mark.parametrize("change", [-400, 0, 400])
def test_a_layout_change_is_no_non_model_memory(change: int) -> None:
    memory = Memory(rest=1000, model=500)
    memory.collector.start()
    memory.collector.sample(0, "forward")
    memory.resize_model(change)
    memory.collector.note_model_data()
    memory.temporary(30)
    assert memory.collector.finish() == (30,)


def test_a_period_contains_the_buffers_of_its_own_gather() -> None:
    memory = Memory(rest=1000, model=500)
    memory.collector.start()
    memory.collector.sample(0, "forward")
    memory.temporary(5)
    memory.collector.sample(1, "forward")
    memory.resize_model(400)
    memory.temporary(60)
    memory.collector.note_model_data()
    memory.temporary(30)
    assert memory.collector.finish() == (5, 60)


def test_every_note_makes_the_bound_tighter() -> None:
    def measure(*, note: bool) -> tuple[int, ...]:
        memory = Memory(model=500)
        memory.collector.start()
        memory.collector.sample(0, "backward")
        memory.collector.note_model_data()
        memory.temporary(30)
        if note:
            memory.collector.note_model_data()
        memory.resize_model(200)
        if note:
            memory.collector.note_model_data()
        memory.temporary(10)
        return memory.collector.finish()

    assert measure(note=False) == (210,)
    assert measure(note=True) == (200,)  # the segment of the change itself: from 500 to 700


def test_what_comes_before_the_first_moment_belongs_to_the_last_period() -> None:
    memory = Memory(rest=1000)
    memory.collector.start()
    memory.temporary(90)
    memory.collector.sample(0, "forward")
    memory.temporary(10)
    memory.collector.sample(1, "backward")
    memory.temporary(20)
    assert memory.collector.finish() == (10, 90)


OPERATORS = st.lists(
    st.tuples(st.integers(-50, 50), st.booleans(), st.lists(st.integers(-30, 30), max_size=6)),
    min_size=1,
    max_size=8,
)


@given(OPERATORS)
def test_the_result_is_exact_while_model_data_rests_after_each_layout_change(operators: list) -> None:
    memory = Memory(rest=10_000, model=10_000)
    memory.collector.start()
    want, rest = [], 0
    for moment, (change, _, deltas) in enumerate(operators):
        memory.collector.sample(moment, "forward")
        memory.resize_model(change)
        memory.collector.note_model_data()
        peak = rest
        for delta in deltas:
            memory.resize_rest(delta)
            rest += delta
            peak = max(peak, rest)
        want.append(max(0, peak))
    assert memory.collector.finish() == tuple(want)


@given(OPERATORS)
def test_the_result_is_never_too_low_while_model_data_goes_one_way_in_a_period(operators: list) -> None:
    memory = Memory(rest=10_000, model=10_000)
    memory.collector.start()
    want, rest = [], 0
    for moment, (change, noted, deltas) in enumerate(operators):
        memory.collector.sample(moment, "forward")
        if noted:
            memory.collector.note_model_data()
        peak = rest
        for delta in deltas:
            memory.resize_model(change)
            memory.resize_rest(delta)
            rest += delta
            peak = max(peak, rest)
        want.append(max(0, peak))
    got = memory.collector.finish()
    assert all(measured >= true for measured, true in zip(got, want, strict=True))


def test_phases_are_those_of_the_moments() -> None:
    memory = Memory()
    memory.collector.start()
    for moment, phase in enumerate(("forward", "backward", "optimizer")):
        memory.collector.sample(moment, phase)
    memory.collector.finish()
    assert memory.collector.phases == ("forward", "backward", "optimizer")


@pytest.mark.parametrize("moment", [-1, 1, 3])
def test_a_moment_out_of_place_is_refused_and_changes_nothing(moment: int) -> None:
    memory = Memory()
    memory.collector.start()
    memory.collector.sample(0, "forward")
    memory.collector.sample(1, "forward")
    with pytest.raises(StateError, match=f"moment {moment} .* moment 2"):
        memory.collector.sample(moment, "forward")
    memory.temporary(7)
    assert memory.collector.finish() == (0, 7)


CALLS: list[Callable[[MemStatsCollector], object]] = [
    lambda collector: collector.sample(0, "forward"),
    lambda collector: collector.note_model_data(),
    lambda collector: collector.finish(),
]


@pytest.mark.parametrize("call", CALLS)
def test_nothing_is_measured_outside_a_step(call: Callable[[MemStatsCollector], object]) -> None:
    collector = Memory().collector
    with pytest.raises(StateError, match="start"):
        call(collector)
    collector.start()
    collector.finish()
    with pytest.raises(StateError, match="start"):
        call(collector)
    assert not collector.collecting


def test_a_step_that_failed_half_way_leaves_nothing_behind() -> None:
    memory = Memory(rest=1000)
    memory.collector.start()
    memory.collector.sample(0, "forward")
    memory.temporary(500)
    memory.collector.start()
    memory.collector.sample(0, "backward")
    memory.temporary(3)
    assert memory.collector.finish() == (3,)
    assert memory.collector.phases == ("backward",)


def test_a_real_period_finds_its_temporaries_beside_real_model_data(process: ProcessMonitor) -> None:
    model: list[mmap.mmap] = []
    collector = MemStatsCollector(process, lambda: sum(len(chunk) for chunk in model))
    collector.start()
    collector.sample(0, "forward")
    model.append(touch(32 * MIB))
    collector.note_model_data()
    touch(64 * MIB).close()
    collector.sample(1, "backward")
    quiet_after = collector.finish()
    assert abs(quiet_after[0] - 64 * MIB) < NOISE_BYTES
    assert quiet_after[1] < NOISE_BYTES
    model.pop().close()
