"""Checkpoints of a model cut among ranks: bit for bit at the same number, loadable at any other."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_on_ranks
from sharded_harness import (
    Recipe,
    assert_near,
    assert_same,
    columns,
    mlp,
    tied,
    train_plain,
    train_step,
    wrap,
)
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from gemini import CheckpointError, IoError
from gemini.checkpoint import CheckpointReader, latest, load, save, save_async
from gemini.comm import ranks as ranks_module

RECIPE = Recipe(clip=0.1)


def _state(model: Any) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def _train_and_save(directory: str, build: Any, until: int, further: int, options: dict[str, Any]) -> Any:
    """Resume if there is something, train up to step ``until``, save, train ``further`` steps."""
    model, optimizer = wrap(build, RECIPE, **options)
    with model:
        if any(Path(directory).glob("step-*")):
            load(directory, model, optimizer)
        for step in range(model.manager.step, until):
            train_step(model, optimizer, RECIPE, step)
        save(directory, model, optimizer)
        saved = _state(model)
        for step in range(until, until + further):
            train_step(model, optimizer, RECIPE, step)
        return saved, _state(model)


def _resume(directory: str, build: Any, steps: int, options: dict[str, Any]) -> Any:
    model, optimizer = wrap(build, RECIPE, **options)
    with model:
        load(directory, model, optimizer)
        loaded = _state(model)
        first = model.manager.step
        for step in range(first, first + steps):
            train_step(model, optimizer, RECIPE, step)
        return loaded, _state(model)


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_resume_at_the_same_number_of_ranks_continues_bit_for_bit(
    tmp_path: Path, precision: str | None
) -> None:
    options = {"mixed_precision": precision}
    tight = {"device_bytes": "600KiB", "disk_dir": str(tmp_path), "non_model_bytes": 0}
    path = str(tmp_path / "run")
    went_on = run_on_ranks(_train_and_save, 2, path, tied, 2, 2, options, timeout=120.0)
    resumed = run_on_ranks(_resume, 2, path, tied, 2, {**options, **tight}, timeout=120.0)
    for (saved, final), (loaded, again) in zip(went_on, resumed, strict=True):
        assert_same(loaded, saved)
        assert_same(again, final)


def test_worlds_of_4_3_1_and_2_ranks_hand_over_to_each_other(tmp_path: Path) -> None:
    path = str(tmp_path)
    for until, world in enumerate([4, 3, 1, 2], start=1):
        results = run_on_ranks(_train_and_save, world, path, mlp, until, 0, {}, timeout=120.0)
        with CheckpointReader(latest(path)) as reader:
            reader.verify()
            assert reader.manifest["ranks"] == world
            assert_same({name: reader.weight(name) for name in reader.weights}, results[0][0])
    _, want = train_plain(mlp, RECIPE)
    for saved, _ in results:
        assert_near(saved, want)


def _save_copies(directory: str, replicas: int, shards: int, until: int) -> dict[str, Tensor]:
    ranks = init_device_mesh("cpu", (replicas, shards)) if replicas > 1 else None
    model, optimizer = wrap(tied, RECIPE, process_group=ranks)
    with model:
        if any(Path(directory).glob("step-*")):
            load(directory, model, optimizer)
        for step in range(model.manager.step, until):
            train_step(model, optimizer, RECIPE, step)
        save(directory, model, optimizer)
        return {key: value.clone() for key, value in model.state_dict().items()}


def test_checkpoints_pass_between_copies_and_cuts(tmp_path: Path) -> None:
    for until, (replicas, shards) in enumerate([(2, 2), (1, 2), (2, 2), (1, 3)], start=1):
        args = (str(tmp_path), replicas, shards, until)
        results = run_on_ranks(_save_copies, replicas * shards, *args, timeout=120.0)
        with CheckpointReader(latest(tmp_path)) as reader:
            reader.verify()
            assert reader.manifest["ranks"] == replicas * shards
            for name in reader.weights:
                assert torch.equal(reader.weight(name), results[-1][name])
    _, want = train_plain(tied, RECIPE)
    assert_near(results[0], want)


def _fail_on_rank_1(directory: str, save_it: str, fault: str) -> str:
    """Let a save fail on rank 1 alone; train on, and save."""
    model, optimizer = wrap(columns, RECIPE)
    with model:
        train_step(model, optimizer, RECIPE, 0)
        extra: dict[str, Any] = {}
        really = os.open

        def full(path: Any, *args: Any) -> int:
            if str(path).endswith(".safetensors"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return really(path, *args)

        if dist.get_rank() == 1 and fault == "extra":
            extra["rank"] = object()
        if dist.get_rank() == 1 and fault == "open":
            os.open = full
        try:
            with pytest.raises((CheckpointError, IoError)) as caught:
                _SAVES[save_it](directory, model, optimizer, extra=extra)
        finally:
            os.open = really
        train_step(model, optimizer, RECIPE, 1)
        return f"{caught.value} {save(directory, model, optimizer).name}"


def _pass_through(directory: str, machines: list[str]) -> tuple[bool, bool]:
    """Save and load as if each rank ran on the machine that a file names; say whether weights are the same,
    and whether files were written synchronously."""
    boot_id, ranks_module._BOOT_ID = ranks_module._BOOT_ID, Path(machines[dist.get_rank()])
    model, optimizer = wrap(mlp, RECIPE)
    flags: list[int] = []
    really = os.open

    def noted(path: Any, how: int, *mode: int) -> int:
        flags.append(how if str(path).endswith("model-00001-of-00001.safetensors") else 0)
        return really(path, how, *mode)

    with model:
        train_step(model, optimizer, RECIPE, 0)
        os.open = noted
        try:
            save(directory, model, optimizer)
        finally:
            os.open, ranks_module._BOOT_ID = really, boot_id
        saved = _state(model)
        train_step(model, optimizer, RECIPE, 1)
        load(directory, model, optimizer)
        same = all(torch.equal(value, saved[key]) for key, value in _state(model).items())
        return same, any(how & os.O_DSYNC == os.O_DSYNC for how in flags)


@pytest.mark.parametrize("several", [False, True])
def test_ranks_on_several_machines_write_what_they_share_synchronously(tmp_path: Path, several: bool) -> None:
    machines = [tmp_path / "one", tmp_path / "other"]
    for number, machine in enumerate(machines):
        machine.write_text(f"machine {number if several else 0}")
    names = [str(machine) for machine in machines]
    assert run_on_ranks(_pass_through, 2, str(tmp_path / "run"), names) == [(True, several)] * 2


_SAVES = {"save": save, "save_async": save_async}


@pytest.mark.parametrize("fault", ["extra", "open"])
@pytest.mark.parametrize("save_it", _SAVES)
def test_a_save_that_fails_on_one_rank_fails_on_all_and_training_goes_on(
    tmp_path: Path, save_it: str, fault: str
) -> None:
    first, second = run_on_ranks(_fail_on_rank_1, 2, str(tmp_path), save_it, fault, timeout=30.0)
    assert first.startswith("rank 1 of 2 failed: ")
    assert ("extra" if fault == "extra" else "No space") in second
    for said in (first, second):
        assert said.endswith("step-00000002")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]
