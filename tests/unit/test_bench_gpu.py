"""``gemini bench gpu``: its cases run without a GPU, verdicts follow from figures, what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_gpu_harness import figures, in_process
from pairs import first

from gemini.chunk import TierBudgets
from gemini.cli.main import main
from gemini.errors import ConfigError, StateError
from gemini.system import device as gemini_device
from gemini_bench import (
    gpu,
    gpu_bound,
    gpu_copies,
    gpu_largest,
    gpu_offload,
    gpu_preop,
    gpu_remap,
    gpu_resident,
)
from gemini_bench.cli.gpu import HELP
from gemini_bench.gpu_device import CUDA, SIMULATED, open_bench_device
from gemini_bench.gpu_trainee import fitted, require_same_losses
from gemini_bench.llama import LLAMA_1B, Llama, LlamaConfig, num_parameters
from gemini_bench.session import Session

KIB = 1 << 10
GB = 10**9


def timings(**seconds: float) -> dict[str, Any]:
    """Return three rounds of what ``run_paired`` returns, a gigabyte each time."""
    return {"seconds": {k: [v] * 3 for k, v in seconds.items()}, "nbytes": dict.fromkeys(seconds, GB)}


# -- every case runs -----------------------------------------------------------------------------


@pytest.mark.parametrize("case", first(gpu.CASES))
def test_a_simulated_run_measures_every_row_of_a_case_and_judges_none(case: str, tmp_path: Path) -> None:
    record = gpu.run(Session(tmp_path, quick=True, run=in_process), SIMULATED, [case], ["gemini"])
    assert record["failed"] == record["missed"] == []
    rows = record["cases"][case]["rows"]
    assert rows
    unmeasured = [row for row in rows if row["value"] is None]
    assert all(math.isfinite(row["value"]) for row in rows if row not in unmeasured)
    assert all(row["target"] is None for row in rows)
    assert all(case == "peers" and row["not_measured"] for row in unmeasured)


def test_the_command_runs_tiny_where_the_gpu_is_simulated(capsys: Any, tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    assert main(["bench", "gpu", "--simulated", "--only", "copies", "--json", "--out", str(out)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["benchmark"] == "gpu"
    assert record["quick"]
    assert record["device"]["name"].startswith("simulated")
    assert json.loads(out.read_text()) == record


def test_where_model_data_is_changes_no_loss(tmp_path: Path) -> None:
    found = gpu_offload.run(Session(tmp_path, quick=True, run=in_process), SIMULATED).measured
    losses = found["losses"]
    assert losses[gpu_offload.OFFLOADED] == losses[gpu_offload.RESIDENT]
    assert found["device_peak_bytes"] <= found["device_bytes"] < found["model_data_bytes"]
    assert all(turn["h2d"] > 0 and turn["d2h"] > 0 for turn in found["turns"][gpu_offload.OFFLOADED])
    assert all(turn["h2d"] == turn["d2h"] == 0 for turn in found["turns"][gpu_offload.RESIDENT])


def test_both_models_begin_with_the_same_weights(tmp_path: Path) -> None:
    session = Session(tmp_path, quick=True, run=in_process)
    losses = gpu_resident.run(session, SIMULATED).measured["losses"]
    assert losses[gpu_resident.PLAIN][0] == losses[gpu_resident.MANAGED][0]


def test_a_byte_that_is_lost_on_the_way_fails_the_copies() -> None:
    device = open_bench_device(SIMULATED)
    memory = device.compute.open([64 * KIB] * 2, TierBudgets(128 * KIB, 128 * KIB), None)
    chunks = gpu_copies._Chunks(memory, 64 * KIB, 2)
    chunks.stand(on_device=False)
    chunks.require_intact()
    memory.tensor(chunks.places[1][0], torch.uint8, 64 * KIB)[-1] += 1
    chunks.stand(on_device=False)
    with pytest.raises(StateError, match="chunk 1 of 65536 bytes"):
        chunks.require_intact()
    memory.close(chunks.places, [])


@pytest.mark.parametrize("layers", [1, 3])
def test_parameters_are_counted_exactly(layers: int) -> None:
    config = LlamaConfig(vocab=40, layers=layers, hidden=16, heads=2, inner=24)
    assert num_parameters(config) == sum(param.numel() for param in Llama(config).parameters())
    assert 1.3e9 < num_parameters(LLAMA_1B) < 1.4e9


# -- what only a GPU carries out: at least its order ----------------------------------------------


class Streams:
    """Stands in for ``torch.cuda`` and writes down what streams are told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[str] = []
        self.now = "current"
        self.made = 0
        for name in ("current_stream", "synchronize", "Event", "Stream", "stream"):
            assert hasattr(torch.cuda, name)
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def current_stream(self, _device: torch.device) -> Any:
        return self.named("current")

    def synchronize(self, _device: torch.device) -> None:
        self.told.append("idle")

    def Event(self, *, enable_timing: bool) -> Any:
        assert enable_timing
        self.made += 1
        number, told = self.made, self.told
        return SimpleNamespace(
            record=lambda stream: told.append(f"event {number} on {stream.name}"),
            synchronize=lambda: told.append(f"until {number}"),
            elapsed_time=lambda _end: 2500.0,
        )

    def Stream(self, _device: torch.device) -> Any:
        self.made += 1
        return self.named(f"side {self.made}")

    def named(self, name: str) -> Any:
        return SimpleNamespace(
            name=name, wait_stream=lambda other: self.told.append(f"{name} after {other.name}")
        )

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.now = stream.name
        yield
        self.now = "current"

    def source(self, name: str) -> Any:
        def copy(_source: object, *, non_blocking: bool) -> None:
            assert non_blocking
            self.told.append(f"{name} on {self.now}")

        return SimpleNamespace(copy_=copy)


