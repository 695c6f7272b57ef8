"""What a forecast says follows from the rehearsal and the machine."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from forecast_models import KIB, MIB, config, machine, source, tiny_gpt
from torch import nn

from gemini import GeminiDDP
from gemini.errors import ConfigError, IoError
from gemini.forecast import timing
from gemini.forecast.forecast import (
    Settings,
    forecast_batch,
    largest_batch,
    samples_to_compute_bound,
    time_step,
)
from gemini.forecast.machine import MachineSpeeds, measure_machine
from gemini.forecast.meter import Meter, Operation, OperationCosts, Period, TensorForm
from gemini.forecast.report import make_report
from gemini.runtime.intercept.cpu_operators import GROUPED_MM


def settings(device_bytes: int, **options: object) -> Settings:
    return replace(Settings(2, config(device_bytes), machine()), **options)  # type: ignore[arg-type]


def test_a_model_that_fits_moves_nothing_and_is_bound_by_computing() -> None:
    given = settings(64 * MIB)
    step = time_step(forecast_batch(source(), given, 2), given)
    assert sum(step.plan.simulation.link_bytes.values()) == 0
    assert step.seconds == pytest.approx(step.busy_seconds["compute"] + step.busy_seconds["Adam"])
    assert samples_to_compute_bound(step, 2) is None


def test_a_slow_disk_bounds_a_model_that_does_not_fit() -> None:
    slow = settings(1536 * KIB, machine=machine(1e6))
    step = time_step(forecast_batch(source(), slow, 2), slow)
    assert step.bound == "disk"
    assert step.seconds >= step.busy_seconds["disk"] > step.busy_seconds["compute"]
    needed = samples_to_compute_bound(step, 2)
    assert needed is not None
    assert needed > 2


@pytest.mark.parametrize("device_bytes", [1536 * KIB, 3 * MIB, 7 * MIB])
def test_the_largest_batch_fits_and_the_next_does_not(device_bytes: int) -> None:
    given = settings(device_bytes)
    found = largest_batch(source(), given, forecast_batch(source(), given, 2))
    assert found >= 1
    assert not forecast_batch(source(), given, found).obstacles
    assert forecast_batch(source(), given, found + 1).obstacles


def test_a_forecast_tells_what_it_is_doing() -> None:
    told: list[str] = []
    given = settings(1536 * KIB, sample_seconds=0.1, tell=told.append)
    report = make_report(source(), given, tbw_bytes=10**12)
    assert told[:3] == [
        "rehearsing a step of batch 2",
        "timing operators for 0.1 s",
        "planning what stays on DEVICE",
    ]
    assert f"rehearsing a step of batch {report.largest_batch + 1}" in told[3:]


def test_the_largest_batch_does_not_depend_on_the_one_that_was_asked_for() -> None:
    given = settings(3 * MIB)
    known = [forecast_batch(source(), given, batch) for batch in (1, 2, 50)]
    assert len({largest_batch(source(), given, each) for each in known}) == 1


def test_without_room_for_one_sample_there_is_no_batch_and_a_way_out() -> None:
    report = make_report(source(), settings(300 * KIB), tbw_bytes=10**12)
    assert not report.fits
    assert report.step is None
    assert report.largest_batch == 0
    assert "raise device_bytes" in report.obstacles[-1]


@pytest.mark.parametrize("batch", [1, 2])
def test_a_smaller_batch_is_advised_where_there_is_one(batch: int) -> None:
    (*_, advice) = forecast_batch(source(), settings(300 * KIB), batch).obstacles
    assert ("lower the batch or the sequence" in advice) == (batch > 1)
    assert "lower" in advice


def test_a_hopeless_budget_is_refused_at_once() -> None:
    large, hopeless = source(lambda: nn.Embedding(4096, 2048)), settings(1 * KIB)
    forecast = forecast_batch(large, hopeless, 1)
    assert "device_bytes is 1.0 KiB" in forecast.obstacles[0]
    assert "the 1.0 KiB of DEVICE" in forecast.obstacles[-1]
    assert len(forecast.rehearsal.trace.accesses) < 3000  # of an update as fine as DEVICE, 4099
    assert largest_batch(large, hopeless, forecast) == 0


def test_a_disk_without_the_space_is_refused_as_by_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=64 * KIB, total=2**30))
    options = config(1536 * KIB, disk_dir=str(tmp_path))
    given = replace(settings(1536 * KIB), config=options, disk_is_here=True)
    report = make_report(source(), given, tbw_bytes=10**12)
    with pytest.raises(IoError) as refusal:
        GeminiDDP(tiny_gpt(), config=replace(options, optimizer_rule="adam"))
    assert report.obstacles[0] in str(refusal.value)
    assert "64.0 KiB are free" in report.obstacles[0]
    assert report.largest_batch == 0
    # Of another machine's disk nothing is known.
    assert make_report(source(), replace(given, disk_is_here=False), tbw_bytes=10**12).fits


def test_wear_is_what_the_step_writes() -> None:
    report = make_report(source(), settings(1536 * KIB), tbw_bytes=10**12)
    assert report.step is not None
    assert report.wear is not None
    assert report.wear.step_bytes == report.step.plan.simulation.link_bytes["disk_write"] > 0
    assert report.wear.steps == 10**12 / report.wear.step_bytes


def test_the_code_of_a_report_is_python_with_its_budgets() -> None:
    report = make_report(source(), settings(1536 * KIB), tbw_bytes=10**12)
    compile(report.code(), "code", "exec")
    assert f"device_bytes={1536 * KIB}" in report.code()


# -- costs ----------------------------------------------------------------------------------------


def operation(function: str, moved_bytes: int, flops: int = 0) -> Operation:
    return Operation(function, (moved_bytes, flops), flops, moved_bytes, torch.float32)


def test_the_slower_of_arithmetic_and_memory_counts() -> None:
    costs = OperationCosts(machine())
    assert costs.seconds(operation("mm", 10**7, 10**11)) == pytest.approx(1.0)
    assert costs.seconds(operation("add", 10**10)) == pytest.approx(1.0)
    period = Period(Counter({operation("add", 10**10): 2}))
    assert costs.period_seconds(period) == pytest.approx(2.0 + 1e-5)


def test_a_sample_counts_as_it_is_and_corrects_others_of_its_function() -> None:
    known, like, other = operation("add", 10**9), operation("add", 2 * 10**9), operation("mul", 10**9)
    costs = OperationCosts(machine(), {known: 0.3})
    assert costs.seconds(known) == 0.3
    assert costs.seconds(like) == pytest.approx(0.6)
    assert costs.seconds(other) == pytest.approx(0.1)


def test_operations_of_a_step_can_be_called_on_real_memory() -> None:
    given = settings(64 * MIB)
    periods = forecast_batch(source(), given, 2).rehearsal.periods
    kinds = {each for period in periods for each in period.operations if not each.is_update}
    arena = timing.Arena(64 * MIB)
    assert [str(each.function) for each in kinds if timing.prepare(each, arena) is None] == []


def test_values_to_time_with_are_rows_that_a_table_of_one_row_has_and_masks_that_let_all_pass() -> None:
    row, ids = (TensorForm.of(torch.empty(1, size, device="meta")) for size in (4, 3))
    arguments = ((row, replace(ids, dtype=torch.int64)), {})
    look_up = Operation(torch.ops.aten.embedding.default, (), 0, 0, torch.float32, arguments)
    arena = timing.Arena(MIB)
    assert timing.prepare(look_up, arena) is not None
    seen: list[torch.Tensor] = []
    mask = replace(ids, dtype=torch.bool)
    assert timing.prepare(Operation(seen.append, (), 0, 0, torch.float32, ((mask,), {})), arena) is not None
    assert bool(seen[0].all())


def test_what_a_step_spends_most_on_is_timed_first() -> None:
    large, small = (Period(Counter({_addition(numel): 1})) for numel in (1 << 20, 1 << 4))
    samples = timing.sample([small, large], machine(), limit_seconds=0.5)  # the machine may be busy
    assert next(iter(samples)) == next(iter(large.operations))
    assert all(seconds > 0 for seconds in samples.values())


@pytest.mark.parametrize(("share", "warns"), [(0.9, False), (0.5, True)])
def test_a_machine_that_is_busy_with_something_else_is_told(
    share: float, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0

    def compute() -> None:
        nonlocal now
        now += 1.0

    monkeypatch.setattr(timing, "prepare", lambda *_: compute)
    clocks = SimpleNamespace(perf_counter=lambda: now, thread_time=lambda: share * now)
    monkeypatch.setattr(timing, "time", clocks)
    timing.sample([Period(Counter({_addition(16): 1}))], machine(), limit_seconds=5.0)
    assert ["other programs had the processor for 50% of the time" in each for each in caplog.messages] == (
        [True] if warns else []
    )


def test_slow_first_calls_leave_time_for_those_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def pass_time(seconds: float) -> None:
        nonlocal now
        now += seconds

    def prepared(_operation: Operation, _arena: timing.Arena) -> Callable[[], object]:
        pass_time(1.0)
        return lambda: pass_time(0.25)

    monkeypatch.setattr(timing, "prepare", prepared)
    clocks = SimpleNamespace(perf_counter=lambda: now, thread_time=lambda: now)
    monkeypatch.setattr(timing, "time", clocks)
    operations = [_addition(1 << power) for power in range(4, 12)]
    samples = timing.sample([Period(Counter(operations))], machine(), limit_seconds=5.0)
    assert list(samples.items()) == [(each, 0.25) for each in operations[:-4:-1]]


def test_operators_share_as_much_memory_as_their_sample_may_take() -> None:
    arena = timing.Arena(4096)
    spec = TensorForm((16, 8), (1, 16), torch.float32)
    tensors = [arena.tensor(spec) for _ in range(9)]
    first = tensors[0]
    assert first is not None
    assert first.stride() == spec.stride
    addresses = [each.data_ptr() for each in tensors if each is not None]
    assert addresses[1] == addresses[0] + 512
    assert addresses[8] == addresses[0]
    assert torch.allclose(first, torch.tensor(0.5), rtol=0.01)
    assert arena.tensor(replace(spec, shape=(16, 80))) is None

    kinds = [Period(Counter({_addition(1 << power): 1})) for power in (8, 12)]
    assert {
        each.arguments[0][0].shape
        for each in timing.sample(kinds, machine(), limit_seconds=0.01, most_bytes=1 << 11)
    } == {(256,)}


def test_what_operators_return_and_look_up_counts_beside_the_memory_that_they_share() -> None:
    column, ids = torch.empty(64, 1, device="meta"), torch.empty(2048, dtype=torch.int64, device="meta")
    with Meter() as meter:
        meter.open_period()
        _ = column * column.T  # 16 KiB of two times 256 bytes
        ids.max()  # 16 KiB that are no floats
    periods = meter.finish()
    found = timing.sample(periods, machine(), limit_seconds=0.05)
    assert {each.function for each in found} >= {torch.ops.aten.mul.Tensor, torch.ops.aten.max.default}
    assert timing.sample(periods, machine(), limit_seconds=0.05, most_bytes=8192) == {}


def test_products_of_groups_are_timed_with_groups_of_different_sizes() -> None:
    left, right = torch.empty(64, 8, device="meta"), torch.empty(4, 8, 16, device="meta")
    offs = torch.empty(4, dtype=torch.int32, device="meta")
    with Meter() as meter:
        meter.open_period()
        torch._grouped_mm(left.bfloat16(), right.bfloat16(), offs)
    assert any(
        each.function is GROUPED_MM for each in timing.sample(meter.finish(), machine(), limit_seconds=0.05)
    )


def _addition(numel: int) -> Operation:
    given = torch.empty(numel, device="meta")
    with Meter() as meter:
        meter.open_period()
        given + 1
    return next(iter(meter.finish()[0].operations))


def test_sampling_needs_no_time_that_it_was_not_given() -> None:
    with Meter() as meter:
        meter.open_period()
        torch.empty(1 << 14, 1 << 14, device="meta") @ torch.empty(1 << 14, 1 << 14, device="meta")
    assert timing.sample(meter.finish(), machine(), limit_seconds=0.1) == {}


# -- machines -------------------------------------------------------------------------------------


def test_a_machine_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    given = replace(machine(), device_bytes=MIB, host_bytes=0)
    given.save(path)
    assert MachineSpeeds.load(path) == given


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{}", "format"),
        ("nonsense", "describes no machine"),
        ('{"format": "gemini-machine-1", "name": "x"}', "matmul_flops"),
        ('{"format": "gemini-machine-1", "wheels": 4}', "wheels"),
    ],
)
def test_a_file_that_is_no_machine_is_refused(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=what):
        MachineSpeeds.load(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("memory_bytes_per_second", 0.0),
        ("matmul_flops", {"fp8": 1.0}),
        ("device_bytes", float("nan")),
        ("disk_bytes", -1),
        ("transfers_take", 2.0),
    ],
)
def test_a_rate_that_no_machine_has_is_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        replace(machine(), **{field: value})  # type: ignore[arg-type]


def test_this_machine_can_be_measured() -> None:
    here = measure_machine(torch.bfloat16, ())
    assert set(here.matmul_flops) == {"fp32", "bf16"}
    assert here.moment_seconds > 0
