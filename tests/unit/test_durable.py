"""What is written has its name only once it is on disk; a directory is replaced whole, whatever comes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gemini import CPUAdam, GeminiDDP, GeminiOptimizer, checkpoint
from gemini.checkpoint.convert import convert
from gemini.forecast.machine import MachineSpeeds
from gemini.jobs.run.run_directory import RunDirectory
from gemini.parallel import Booster, TorchDDPPlugin
from gemini.parallel.engine.whole_file import save_checkpoint
from gemini.system import durable
from gemini.system.durable import put_in_place, restore, set_aside_in, write_text


class Disk:
    """Notes what was synced since it was written to, and what got its name before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.synced: set[tuple[int, int]] = set()
        self.named: list[str] = []
        self.early: list[str] = []
        fsync = os.fsync

        def note(descriptor: int) -> None:
            found = os.fstat(descriptor)
            self.synced.add((found.st_ino, found.st_mtime_ns))
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", note)
        for name in ("rename", "replace"):
            monkeypatch.setattr(Path, name, self._noting(getattr(Path, name)))
        monkeypatch.setattr(durable, "_exchange", self._noting(durable._exchange))

    def _noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Path, target: Path) -> Any:
            if ".gemini-" not in str(Path(target).parent):  # a scratch directory
                files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
                self.named.append(Path(target).name)
                self.early += [f"{target}: {each}" for each in files if not self._is_synced(each)]
            return original(path, target)

        return call

    def _is_synced(self, path: Path) -> bool:
        found = path.stat()
        return (found.st_ino, found.st_mtime_ns) in self.synced


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    found = Disk(monkeypatch)
    yield found
    assert found.named
    assert found.early == []


@pytest.fixture
def trained() -> Iterator[tuple[GeminiDDP, GeminiOptimizer]]:
    torch.manual_seed(0)
    with GeminiDDP(nn.Linear(64, 64)) as model:
        optimizer = GeminiOptimizer(CPUAdam(model.parameters()), model)
        for _ in range(2):
            optimizer.backward(model(torch.ones(2, 64)).sum())
            optimizer.step()
        yield model, optimizer


@pytest.mark.parametrize("form", ["hf", "torch", "dcp"])
def test_checkpoints_and_what_they_become(
    tmp_path: Path, disk: Disk, trained: tuple[GeminiDDP, GeminiOptimizer], form: str
) -> None:
    for _ in range(2):
        saved = checkpoint.save(tmp_path / "run", *trained, keep=1)
    convert(saved, tmp_path / "other", form)
    assert disk.named[-1] == "other"


def test_files_of_a_run(tmp_path: Path, disk: Disk) -> None:
    run = RunDirectory(tmp_path / "run", lambda path: True)
    run.start({"seed": 1}, {})
    run.append_metrics({"step": 1, "loss": 0.5})
    run.keep_options({"lr": 1})
    run.read_metrics(1)
    run.write_summary({"loss": 0.5})
    run.release()
    assert disk.named == ["run.json", "run.json", "metrics.jsonl", "summary.json"]


def test_traces_timelines_and_machines(
    tmp_path: Path, disk: Disk, trained: tuple[GeminiDDP, GeminiOptimizer]
) -> None:
    model, optimizer = trained
    with model.record_timeline() as recorder:
        optimizer.backward(model(torch.ones(2, 64)).sum())
        optimizer.step()
    recorder.save_chrome(tmp_path / "step.json")
    recorder.save_html(tmp_path / "step.html")
    trace = model.memstats()
    trace.save(tmp_path / "trace.json")
    MachineSpeeds("one", {"fp32": 1e9}, 1e9, 1e9, 0.0, trace.links).save(tmp_path / "machine.json")
    assert disk.named == ["step.json", "step.html", "trace.json", "machine.json"]


@pytest.mark.parametrize("shard", [False, True])
def test_files_of_a_booster_and_of_an_engine(tmp_path: Path, disk: Disk, shard: bool) -> None:
    model = nn.Linear(8, 8)
    plain = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1)
    booster = Booster(plugin=TorchDDPPlugin())
    boosted, optimizer, *_ = booster.boost(model, plain, lr_scheduler=scheduler)
    booster.backward(boosted(torch.ones(2, 8)).sum(), optimizer)
    optimizer.step()
    booster.save_model(boosted, tmp_path / "model", shard=shard)
    booster.save_optimizer(optimizer, tmp_path / "optimizer", shard=shard)
    booster.save_lr_scheduler(scheduler, tmp_path / "scheduler")
    save_checkpoint(tmp_path / "whole.pt", 1, model)
    assert disk.named[-1] == "whole.pt"


def write(directory: Path, text: str) -> Path:
    directory.mkdir()
    (directory / "in").mkdir()
    (directory / "in" / "file").write_text(text)
    return directory


def read(directory: Path) -> str:
    return (directory / "in" / "file").read_text()


def test_directory_is_replaced_whole(tmp_path: Path, disk: Disk) -> None:
    target = tmp_path / "target"
    for text in ("first", "second"):
        put_in_place(write(tmp_path / "made", text), target)
        assert read(target) == text
        assert [path.name for path in tmp_path.iterdir()] == ["target"]


@pytest.mark.parametrize("call", range(4))
@pytest.mark.parametrize("exchanges", [True, False])
def test_a_kill_while_a_directory_is_replaced_loses_none_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool, call: int
) -> None:
    """Whatever call that changes names or removes is the first that does not come."""
    target, made = write(tmp_path / "target", "older"), write(tmp_path / "made", "newer")
    done = 0

    def until_killed(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            nonlocal done
            done += 1
            if done > call:
                raise KeyboardInterrupt
            return original(*args, **options)

        return run

    with monkeypatch.context() as patched:
        exchange = until_killed(durable._exchange) if exchanges else lambda *_: False
        patched.setattr(durable, "_exchange", exchange)
        patched.setattr(Path, "rename", until_killed(Path.rename))
        patched.setattr(Path, "replace", until_killed(Path.replace))
        patched.setattr("shutil.rmtree", until_killed(lambda *args, **options: None))
        with suppress(KeyboardInterrupt):
            put_in_place(made, target)
    assert target.exists() or not exchanges, "no reader may find the name gone"
    for each in set_aside_in(tmp_path):
        restore(each)
    assert read(target) == ("newer" if call >= (1 if exchanges else 2) else "older")
    assert not list(tmp_path.glob(".*"))


def test_text_replaces_a_file_whole_and_with_its_mode(tmp_path: Path, disk: Disk) -> None:
    path = tmp_path / "file"
    for text in ("a longer text\n", "\N{SNOWMAN}"):
        write_text(path, text, "write", mode=0o600)
        assert path.read_text(encoding="utf-8") == text
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
