"""Whatever ends a save, the last complete checkpoint can be loaded."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from fault_training import (
    KIB,
    adam,
    assert_sound,
    assert_weights,
    file_size_limit,
    managed,
    train_step,
    undisturbed,
    weights,
)

from gemini import checkpoint
from gemini.checkpoint.contents import optimizer_file
from gemini.checkpoint.directory import check_contents, latest, read_manifest
from gemini.checkpoint.tensor_file import TensorSpec
from gemini.errors import IoError
from gemini_bench.checkpoint_kills import kill_and_resume


def start_saving(place: Path) -> tuple[int, BinaryIO]:
    """Train and save in a forked child; return its id and where it writes the step of every save."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            save_forever(place, writing)
        finally:
            os._exit(1)  # the rest of the test is not for this process
    os.close(writing)
    return child, os.fdopen(reading, "rb", buffering=0)


def save_forever(place: Path, report: int) -> None:
    model = managed(place)
    optimizer = adam(model)
    if checkpoint.is_complete(place / "run"):
        checkpoint.load(place / "run", model, optimizer)
    while True:
        step = model.stats()["step"]
        train_step(model, optimizer, step)
        for _ in range(2):  # the second one replaces a checkpoint of the same step
            checkpoint.save(place / "run", model, optimizer)
            os.write(report, bytes([step + 1]))


def kill_during_a_save(child: int, reports: BinaryIO, saves: int, delay_s: float) -> int:
    """Kill the process some time after so many saves; return the last step that it said it saved."""
    try:
        said = b"".join(reports.read(1) for _ in range(saves))
        assert len(said) == saves, "the process ended by itself"
        until = time.perf_counter() + delay_s
        while time.perf_counter() < until:  # a sleep would be coarser than what is being hit
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    said += reports.read()
    reports.close()
    return said[-1]


def test_a_kill_at_any_moment_leaves_the_last_complete_checkpoint(tmp_path: Path) -> None:
    dice = random.Random(7)
    for _ in range(8):
        child, reports = start_saving(tmp_path)
        said = kill_during_a_save(child, reports, dice.randint(1, 3), dice.uniform(0, 0.1))
        model = managed(tmp_path)
        optimizer = adam(model)
        checkpoint.load(tmp_path / "run", model, optimizer)
        step = model.stats()["step"]
        assert step in (said, said + 1)  # the process may have died before it could say so
        want_losses, want = undisturbed(step + 1)
        assert train_step(model, optimizer, step) == want_losses[-1]
        assert_weights(weights(model), want)
        model.close()
    assert {file.name for file in tmp_path.iterdir()} == {"run"}  # nothing of the DISK tier either


class DieAt:
    """An audit hook that ends the process, without clean-up, at the ``number``-th call that changes files."""

    def __init__(self, number: int) -> None:
        self._left = number

    def __call__(self, event: str, _arguments: object) -> None:
        if event in ("open", "os.mkdir", "os.rename", "os.rmdir", "os.remove", "shutil.rmtree"):
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def save_until_call(directory: Path, number: int) -> bool:
    """Save in a forked child that dies right before its ``number``-th call on files; say whether it did."""
    child = os.fork()
    if child == 0:
        try:
            sys.addaudithook(DieAt(number))
            write_one(directory, number)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def write_one(directory: Path, number: int) -> None:
    with checkpoint.new_checkpoint(directory, 3, keep=1) as new:
        new.manifest = {"parameters": {}, "buffers": {}, "optimizer_steps": {}, "number": number}
        for name in (optimizer_file(0, 1, 0), optimizer_file(0, 1, 1)):
            new.add_file(name, [TensorSpec("values", torch.int64, (2,))]).write(
                "values", 0, torch.tensor([number, 3])
            )


def test_a_kill_before_any_call_leaves_one_complete_checkpoint(tmp_path: Path) -> None:
    write_one(tmp_path, 0)
    died, number = True, 0
    while died:
        number += 1
        before = read_manifest(latest(tmp_path))["number"]
        died = save_until_call(tmp_path, number)
        path = latest(tmp_path)
        manifest = read_manifest(path)
        check_contents(path, manifest)
        assert manifest["number"] in (before, number)
    assert number > 10
    assert manifest["number"] == number
    assert {file.name for file in tmp_path.iterdir()} == {path.name}


@pytest.mark.parametrize("limit", [0, 100, 9 * KIB])
def test_a_full_disk_leaves_the_last_checkpoint_and_training_goes_on(tmp_path: Path, limit: int) -> None:
    want_losses, want = undisturbed(4)
    model = managed(tmp_path, disk_dir=None, device_bytes=None)  # the limit is for all files
    optimizer = adam(model)
    losses = [train_step(model, optimizer, 0)]
    first = checkpoint.save(tmp_path / "run", model, optimizer)
    losses.append(train_step(model, optimizer, 1))
    with file_size_limit(limit), pytest.raises(IoError) as caught:
        checkpoint.save(tmp_path / "run", model, optimizer)
    assert caught.value.errno
    assert str(caught.value.filename).startswith(str(tmp_path / "run"))
    assert {file.name for file in (tmp_path / "run").iterdir()} == {first.name}
    assert_sound(model)
    losses.append(train_step(model, optimizer, 2))
    checkpoint.load(tmp_path / "run", model, optimizer)
    assert losses[:1] + [train_step(model, optimizer, step) for step in (1, 2, 3)] == want_losses
    assert losses == want_losses[:3]
    assert_weights(weights(model), want)
    assert checkpoint.save(tmp_path / "run", model, optimizer).exists()


def test_kill_9_at_random_moments_of_a_training_changes_nothing(tmp_path: Path) -> None:
    """Synchronous and asynchronous saves, a DISK tier, bf16, and batches from a generator that is saved."""
    found = kill_and_resume(tmp_path, 6, seed=3)
    assert found["different"] == 0
    assert found["resumes"] >= 3
    assert found["steps"] > 10
    assert {path.name for path in tmp_path.iterdir()} == {"run", "undisturbed"}  # nothing of the DISK tier
