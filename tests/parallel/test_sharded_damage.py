"""Damage that one rank finds, or all of them, ends a load on all: none waits for another that has left."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from processes import run_on_ranks
from sharded_harness import Recipe, assert_same, columns, mlp, train_step, wrap
from torch import Tensor
from torch import distributed as dist

from gemini import CheckpointError, GeminiDDP, GeminiOptimizer, IoError, StateError
from gemini.checkpoint import CheckpointReader, load, save
from gemini.checkpoint.sealed_file import DamagedError

RECIPE = Recipe(clip=0.1)


def _state(model: GeminiDDP, optimizer: GeminiOptimizer) -> dict[str, Tensor]:
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    moments = optimizer.state_dict()["state"]
    return weights | {f"{index}.{key}": v for index, state in moments.items() for key, v in state.items()}


def _train_and_save(directory: str, model: GeminiDDP, optimizer: GeminiOptimizer) -> list[dict[str, Tensor]]:
    """Save after one step and after two, train a third; return what the model was after the first two."""
    states = []
    for step in range(2):
        train_step(model, optimizer, RECIPE, step)
        save(directory, model, optimizer)
        states.append(_state(model, optimizer))
    train_step(model, optimizer, RECIPE, 2)
    return states


def _flip_last_bit(directory: str, pattern: str) -> None:
    """Change a file of the newest checkpoint, while no rank does anything else."""
    dist.barrier()
    if dist.get_rank() == 0:
        victim = max(Path(directory, "step-00000002").glob(pattern))
        content = bytearray(victim.read_bytes())
        content[-1] ^= 1
        victim.write_bytes(content)
    dist.barrier()


def _fall_back(directory: str, pattern: str, options: dict[str, Any]) -> bool:
    """Let a file be damaged, load, train on; say whether this rank opened that file."""
    model, optimizer = wrap(columns, RECIPE, **options)
    opened: list[str] = []
    really = os.open

    def noted(path: Any, *args: Any) -> int:
        opened.append(str(path))
        return really(path, *args)

    with model:
        saved, want = _train_and_save(directory, model, optimizer)
        _flip_last_bit(directory, pattern)
        os.open = noted
        try:
            load(directory, model, optimizer)
        finally:
            os.open = really
        assert model.manager.step == 1
        assert_same(_state(model, optimizer), saved)
        train_step(model, optimizer, RECIPE, 1)
        assert_same(_state(model, optimizer), want)
        return any(Path(path).match(f"step-00000002/{pattern}") for path in opened)


@pytest.mark.parametrize("options", [{}, {"strict_ddp_mode": True, "mixed_precision": "bf16"}])
@pytest.mark.parametrize(
    ("pattern", "read_by"),
    [
        ("optimizer-rank-00001*", [False, True]),
        ("optimizer-rank-00000*", [True, False]),
        ("model-00001*", [True, True]),
        ("rank-00001*", None),  # read as text
    ],
)
def test_damage_makes_all_ranks_load_the_checkpoint_before(
    tmp_path: Path, pattern: str, read_by: list[bool] | None, options: dict[str, Any]
) -> None:
    found = run_on_ranks(_fall_back, 2, str(tmp_path), pattern, options)
    assert read_by is None or found == read_by


def _seen_by_one(directory: str, build: Any, victim: str, options: dict[str, Any]) -> None:
    """Let rank 1 alone find a weight damaged after half of it."""
    model, optimizer = wrap(build, RECIPE, **options)
    really: Callable[..., Any] = CheckpointReader.weight_pieces

    def damaged(self: CheckpointReader, name: str) -> Iterator[tuple[int, Tensor]]:
        for first, values in really(self, name):
            if name == victim and self.path.name == "step-00000002":
                yield first, values[: values.numel() // 2]
                raise DamagedError("only rank 1 sees it")
            yield first, values

    with model:
        saved, want = _train_and_save(directory, model, optimizer)
        if dist.get_rank() == 1:
            CheckpointReader.weight_pieces = damaged  # type: ignore[method-assign]
        try:
            load(directory, model, optimizer)
        finally:
            CheckpointReader.weight_pieces = really  # type: ignore[method-assign]
        assert_same(_state(model, optimizer), saved)
        train_step(model, optimizer, RECIPE, 1)
        assert_same(_state(model, optimizer), want)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("build", "victim"), [(mlp, "0.weight"), (mlp, "3.weight"), (columns, "0.weight")])
def test_a_weight_that_one_rank_finds_damaged_keeps_no_other_waiting(
    tmp_path: Path, build: Any, victim: str, strict: bool
) -> None:
    options = {"strict_ddp_mode": strict, "gather_bytes": "80KiB"}
    run_on_ranks(_seen_by_one, 2, str(tmp_path), build, victim, options)


def _refused(directory: str) -> None:
    model, optimizer = wrap(mlp, RECIPE)
    newest = str(Path(directory, "step-00000002"))
    with model:
        _, want = _train_and_save(directory, model, optimizer)
        _flip_last_bit(directory, "optimizer-rank-00001*")
        with pytest.raises(CheckpointError, match="a load failed half-way"):
            load(newest, model, optimizer)
        with pytest.raises(StateError, match="a load failed half-way"):
            optimizer.step()
        _flip_last_bit(directory, "optimizer-rank-00001*")
        optimizer.zero_grad()
        load(newest, model, optimizer)
        assert_same(_state(model, optimizer), want)
        train_step(model, optimizer, RECIPE, 2)


def test_damage_that_one_rank_finds_midway_refuses_training_on_all(tmp_path: Path) -> None:
    run_on_ranks(_refused, 2, str(tmp_path))


@contextmanager
def _acquire(model: GeminiDDP, fails_at: int = 0) -> Iterator[list[int]]:
    """Count, within the block, how often chunks are brought to DEVICE; let one of these times fail."""
    really, count = model.manager.chunks.acquire, [0]

    def acquire(tensors: Any, **where: bool) -> None:
        count[0] += 1
        if count[0] == fails_at:
            raise IoError(28, "injected")
        really(tensors, **where)

    model.manager.chunks.acquire = acquire  # type: ignore[method-assign]
    try:
        yield count
    finally:
        model.manager.chunks.acquire = really  # type: ignore[method-assign]


def _fails_on_one(directory: str, options: dict[str, Any]) -> None:
    """Let a tier's disk be full on rank 1 alone, at several places of a load."""
    model, optimizer = wrap(columns, RECIPE, **options)
    with model:
        _, want = _train_and_save(directory, model, optimizer)
        with _acquire(model) as count:
            load(directory, model, optimizer)
        for fails_at in (1, count[0] // 4, count[0] // 2, count[0]):
            train_step(model, optimizer, RECIPE, 2)  # some chunks are whole again
            if dist.get_rank() == 1:
                with _acquire(model, fails_at), pytest.raises(IoError, match="injected"):
                    load(directory, model, optimizer)
            else:
                with pytest.raises(
                    CheckpointError, match=r"rank 1 of 2 failed: IoError: .*injected.*a load failed half-way"
                ):
                    load(directory, model, optimizer)
            for refused in (
                optimizer.step,
                optimizer.state_dict,
                lambda: save(directory, model, optimizer),
            ):
                with pytest.raises(StateError, match="a load failed half-way"):
                    refused()
            optimizer.zero_grad()
            load(directory, model, optimizer)
            assert_same(_state(model, optimizer), want)
        model.manager.chunks.table.check_invariants()


@pytest.mark.parametrize("options", [{}, {"mixed_precision": "bf16", "gather_bytes": 1}])
def test_a_chunk_that_one_rank_cannot_have_ends_the_load_on_all(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    run_on_ranks(_fails_on_one, 2, str(tmp_path), options, timeout=30.0)


def _state_dict_fails_on_one() -> None:
    """Let rank 1 alone fail to take over weights, or states, or be given what does not fit."""
    model, optimizer = wrap(mlp, RECIPE)
    with model:
        train_step(model, optimizer, RECIPE, 0)
        weights = {key: value.clone() for key, value in model.state_dict().items()}
        states, alone = optimizer.state_dict(), dist.get_rank() == 1
        train_step(model, optimizer, RECIPE, 1)
        want = _state(model, optimizer)
        for load_all in (lambda: model.load_state_dict(weights), lambda: optimizer.load_state_dict(states)):
            with (
                _acquire(model, 2 if alone else 0),
                pytest.raises(IoError if alone else CheckpointError, match=r"injected"),
            ):
                load_all()
            for refused in (optimizer.step, optimizer.state_dict):
                with pytest.raises(StateError, match="a load failed half-way"):
                    refused()
            load_all()
        with pytest.raises(RuntimeError if alone else CheckpointError, match="missing keys"):
            model.load_state_dict({} if alone else weights)
        train_step(model, optimizer, RECIPE, 1)
        assert_same(_state(model, optimizer), want)


def test_a_state_that_one_rank_cannot_take_over_is_refused_on_all() -> None:
    run_on_ranks(_state_dict_fails_on_one, 2, timeout=30.0)
