"""A booster over several processes: what one does, with the data divided and the files written once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from booster_models import PLUGINS, TINY, boosted, mlp, tied, train
from forked_ranks import run_program
from processes import run_on_ranks
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import gemini
from gemini import CheckpointError, ConfigError, HybridAdam, IoError
from gemini.checkpoint.sealed_file import SealedFile
from gemini.parallel import Booster, GeminiPlugin, TorchDDPPlugin
from gemini.parallel.booster.mixed_precision import FP16TorchMixedPrecision

ROOT = Path(__file__).resolve().parents[2]
over_ranks = pytest.mark.parametrize("plugin", ["ddp", "gemini", "zero-1", "zero-2"])
BATCHES = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(0))


def _train(plugin: str, batches: torch.Tensor, accumulate: bool = False) -> dict[str, torch.Tensor]:
    """Train on ``batches``; with ``accumulate`` each in two halves, the first without synchronization."""
    booster, model, optimizer = boosted(PLUGINS[plugin](), mlp())
    for batch in batches:
        halves = batch.chunk(2) if accumulate else (batch,)
        for half in halves[:-1]:
            with booster.no_sync(model):
                booster.backward(model(half).square().mean() / len(halves), optimizer)
        booster.backward(model(halves[-1]).square().mean() / len(halves), optimizer)
        optimizer.clip_grad_by_norm(0.1)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _train_on_part(plugin: str, accumulate: bool) -> dict[str, torch.Tensor]:
    return _train(plugin, BATCHES.chunk(dist.get_world_size(), dim=1)[dist.get_rank()], accumulate)


@over_ranks
@pytest.mark.parametrize("accumulate", [False, True])
def test_ranks_train_as_one_process_does_on_the_whole_batch(plugin: str, accumulate: bool) -> None:
    first, second = run_on_ranks(_train_on_part, 2, plugin, accumulate)
    want = _train(plugin, BATCHES)
    assert first.keys() == second.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], value, rtol=1e-4, atol=1e-5)  # another order of summing


def _gradients_in_and_after_no_sync() -> tuple[torch.Tensor, torch.Tensor]:
    booster, model, optimizer = boosted(TorchDDPPlugin(), mlp())
    batch = torch.full((1, 16), float(dist.get_rank() + 1))
    with booster.no_sync(model):
        booster.backward(model(batch).sum(), optimizer)
    inside = model.module[0].weight.grad.clone()
    booster.backward(model(batch).sum(), optimizer)
    return inside, model.module[0].weight.grad.clone()


def test_no_sync_keeps_gradients_apart_until_the_next_backward() -> None:
    (inside, after), (other_inside, other_after) = run_on_ranks(_gradients_in_and_after_no_sync, 2)
    assert not torch.equal(inside, other_inside)
    assert torch.equal(after, other_after)
    torch.testing.assert_close(after, inside + other_inside)


def _overflow_on_rank_1() -> tuple[bool, float]:
    booster, model, optimizer = boosted(TorchDDPPlugin(), mlp(), FP16TorchMixedPrecision(init_scale=64.0))
    before = [param.detach().clone() for param in model.parameters()]
    loss = model(torch.ones(1, 16)).float().mean()
    booster.backward(loss * (float("inf") if dist.get_rank() == 1 else 1.0), optimizer)
    optimizer.step()
    same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return same, optimizer.state_dict()["loss_scale"]["scale"]


def test_overflow_on_one_rank_skips_the_step_on_all() -> None:
    assert run_on_ranks(_overflow_on_rank_1, 2) == [(True, 32.0)] * 2


def _load_data(drop_last: bool) -> tuple[list[list[float]], list[list[float]]]:
    data = TensorDataset(torch.arange(10.0))
    loader = TorchDDPPlugin().prepare_dataloader(data, 2, shuffle=True, drop_last=drop_last, seed=1)
    return [b.tolist() for (b,) in loader], [b.tolist() for (b,) in loader]


def _flat(batches: list[list[float]]) -> list[float]:
    return [number for batch in batches for number in batch]


def test_ranks_load_parts_that_make_up_the_data_and_every_pass_shuffles_anew() -> None:
    first, second = run_on_ranks(_load_data, 2, False)
    for mine, others in zip(first, second, strict=True):
        assert sorted(_flat(mine) + _flat(others)) == list(range(10))
    assert first[0] != first[1]
    for passes in run_on_ranks(_load_data, 3, True):
        assert [[len(batch) for batch in batches] for batches in passes] == [[2], [2]]


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(4))


def _misuse_data(caught: str) -> str:
    with pytest.raises(ConfigError, match="its __iter__"):
        TorchDDPPlugin().prepare_dataloader(_Stream(), 2)
    caplog: list[str] = []
    import logging

    handler = logging.Handler()
    handler.emit = lambda record: caplog.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(caught).addHandler(handler)
    Booster().boost(mlp(), dataloader=DataLoader(TensorDataset(torch.ones(4))))
    logging.getLogger(caught).removeHandler(handler)
    return caplog[0]


def test_data_that_is_not_divided_is_told() -> None:
    for message in run_on_ranks(_misuse_data, 2, "gemini.parallel.booster.booster"):
        assert "prepare_dataloader" in message


def _save_and_load(plugin: str, directory: str, shard: bool, mixed_precision: str | None) -> bool:
    booster, model, optimizer = boosted(PLUGINS[plugin](), mlp(dist.get_rank()), mixed_precision)
    booster.backward(model(torch.ones(1, 16)).sum(), optimizer)
    optimizer.step()
    path = Path(directory, str(shard))
    booster.save_model(model, path / "model", shard=shard)
    booster.save_optimizer(optimizer, path / "optimizer", shard=shard)
    written = sorted(file.name for file in path.rglob("*") if file.is_file())
    booster, again, optim = boosted(PLUGINS[plugin](), mlp(7), mixed_precision)
    booster.load_model(again, path / "model")
    booster.load_optimizer(optim, path / "optimizer")
    assert not any(name.endswith(".tmp") for name in written)
    assert len(written) == (4 if shard else 2)
    for net, adam in ((model, optimizer), (again, optim)):
        adam.zero_grad()
        adam.backward(net(torch.ones(1, 16)).sum())
        adam.step()
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@over_ranks
@pytest.mark.parametrize(("shard", "mixed_precision"), [(False, None), (True, "bf16")])
def test_files_are_complete_when_any_rank_goes_on(
    plugin: str, shard: bool, mixed_precision: str | None, tmp_path: Path
) -> None:
    assert run_on_ranks(_save_and_load, 2, plugin, str(tmp_path), shard, mixed_precision) == [True, True]


def _save_state(plugin: str, directory: str) -> list[float]:
    booster, model, optimizer = boosted(PLUGINS[plugin](), tied())
    train(booster, model, optimizer, range(2), max_norm=0)
    booster.save_model(model, Path(directory, "model"), shard=True)
    booster.save_optimizer(optimizer, Path(directory, "optimizer"), shard=True)
    return train(booster, model, optimizer, range(2, 5), max_norm=0)


@over_ranks
def test_files_of_several_ranks_are_loaded_by_one(plugin: str, tmp_path: Path) -> None:
    want, same = run_on_ranks(_save_state, 2, plugin, str(tmp_path))
    assert want == same
    booster, model, optimizer = boosted(GeminiPlugin(), tied(1))
    booster.load_model(model, tmp_path / "model")
    booster.load_optimizer(optimizer, tmp_path / "optimizer")
    assert train(booster, model, optimizer, range(2, 5), max_norm=0) == pytest.approx(want, rel=1e-5)


def _save_over_mesh(directory: str) -> tuple[int, bool]:
    plugin = GeminiPlugin(process_group=init_device_mesh("cpu", (2,)))
    booster, model, _ = boosted(plugin, mlp(dist.get_rank()))
    booster.save_model(model, Path(directory, "model"))
    booster.load_model(plain := mlp(7), Path(directory, "model"))
    same = all(torch.equal(a, b) for a, b in zip(plain.parameters(), mlp(0).parameters(), strict=True))
    return plugin.ranks.number, same


def test_ranks_of_a_mesh_save_what_the_first_began_with(tmp_path: Path) -> None:
    assert run_on_ranks(_save_over_mesh, 2, str(tmp_path)) == [(0, True), (1, True)]


def _save_within_budget(directory: str) -> tuple[bool, bool]:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(16)))
    plugin = GeminiPlugin(
        placement_policy="const",
        device_bytes="256KiB",
        non_model_bytes=0,
        disk_dir=directory,
        min_chunk_size_mb=0.01,
    )
    booster, managed, optimizer = boosted(plugin, model)
    booster.backward(managed(torch.ones(1, 64)).sum(), optimizer)
    optimizer.step()
    booster.save_model(managed, Path(directory, "model"), shard=True, size_per_shard=1)
    booster.save_optimizer(optimizer, Path(directory, "optimizer"))
    want = {name: value.clone() for name, value in managed.state_dict().items()}
    booster.load_model(managed, Path(directory, "model"))
    booster.load_optimizer(optimizer, Path(directory, "optimizer"))
    device = managed.stats()["device"]
    fits = device["peak_bytes"] <= device["budget_bytes"] < managed.stats()["model_data_bytes"]
    return fits, all(torch.equal(value, want[name]) for name, value in managed.state_dict().items())


def test_chunks_of_ranks_are_saved_and_loaded_within_budgets(tmp_path: Path) -> None:
    assert run_on_ranks(_save_within_budget, 2, str(tmp_path)) == [(True, True)] * 2


def _save_on_full_disk(plugin: str, directory: str) -> str:
    booster, model, optimizer = boosted(PLUGINS[plugin](), mlp(), "bf16")
    booster.backward(model(torch.ones(1, 16)).sum(), optimizer)
    optimizer.step()
    write = SealedFile.write

    def full(file: SealedFile, data: Any, offset: int) -> None:
        raise IoError(28, "no space left", str(file.path))

    SealedFile.write = full  # type: ignore[method-assign]
    try:
        booster.save_optimizer(optimizer, Path(directory, "state"), shard=True, size_per_shard=TINY)  # type: ignore[arg-type]
    except (IoError, CheckpointError) as error:
        return f"{type(error).__name__} {error}"
    finally:
        SealedFile.write = write  # type: ignore[method-assign]
    return "saved"


@over_ranks
def test_failed_save_raises_on_every_rank(plugin: str, tmp_path: Path) -> None:
    first, second = run_on_ranks(_save_on_full_disk, 2, plugin, str(tmp_path))
    assert first.startswith("IoError")
    assert "no space left" in first
    assert second.startswith("CheckpointError rank 0 of 2 failed: IoError: ")
    assert list((tmp_path / "state").iterdir()) == []


def _frozen_model_runs() -> bool:
    model = mlp()
    for param in model.parameters():
        param.requires_grad_(False)
    wrapped, *_ = Booster().boost(model)
    return isinstance(wrapped, nn.Module) and not wrapped(torch.ones(1, 16)).requires_grad


def test_model_without_trainable_parameters_is_boosted() -> None:
    assert run_on_ranks(_frozen_model_runs, 2) == [True, True]


def _leave_out_a_parameter(**options: bool) -> str:
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "idle": nn.Linear(4, 4, bias=False)})
    model.forward = model["used"].forward  # type: ignore[method-assign]
    booster, wrapped, optimizer = boosted(TorchDDPPlugin(**options), model)
    try:
        for _ in range(2):
            booster.backward(wrapped(torch.ones(2, 4)).sum(), optimizer)
            optimizer.step()
    except ConfigError as error:
        return str(error)
    return "trained"


def test_a_parameter_without_a_gradient_is_named_with_the_option_for_it() -> None:
    for said in run_on_ranks(_leave_out_a_parameter, 2):
        assert "no gradient to 1 parameters (first ['idle.weight'])" in said
        assert "find_unused_parameters=True" in said


def _optimizer_starts_alike() -> float:
    model = mlp(dist.get_rank())
    wrapped, *_ = Booster().boost(model, HybridAdam(model.parameters()))
    return next(wrapped.parameters()).sum().item()


def test_every_rank_starts_with_the_weights_of_the_first() -> None:
    first, second = run_on_ranks(_optimizer_starts_alike, 2)
    assert first == second == next(mlp(0).parameters()).sum().item()


def _identical_on_two_ranks(printed: str) -> bool:
    """Say whether two ranks took half of the steps that one takes, and loaded what they had saved."""
    return printed.count("identical weights") == printed.count("step 3") == 2 and "step 4" not in printed


EXAMPLE = ROOT / "examples" / "booster_gemini.py"


@pytest.mark.parametrize("plugin", ["gemini", "zero", "ddp"])
def test_the_same_program_runs_on_ranks(plugin: str) -> None:
    assert _identical_on_two_ranks(run_program(EXAMPLE, "--plugin", plugin, "--hidden", "16", ranks=2))


@pytest.mark.dear("two ranks under torchrun")
def test_the_same_program_runs_under_torchrun(tmp_path: Path) -> None:
    path = str(Path(gemini.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    program = [str(EXAMPLE), "--plugin", "gemini", "--hidden", "16"]
    done = subprocess.run(
        [*launch, *program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert _identical_on_two_ranks(done.stdout), done.stdout