def test_a_gpu_is_timed_from_idle_to_the_end_of_what_its_stream_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = Streams(monkeypatch)
    seconds = gemini_device.stream_seconds(torch.device("cuda", 0), lambda: streams.told.append("work"))
    assert seconds == 2.5
    assert streams.told == ["idle", "event 1 on current", "work", "event 2 on current", "until 2"]


def test_side_streams_come_after_the_current_one_and_before_what_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = Streams(monkeypatch)
    side = gemini_device.SideStreams(torch.device("cuda", 0), 2)
    side.copy([(0, streams.source("up"), None), (1, streams.source("down"), None)])  # type: ignore[list-item]
    assert streams.told == [
        "side 1 after current",
        "side 2 after current",
        "up on side 1",
        "down on side 2",
        "current after side 1",
        "current after side 2",
    ]


# -- verdicts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ours", "met"), [(1.05, True), (1.06, False)])
def test_a_copy_is_judged_by_its_share_of_the_bare_one(ours: float, met: bool) -> None:
    times = timings(**{gpu_copies.OURS: ours, gpu_copies.TORCH: 1.0})
    found = figures(gpu_copies.rows({str(32 << 20): {"h2d": times, "both ways": times}}))
    assert found["32.0 MiB chunks, h2d: share of torch's"].met is met
    assert found["32.0 MiB chunks, both ways: share of torch's"].met
    assert found[f"32.0 MiB chunks, h2d: {gpu_copies.TORCH}"].value == 1.0


@pytest.mark.parametrize(("managed", "met"), [(4.12, True), (4.13, False)])
def test_a_resident_step_is_judged_by_the_plain_one(managed: float, met: bool) -> None:
    peaks = {
        gpu_resident.PLAIN: {"allocator_bytes": 200, "chunks_bytes": 0},
        gpu_resident.MANAGED: {"allocator_bytes": 60, "chunks_bytes": 120},
    }
    times = timings(**{gpu_resident.PLAIN: 4.0, gpu_resident.MANAGED: managed})
    found = figures(gpu_resident.rows({"timings": times, "peaks": peaks, "num_parameters": 1}, 4))
    assert found["step, managed / plain"].met is met
    assert found["step, plain torch"].value == 1000.0
    assert found["peak of the device's memory, managed / plain"].value == 0.9


