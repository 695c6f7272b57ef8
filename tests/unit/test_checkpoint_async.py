"""Saving while training goes on: the checkpoint is the moment of the call, and nothing is lost in silence."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_models import KIB, Run, assert_equal, assert_same, start
from pairs import pairs
from torch import nn

import gemini
from gemini import checkpoint
from gemini.checkpoint.sealed_file import SealedFile
from gemini.errors import CheckpointError, ConfigError, IoError
from gemini.runtime.gate.gate import NO_SNAPSHOT

MIB = 2**20


pytestmark = pytest.mark.usefixtures("one_thread")


def resident(_directory: Path) -> dict[str, Any]:
    return {}


def on_disk(directory: Path) -> dict[str, Any]:
    return {"device_bytes": 128 * KIB, "disk_dir": str(directory)}


def save_async(run: Run, directory: Path, **options: Any) -> checkpoint.SaveHandle:
    return checkpoint.save_async(directory, run.model, run.optimizer, scheduler=run.scheduler, **options)


class Gate:
    """Holds every write of tensors back while it is closed; ``fail`` makes writes raise instead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.error: OSError | None = None
        write = SealedFile.write

        def gated(file: SealedFile, data: bytes | memoryview, offset: int) -> None:
            if threading.current_thread() is not threading.main_thread():
                assert self.open.wait(60)
                if self.error is not None:
                    raise self.error
            write(file, data, offset)

        monkeypatch.setattr(SealedFile, "write", gated)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def files_of(path: Path) -> dict[str, bytes]:
    """Return what matters of a checkpoint: weights, states and settings."""
    return {file.name: file.read_bytes() for file in path.iterdir() if file.suffix == ".safetensors"}


@pairs(place=[resident, on_disk], precision=[None, "bf16"], overlap=[False, True])
def test_it_is_the_moment_of_the_call_whatever_training_does_meanwhile(
    tmp_path: Path, gate: Gate, place: Callable[[Path], dict[str, Any]], precision: str | None, overlap: bool
) -> None:
    run = start(mixed_precision=precision, **place(tmp_path))
    run.optimizer.overlap = overlap
    run.train(3)
    want = files_of(run.save(tmp_path / "want"))
    handle = save_async(run, tmp_path / "run")
    if run.model.manager.resident:
        gate.open.set()  # an update waits for what the thread is reading
    run.train(3)
    gate.open.set()
    assert files_of(handle.wait()) == want
    other = start(seed=7, mixed_precision=precision)
    other.load(tmp_path / "run")
    assert other.train(3).losses == run.losses[3:]
    assert_same(other, run)


@pytest.mark.parametrize("place", [resident, on_disk])
def test_training_that_is_saved_is_training(tmp_path: Path, place: Callable[[Path], dict[str, Any]]) -> None:
    saved, plain = start(**place(tmp_path)), start()
    for _ in range(6):
        save_async(saved.train(1), tmp_path / "run", staging_bytes="4MiB")
    state = torch.get_rng_state()
    torch.manual_seed(0)
    plain = start().train(6)
    assert torch.equal(torch.get_rng_state(), state)
    assert saved.losses == plain.losses
    assert_same(saved, plain)
    saved.model.close()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step-00000005", "step-00000006"]


def test_waiting_at_once_is_saving(tmp_path: Path) -> None:
    run = start(**on_disk(tmp_path)).train(2)
    want = files_of(run.save(tmp_path / "want"))
    handle = save_async(run, tmp_path / "run")
    assert files_of(handle.wait()) == want
    assert handle.done()
    assert handle.wait() == checkpoint.latest(tmp_path / "run")
    assert run.model.manager.snapshot is NO_SNAPSHOT


