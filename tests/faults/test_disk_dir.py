"""A disk directory that is missing, refused, full, removed while running, or shared."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import signal
import struct
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from fault_training import (
    KIB,
    adam,
    assert_sound,
    assert_weights,
    build,
    file_size_limit,
    managed,
    train_step,
    undisturbed,
    weights,
)
from torch import nn

import gemini
from gemini.errors import ConfigError, GeminiError, IoError, OutOfBudgetError


def files_of(process: int | str) -> list[str]:
    """Return what the open descriptors of a process point to."""
    links = []
    for link in Path(f"/proc/{process}/fd").iterdir():
        try:
            links.append(str(link.readlink()))
        except FileNotFoundError:
            continue  # the one that lists the directory
    return links


def refused(directory: Path, error: type[GeminiError], **options: Any) -> GeminiError:
    """Wrap a model with a directory that cannot be used; nothing may have happened to it."""
    module, same = build(), build()
    gc.collect()  # files of earlier models are closed now, not in between
    params, descriptors = list(module.parameters()), len(files_of("self"))
    with pytest.raises(error) as caught:
        gemini.GeminiDDP(module, **{"device_bytes": 64 * KIB, "disk_dir": str(directory), **options})
    assert all(type(param) is nn.Parameter for param in params)
    for param, untouched in zip(module.parameters(), same.parameters(), strict=True):
        assert torch.equal(param, untouched)
    assert len(files_of("self")) == descriptors
    with gemini.GeminiDDP(module) as model:  # it can still be wrapped, and trained
        train_step(model, adam(model), 0)
    return caught.value


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    error = refused(tmp_path / "missing", ConfigError)
    assert str(tmp_path / "missing") in str(error)
    assert not (tmp_path / "missing").exists()


def test_a_file_is_refused_as_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in str(refused(tmp_path / "file", ConfigError))


def test_a_directory_that_takes_no_files_is_refused() -> None:
    error = refused(Path("/proc/self"), GeminiError)  # also root cannot make files there
    assert isinstance(error, (ConfigError, IoError))
    assert "/proc/self" in str(error)


def test_a_read_only_directory_is_refused(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write to read-only directories")
    (tmp_path / "locked").mkdir(mode=0o500)
    assert str(tmp_path / "locked") in str(refused(tmp_path / "locked", ConfigError))


def test_a_full_disk_is_refused(tmp_path: Path) -> None:
    with file_size_limit(100 * KIB):
        error = refused(tmp_path, IoError)
    assert isinstance(error, IoError)
    assert error.errno
    assert error.filename is not None
    assert str(tmp_path) in error.filename
    assert list(tmp_path.iterdir()) == []


def test_a_small_disk_budget_is_refused(tmp_path: Path) -> None:
    error = refused(tmp_path, OutOfBudgetError, disk_bytes=32 * KIB)
    assert any(text in str(error) for text in ("disk_bytes", "DISK"))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_removed_while_running_does_not_matter(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    model = managed(place)
    optimizer = adam(model)
    losses = [train_step(model, optimizer, 0)]
    shutil.rmtree(place)
    losses += [train_step(model, optimizer, step) for step in (1, 2, 3)]
    assert model.stats()["disk_read"]["bytes"] > 0
    want_losses, want = undisturbed(4)
    assert losses == want_losses
    for name, param in model.module.named_parameters():
        assert torch.equal(param.detach().clone(), want[name])
    assert_sound(model)


def test_a_removed_directory_makes_exporting_fail_and_nothing_else(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    model = managed(place)
    optimizer = adam(model)
    train_step(model, optimizer, 0)
    shutil.rmtree(place)
    with pytest.raises(IoError) as caught:
        model.state_dict()
    assert caught.value.filename == str(place)
    with pytest.raises(IoError):
        optimizer.state_dict()
    place.mkdir()
    train_step(model, optimizer, 1)
    assert_weights(weights(model), undisturbed(2)[1])
    assert_sound(model)


def test_the_file_has_no_name_and_is_private(tmp_path: Path) -> None:
    with managed(tmp_path) as model:
        train_step(model, adam(model), 0)
        assert list(tmp_path.iterdir()) == []
        mine = [
            Path("/proc/self/fd", entry.name).stat()
            for entry in Path("/proc/self/fd").iterdir()
            if os.path.lexists(entry) and str(entry.readlink()).startswith(str(tmp_path))
        ]
        assert mine
        assert {status.st_mode & 0o777 for status in mine} == {0o600}
        assert {status.st_nlink for status in mine} == {0}
    assert not [link for link in files_of("self") if link.startswith(str(tmp_path))]


def start_training(directory: Path) -> tuple[int, BinaryIO]:
    """Train in a forked child; return its id and where it writes its losses."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            model = managed(directory)
            optimizer = adam(model)
            for step in itertools.count():
                os.write(writing, struct.pack("d", train_step(model, optimizer, step)))
        finally:
            os._exit(1)  # the rest of the test is not for this process
    os.close(writing)
    return child, os.fdopen(reading, "rb")


def test_processes_share_a_directory_and_a_killed_one_leaves_nothing(tmp_path: Path) -> None:
    want, _ = undisturbed(6)
    child, losses = start_training(tmp_path)
    try:
        with managed(tmp_path) as model, losses:
            optimizer = adam(model)
            mine = [train_step(model, optimizer, step) for step in range(3)]
            assert list(struct.unpack("6d", losses.read(48))) == want
            os.kill(child, signal.SIGKILL)
            assert mine + [train_step(model, optimizer, step) for step in range(3, 6)] == want
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert list(tmp_path.iterdir()) == []