@pytest.mark.parametrize(
    ("computing", "carried", "floor"),
    [
        (9.0, (4, 4), 9.0),  # computing
        (2.0, (8, 1), 4.0),  # one link
        (2.0, (6, 6), 4.0),  # both links at once: less than twice one
    ],
)
def test_an_offloaded_step_is_judged_by_the_longer_of_computing_and_links(
    computing: float, carried: tuple[int, int], floor: float
) -> None:
    def rows(seconds: float) -> dict[str, Any]:
        turn = {"seconds": seconds, "stall_seconds": 0.0, "h2d": carried[0] * GB, "d2h": carried[1] * GB}
        turns = {
            gpu_offload.RESIDENT: [{"seconds": computing, "stall_seconds": 0.0}],
            gpu_offload.OFFLOADED: [turn],
        }
        rates = {"h2d": 2.0 * GB, "d2h": 2.0 * GB, "both ways": 3.0 * GB}
        about = {"num_parameters": 1, "model_data_bytes": 1, "device_bytes": 1, "device_peak_bytes": 1}
        return figures(gpu_offload.rows({"turns": turns, "bytes_per_second": rates, **about}, 2))

    assert rows(1.0)["floor: the longer of computing and links"].value == pytest.approx(500 * floor)
    assert rows(1.11 * floor)["step, offloaded / floor"].met
    assert not rows(1.12 * floor)["step, offloaded / floor"].met


# A million elements: gradients and parameters take 20 ms each, updates 100 ms; the last group is a tenth.
BOUND = {
    "managed": {
        "num_parameters": 10**6,
        "largest_group": 10**5,
        "tokens": 1,
        "stall_seconds": [0.0],
        "peak_rss_bytes": 0,
        "host_peak_bytes": 0,
        "device_peak_bytes": 0,
    },
    "update_seconds": [0.004],
    "updated": 2 * 10**5,
    "bytes_per_second": {"h2d": 10**8, "d2h": 10**8},
    "cpu_elements_per_second": 10**7,
}


def bound_rows(computing: float, managed: float) -> dict[str, Any]:
    found = {**BOUND, "forward": [computing / 3], "backward": [2 * computing / 3]}
    return figures(
        gpu_bound.rows({**found, "managed": {**BOUND["managed"], "step_seconds": [managed]}})  # type: ignore[dict-item]
    )


@pytest.mark.parametrize(("managed", "met"), [(0.35, True), (0.36, False)])
def test_a_bound_step_is_judged_by_that_of_a_gpu_with_memory_for_all(managed: float, met: bool) -> None:
    found = bound_rows(0.3, managed)
    assert found["step with memory for all"].value == pytest.approx(320)  # computing, five times the update
    assert found["step with memory for all / managed"].met is met


def test_a_picture_of_steps_lies_beside_the_record(tmp_path: Path) -> None:
    gpu_bound.run(Session(tmp_path, quick=True, run=in_process, record=tmp_path / "all.json"), SIMULATED)
    assert "<html" in (tmp_path / "all_timeline.html").read_text()[:200]


def test_floors_of_a_bound_step_count_what_no_schedule_hides() -> None:
    found = bound_rows(0.3, 0.4)
    last = 1e3 * 10**5 * (2 / 10**8 + 1 / 10**7)  # a group's update, and its parameters going up
    floors = [next(row.value for what, row in found.items() if what.startswith(f"F{n}")) for n in range(3)]
    assert floors == pytest.approx([300, 300 + 2 + last, 200 + 100 + last])


def test_what_the_floor_rules_out_is_not_judged() -> None:
    row = bound_rows(0.06, 1.0)["step with memory for all / managed"]  # the CPU alone takes 100 ms
    assert row.met is None


@pytest.mark.parametrize(("numel", "met"), [(90, True), (89, False)])
def test_the_largest_model_is_judged_by_the_bytes_of_all_tiers(numel: int, met: bool) -> None:
    found = {
        "budgets": {"device": 600, "host": 700, "disk": 300},
        "num_parameters": numel,
        "step_seconds": [2.0, 4.0],
        "losses": [3.0, 2.0],
        "tokens": 8,
        "disk_read_bytes": 0,
        "disk_written_bytes": 0,
        "peak_rss_bytes": 0,
    }
    table = figures(gpu_largest.rows(found))
    assert table["of what the tiers could hold"].met is met
    assert table["tokens per second"].value == 2.0