class Frozen(nn.Module):
    """Most of it never trains."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(64, 64) for _ in range(12)).requires_grad_(False)
        self.head = nn.Linear(64, 3)
        self.idle = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.base:
            x = torch.tanh(layer(x))
        out: torch.Tensor = self.head(x)
        return out


def test_what_no_update_touches_is_written_by_and_by(tmp_path: Path) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"non_model_bytes": 0, "min_chunk_size_mb": 0.02, "search_range_mb": 0}
    model = gemini.GeminiDDP(Frozen(), device_bytes=128 * KIB, disk_dir=str(tmp_path), **options)
    optimizer = gemini.GeminiAdamOptimizer(model)

    def step() -> None:
        optimizer.backward(model(torch.ones(2, 64)).sum())
        optimizer.step()

    step()
    want = files_of(checkpoint.save(tmp_path / "want", model, optimizer))
    handle = checkpoint.save_async(tmp_path / "run", model, optimizer)
    for _ in range(200):
        step()
        if handle.done():
            break
    assert handle.done()
    assert files_of(handle.wait()) == want


def test_loading_under_a_save_does_not_change_it(tmp_path: Path, gate: Gate) -> None:
    run = start(**on_disk(tmp_path)).train(1)
    run.save(tmp_path / "early")
    run.train(1)
    want = files_of(run.save(tmp_path / "want"))
    handle = save_async(run, tmp_path / "run")
    run.load(tmp_path / "early")
    gate.open.set()
    assert files_of(handle.wait()) == want


def test_load_state_dict_under_a_save_does_not_change_it(tmp_path: Path, gate: Gate) -> None:
    run = start(**on_disk(tmp_path)).train(2)
    want = files_of(run.save(tmp_path / "want"))
    handle = save_async(run, tmp_path / "run")
    zeros = {name: torch.zeros_like(value) for name, value in run.model.state_dict().items()}
    run.model.load_state_dict(zeros)
    gate.open.set()
    assert files_of(handle.wait()) == want


def test_a_recording_that_begins_ends_reading_in_place(tmp_path: Path, gate: Gate) -> None:
    run = start().train(3)
    assert run.model.manager.resident
    want = files_of(run.save(tmp_path / "want"))
    gate.open.set()
    handle = save_async(run, tmp_path / "run")
    with run.model.record_timeline():
        run.train(2)
    assert files_of(handle.wait()) == want


def test_copies_take_no_more_memory_than_they_may(tmp_path: Path, gate: Gate) -> None:
    with gemini.init_on("meta"):
        module = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(6)])
    model = gemini.GeminiDDP(module, device_bytes=40 * MIB, disk_dir=str(tmp_path), non_model_bytes=0)
    optimizer = gemini.GeminiAdamOptimizer(model)
    handle = checkpoint.save_async(tmp_path / "run", model, optimizer, staging_bytes="8MiB")
    opener = threading.Timer(0.3, gate.open.set)  # by then a copier without a limit would have copied all
    opener.start()
    handle.wait()
    opener.join()
    assert handle.peak_staging_bytes == 8 * MIB
    model.close()


def test_an_error_is_raised_by_wait_and_training_goes_on(tmp_path: Path, gate: Gate) -> None:
    run = start(**on_disk(tmp_path)).train(1)
    first = run.save(tmp_path / "run")
    gate.error = OSError(28, "No space left on device", "somewhere")
    gate.open.set()
    handle = save_async(run, tmp_path / "run")
    run.train(2)
    with pytest.raises(IoError, match="No space left"):
        handle.wait()
    assert [path.name for path in (tmp_path / "run").iterdir()] == [first.name]
    gate.error = None
    run.train(1)
    assert run.save(tmp_path / "run").exists()
    assert run.losses == start().train(4).losses


@pytest.mark.parametrize("what", ["save", "save_async", "close"])
def test_an_error_nobody_waited_for_is_raised_by_what_comes_next(
    tmp_path: Path, gate: Gate, what: str
) -> None:
    run = start(**on_disk(tmp_path)).train(1)
    gate.error = OSError(5, "Input/output error")
    gate.open.set()
    save_async(run, tmp_path / "run")
    run.train(2)
    actions: dict[str, Callable[[], object]] = {
        "save": lambda: run.save(tmp_path / "run"),
        "save_async": lambda: save_async(run, tmp_path / "run"),
        "close": run.model.close,
    }
    with pytest.raises(IoError, match="Input/output"):
        actions[what]()
    gate.error = None
    if what != "close":
        assert run.save(tmp_path / "run").exists()
    assert not list((tmp_path / "run").glob("*.partial"))


@pytest.mark.parametrize("place", [resident, on_disk])
def test_closing_finishes_it(tmp_path: Path, place: Callable[[Path], dict[str, Any]]) -> None:
    run = start(**place(tmp_path)).train(3)
    want = files_of(run.save(tmp_path / "want"))
    save_async(run, tmp_path / "run")
    run.model.close()
    assert files_of(checkpoint.latest(tmp_path / "run")) == want


def test_an_exception_drops_it(tmp_path: Path) -> None:
    run = start(**on_disk(tmp_path)).train(1)
    first = run.save(tmp_path / "run")
    handle = save_async(run.train(1), tmp_path / "run")

    def interrupted() -> None:
        with run.model:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert handle.done()
    assert [path.name for path in (tmp_path / "run").iterdir()] == [first.name]


def test_a_save_given_up_leaves_the_earlier_ones(tmp_path: Path, gate: Gate) -> None:
    run = start(**on_disk(tmp_path)).train(1)
    first = run.save(tmp_path / "run")
    handle = save_async(run.train(1), tmp_path / "run")
    threading.Timer(0.05, gate.open.set).start()
    handle.drop()
    handle.drop()
    assert [path.name for path in (tmp_path / "run").iterdir()] == [first.name]
    with pytest.raises(CheckpointError, match="dropped"):
        handle.wait()
    run.train(1)
    assert run.save(tmp_path / "run").exists()


def test_ctrl_c_while_an_update_waits_for_staging_loses_only_the_save(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(**on_disk(tmp_path)).train(2)
    run.save(tmp_path / "run")

    def interrupted(_handle: object) -> torch.Tensor:
        raise KeyboardInterrupt

    handle = save_async(run, tmp_path / "run")
    monkeypatch.setattr(checkpoint.SaveHandle, "_take_buffer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.train(2)
    gate.open.set()
    with pytest.raises(CheckpointError, match="given up"):
        handle.wait()
    run.load(tmp_path / "run")
    run.losses.clear()
    assert run.train(2).losses == start().train(4).losses[2:]


@pytest.mark.parametrize("staging", [0, "1MiB"])
def test_too_little_staging_is_refused(tmp_path: Path, staging: int | str) -> None:
    run = start()
    with pytest.raises(ConfigError, match="staging_bytes"):
        save_async(run, tmp_path / "run", staging_bytes=staging)
    assert not (tmp_path / "run").exists()


def test_a_handle_nobody_keeps_does_its_work(tmp_path: Path) -> None:
    run = start(**on_disk(tmp_path)).train(1)
    save_async(run, tmp_path / "run")
    gc.collect()
    run.train(4)
    run.model.close()
    other = start(seed=7)
    other.load(tmp_path / "run")
    assert other.model.stats()["step"] == 1
    assert_equal(other.train(4).losses, run.losses[1:])


@pytest.mark.parametrize("place", ["{}", "{'device_bytes': 131072, 'disk_dir': sys.argv[1]}"])
def test_a_program_that_ends_without_a_word_leaves_no_half_checkpoint(tmp_path: Path, place: str) -> None:
    program = f"""
import sys
from pathlib import Path
from checkpoint_models import start
from gemini import checkpoint
run = start(**{place}).train(3)
run.save(Path(sys.argv[1]) / "run")
checkpoint.save_async(Path(sys.argv[1]) / "run", run.model, run.optimizer)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "run").glob("*.partial"))
    assert len(list((tmp_path / "run").iterdir())) == (2 if place == "{}" else 1), done.stderr
