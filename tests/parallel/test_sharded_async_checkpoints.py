"""Checkpoints that ranks write while they train on: what was there when the save began, on all of them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_on_ranks
from sharded_harness import Recipe, assert_same, columns, mlp, tied, train_step, wrap
from torch import Tensor, nn
from torch import distributed as dist

from gemini import CheckpointError, GeminiError
from gemini.checkpoint import CheckpointReader, latest, load, save, save_async
from gemini.checkpoint.sealed_file import StagedFile

RECIPE = Recipe(clip=0.1)
TIGHT = {"device_bytes": "600KiB", "non_model_bytes": 0}


BUILDS = {"mlp": mlp, "tied": tied, "columns": columns}


def _state(model: Any) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def _save_beside(directory: str, build: str, options: dict[str, Any]) -> Any:
    """Train 2 steps, save at once and beside 3 more steps; return the weights at the save and at the end."""
    model, optimizer = wrap(BUILDS[build], RECIPE, **options)
    with model:
        for step in range(2):
            train_step(model, optimizer, RECIPE, step)
        save(Path(directory) / "at-once", model, optimizer)
        saved = _state(model)
        handle = save_async(Path(directory) / "beside", model, optimizer)
        for step in range(2, 5):
            train_step(model, optimizer, RECIPE, step)
        handle.wait()
        return saved, _state(model)


def _resume(directory: str, build: str, options: dict[str, Any]) -> dict[str, Tensor]:
    model, optimizer = wrap(BUILDS[build], RECIPE, **options)
    with model:
        load(directory, model, optimizer)
        for step in range(model.manager.step, 5):
            train_step(model, optimizer, RECIPE, step)
        return _state(model)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_what_was_there_when_the_save_began_is_saved(
    tmp_path: Path, build: str, precision: str | None
) -> None:
    options = {**TIGHT, "mixed_precision": precision, "disk_dir": str(tmp_path)}
    went_on = run_on_ranks(_save_beside, 2, str(tmp_path), build, options, timeout=120.0)
    with CheckpointReader(latest(tmp_path / "beside")) as beside:
        beside.verify()
        with CheckpointReader(latest(tmp_path / "at-once")) as at_once:
            assert beside.weights == at_once.weights
            assert beside.states == at_once.states
            for name in beside.weights:
                assert torch.equal(beside.weight(name), at_once.weight(name))
            for state, ranges in beside.states.items():
                for param in ranges:
                    assert torch.equal(beside.state(state, param), at_once.state(state, param))
        saved, final = went_on[0]
        for name in beside.weights:
            assert torch.equal(beside.weight(name), saved[name])
    for result in run_on_ranks(_resume, 2, str(tmp_path / "beside"), build, options, timeout=120.0):
        assert_same(result, final)


def _write_beside(directory: str, build: str, options: dict[str, Any]) -> Any:
    """Save beside a step and writes to weights; return the weights at the save."""
    model, optimizer = wrap(BUILDS[build], RECIPE, **options)
    with model:
        for step in range(2):
            train_step(model, optimizer, RECIPE, step)
        saved = _state(model)
        handle = save_async(Path(directory) / "beside", model, optimizer)
        for step in range(2, 4):
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.5)
            train_step(model, optimizer, RECIPE, step)
        handle.wait()
        return saved


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_what_is_written_to_weights_meanwhile_is_not_saved(
    tmp_path: Path, build: str, precision: str | None
) -> None:
    options = {**TIGHT, "mixed_precision": precision, "disk_dir": str(tmp_path)}
    saved, _ = run_on_ranks(_write_beside, 2, str(tmp_path), build, options, timeout=120.0)
    with CheckpointReader(latest(tmp_path / "beside")) as beside:
        for name in beside.weights:
            assert torch.equal(beside.weight(name), saved[name])


def _fail_beside(directory: str) -> str:
    model, optimizer = wrap(mlp, RECIPE)
    with model:
        train_step(model, optimizer, RECIPE, 0)
        save(directory, model, optimizer)
        train_step(model, optimizer, RECIPE, 1)
        handle = save_async(directory, model, optimizer)
        if dist.get_rank() == 1:
            handle.drop()
        train_step(model, optimizer, RECIPE, 2)
        if dist.get_rank() == 0:
            with pytest.raises(CheckpointError, match="rank 1 of 2 failed"):
                handle.wait()
        return latest(directory).name


def test_a_save_that_one_rank_gives_up_fails_on_all_and_the_one_before_stays(tmp_path: Path) -> None:
    assert run_on_ranks(_fail_beside, 2, str(tmp_path)) == ["step-00000001"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def _leave_early(directory: str) -> None:
    model, optimizer = wrap(mlp, RECIPE)
    train_step(model, optimizer, RECIPE, 0)
    handle = save_async(directory, model, optimizer, staging_bytes="4MiB")
    if dist.get_rank() == 1:
        handle.drop()
        raise RuntimeError("this rank ends")
    handle.wait()


@pytest.mark.dear("two ranks start, and one waits for the other")
def test_a_rank_that_ends_does_not_hang_in_a_save_that_others_still_write(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="this rank ends"):
        run_on_ranks(_leave_early, 2, str(tmp_path), timeout=40.0)
    assert not list(tmp_path.glob("step-????????"))


def _fail_while_training(directory: str) -> str:
    """Let rank 1 fail to write while much is left that no update touches, more than staging holds."""
    layers = nn.Sequential(*(nn.Linear(1024, 1024).requires_grad_(index == 0) for index in range(8)))
    model, optimizer = wrap(lambda: layers, RECIPE)
    with model:
        train_part = torch.randn(4, 1024)
        handle = save_async(directory, model, optimizer, staging_bytes="4MiB")
        if dist.get_rank() == 1:
            StagedFile.write_out = _fail  # type: ignore[method-assign]
        try:
            for _ in range(4):
                optimizer.backward(model(train_part).square().mean())
                optimizer.step()
            with pytest.raises(GeminiError) as caught:
                handle.wait()
        finally:
            StagedFile.write_out = _WRITE_OUT  # type: ignore[method-assign]
        return str(caught.value)


_WRITE_OUT = StagedFile.write_out


def _fail(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_write_that_fails_on_one_rank_does_not_stop_the_training(tmp_path: Path) -> None:
    first, second = run_on_ranks(_fail_while_training, 2, str(tmp_path), timeout=40.0)
    assert "rank 1 of 2 failed" in first
    assert "Input/output error" in second
    assert not list(tmp_path.iterdir())