def test_the_largest_model_fills_host_and_disk(tmp_path: Path) -> None:
    found = gpu_largest.run(Session(tmp_path, quick=True, run=in_process), SIMULATED).measured
    budgets = found["budgets"]
    assert 16 * found["num_parameters"] > budgets["disk"] + budgets["host"]
    assert found["disk_read_bytes"] > 0


def test_the_largest_model_leaves_the_host_what_a_limit_says(tmp_path: Path) -> None:
    session = Session(tmp_path, quick=True, run=in_process, limit_bytes=20 << 20)
    assert gpu_largest.run(session, SIMULATED).measured["budgets"]["host"] == 20 << 20


@pytest.mark.parametrize(("managed", "met"), [(1.0e-3, True), (1.1e-3, False)])
def test_a_preop_is_judged_by_its_microseconds(managed: float, met: bool) -> None:
    seconds = {
        "plain": {"forward": [1e-4], "both": [2e-4]},
        "managed": {"forward": [1e-4], "both": [managed]},
    }
    found = figures(gpu_preop.rows("traced", {**seconds, "layers": 20, "preops_per_operator": 4.0}))
    assert found["traced: forward and backward, managed less plain, per PreOp"].met is met


# -- what is refused, and what is made smaller ---------------------------------------------------


def test_without_a_gpu_one_sentence_says_what_to_do(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(gemini_device, "cuda_available", lambda: False)
    assert main(["bench", "gpu", "--quick"]) == 2
    printed = capsys.readouterr()
    assert "sees no CUDA GPU" in printed.err
    assert "--simulated" in printed.err
    assert len(printed.err.splitlines()) == 1
    assert not printed.out


def test_an_unknown_case_is_refused_before_the_gpu_is_looked_for() -> None:
    with pytest.raises(ConfigError, match="unknown case 'speed'; choose from copies, remap, resident"):
        gpu.chosen(["speed"], CUDA)


def test_help_explains_every_case() -> None:
    assert all(f"\n  {case} " in HELP for case in gpu.CASES)


@pytest.mark.parametrize(("free_bytes", "whole"), [(80 * GB, True), (24 * GB, False)])
def test_a_model_has_as_many_layers_as_fit(
    free_bytes: int, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemini_bench.gpu_trainee.free_memory_bytes", lambda: 64 * GB)
    config = fitted(LLAMA_1B, 4096, device_bytes_each=36, host_bytes_each=16, free_bytes=free_bytes)
    assert (config == LLAMA_1B) is whole
    assert 36 * num_parameters(config) < free_bytes


def test_a_device_without_room_for_one_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"1\.0 GB of the GPU's memory"):
        fitted(LLAMA_1B, 4096, device_bytes_each=36, host_bytes_each=0, free_bytes=GB)


@pytest.mark.parametrize("loss", [1.03, math.nan])
def test_models_that_compute_something_else_are_not_compared(loss: float) -> None:
    require_same_losses({"plain": [1.0], "managed": [1.01]})
    with pytest.raises(StateError, match="losses of 'managed' differ"):
        require_same_losses({"plain": [1.0], "managed": [loss]})


def test_windows_that_are_timed_get_other_memory_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = gpu_remap._Windows(open_bench_device(SIMULATED), gpu_remap.QUICK)
    memory, shown = windows._memory, []

    def byte_of(window: Any) -> torch.Tensor:
        return memory.tensor(window, torch.uint8, 1)

    def noted(window: Any, *, zero: bool, take: Any = memory.map) -> None:
        take(window, zero=zero)
        shown.append(byte_of(window).item())

    for number, (window, _place) in enumerate(windows._holders):
        memory.map(window, zero=False)
        byte_of(window).fill_(number)
    windows._give_back(windows._holders)
    monkeypatch.setattr(memory, "map", noted)
    for turn in range(4):
        shown.clear()
        windows.turn(busy=turn % 2 == 1)
        assert shown == ([0, 1, 2, 3] if turn % 2 == 0 else [2, 3, 0, 1])
    windows.close()
