"""States of ZeRO 1 and 2: whole or in parts, at any number of ranks, with or without ZeRO."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import own_part, run_on_ranks
from torch import Tensor, nn
from zero_models import adamw, assert_same, loss_of, odd_net, tokens_of, train, train_plain, weights

from gemini import ConfigError, CPUAdam
from gemini.parallel.zero import LowLevelZeroOptimizer
from gemini.parallel.zero.state import StateShard

TOLERANCE = 2e-6


def assert_same_state(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got["state"].keys() == want["state"].keys()
    for number, entry in want["state"].items():
        assert_same(got["state"][number], entry)
    assert_same(got.get("masters", {}), want.get("masters", {}))
    assert got.get("loss_scale") == want.get("loss_scale")
    assert [group["params"] for group in got["param_groups"]] == [g["params"] for g in want["param_groups"]]


def _step(model: nn.Module, optimizer: LowLevelZeroOptimizer, step: int) -> None:
    optimizer.backward(loss_of(model, own_part(tokens_of(step))))
    optimizer.step()


def _save(precision: str | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    model, optimizer = train(precision=precision, initial_scale=4.0)
    return copy.deepcopy((weights(model), optimizer.state_dict()))


def _load(
    precision: str | None, model_state: dict[str, Tensor], state: dict[str, Any], num_steps: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Load into a new model, which other numbers fill, and go on."""
    torch.manual_seed(99)
    model = type(odd_net())()
    for param in model.parameters():
        nn.init.normal_(param.data)
    if precision is None:
        model.load_state_dict(model_state)
    optimizer = LowLevelZeroOptimizer(adamw(model.parameters()), precision=precision, stage=2)
    optimizer.load_state_dict(state)
    for step in range(num_steps):
        _step(model, optimizer, 4 + step)
    return copy.deepcopy((weights(model), optimizer.state_dict()))


@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
def test_state_saved_by_two_ranks_loads_bit_for_bit_at_one_two_three_and_four(precision: str | None) -> None:
    saved = run_on_ranks(_save, 2, precision)
    model_state, state = saved[0]
    assert_same_state(saved[1][1], state)
    for world_size in (1, 2, 3, 4):
        for got_model, got_state in run_on_ranks(_load, world_size, precision, model_state, state, 0):
            assert_same(got_model, model_state)
            assert_same_state(got_state, state)


def _on_first(precision: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    _, optimizer = train(precision=precision, initial_scale=4.0)
    return copy.deepcopy((optimizer.state_dict(only_rank_0=True), optimizer.state_dict()))


@pytest.mark.parametrize("precision", [None, "fp16"])
def test_only_the_first_rank_has_the_state_where_it_alone_is_to(precision: str | None) -> None:
    (alone, everywhere), (nothing, _) = run_on_ranks(_on_first, 2, precision)
    assert_same_state(alone, everywhere)
    assert nothing == {}


def _train_on(precision: str | None, num_steps: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    model, optimizer = train(num_steps=num_steps, precision=precision, initial_scale=4.0)
    return copy.deepcopy((weights(model), optimizer.state_dict()))


@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
def test_resumed_run_is_the_run_without_interruption(precision: str | None) -> None:
    want = run_on_ranks(_train_on, 2, precision, 7)[0]
    model_state, state = run_on_ranks(_save, 2, precision)[0]
    for got in run_on_ranks(_load, 2, precision, model_state, state, 3):
        assert_same(got[0], want[0])
        assert_same_state(got[1], want[1])


def test_plain_torch_loads_the_state_and_zero_loads_plain_torchs() -> None:
    plain_model, plain = train_plain(num_steps=4)
    model_state, state = run_on_ranks(_save, 2, None)[0]
    model = odd_net()
    model.load_state_dict(model_state)
    resumed = adamw(model.parameters())
    resumed.load_state_dict(state)
    for going_on, own_model in ((plain, plain_model), (resumed, model)):
        going_on.zero_grad()
        loss_of(own_model, tokens_of(4)).backward()
    got = run_on_ranks(_load, 3, None, weights(plain_model), copy.deepcopy(plain.state_dict()), 1)[0][0]
    for going_on in (plain, resumed):
        going_on.step()
    for name, weight in weights(plain_model).items():
        torch.testing.assert_close(weights(model)[name], weight, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(got[name], weight, rtol=0, atol=TOLERANCE)


# -- parts ---------------------------------------------------------------------------------------


def _save_parts(directory: str) -> dict[str, Any]:
    _, optimizer = train(precision="bf16")
    parts = Path(directory, f"part{optimizer.collectives.rank}")
    parts.write_bytes(pickle.dumps((list(optimizer.state_shards()), optimizer.exported_groups())))
    return optimizer.state_dict()


def _read_parts(directory: str, only: int | None = None) -> tuple[list[StateShard], list[dict[str, Any]]]:
    shards: list[StateShard] = []
    groups: list[dict[str, Any]] = []
    for index, path in enumerate(sorted(Path(directory).iterdir())):
        if only is None or index == only:
            part, groups = pickle.loads(path.read_bytes())
            shards += part
    return shards, groups


def _load_parts(directory: str) -> dict[str, Any]:
    optimizer = LowLevelZeroOptimizer(adamw(odd_net().parameters()), precision="bf16")
    shards, groups = _read_parts(directory)
    optimizer.load_state_shards(iter(shards), groups)
    return optimizer.state_dict()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_parts_of_three_ranks_load_at_any_number(world_size: int, tmp_path: Path) -> None:
    want = run_on_ranks(_save_parts, 3, str(tmp_path))[0]
    for got in run_on_ranks(_load_parts, world_size, str(tmp_path)):
        assert_same_state(got, want)


def test_parts_cover_every_element_once_and_are_no_copies(tmp_path: Path) -> None:
    want = run_on_ranks(_save_parts, 3, str(tmp_path))[0]
    shards, _ = _read_parts(str(tmp_path))
    for number, entry in want["state"].items():
        own = sorted((s for s in shards if s.index == number), key=lambda shard: shard.start)
        assert [own[0].start, *(s.stop for s in own)] == [*(s.start for s in own), entry["exp_avg"].numel()]
        assert torch.equal(torch.cat([s.tensors["exp_avg"] for s in own]), entry["exp_avg"].flatten())
    _, optimizer = train()
    mine = next(optimizer.state_shards())
    own = next(iter(optimizer.optim.state.values()))["exp_avg"]
    assert mine.tensors["exp_avg"].data_ptr() == own.data_ptr()


def test_missing_part_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    run_on_ranks(_save_parts, 3, str(tmp_path))
    model, optimizer = train(precision="bf16", num_steps=2)
    before, weights_before = copy.deepcopy(optimizer.state_dict()), weights(model)
    shards, groups = _read_parts(str(tmp_path), only=1)
    with pytest.raises(ConfigError, match="pass the parts of all ranks"):
        optimizer.load_state_shards(shards, groups)
    assert_same_state(optimizer.state_dict(), before)
    assert_same(weights(model), weights_before)


# -- what does not fit ---------------------------------------------------------------------------


def test_state_that_does_not_fit_is_refused_and_nothing_changes() -> None:
    _, optimizer = train(num_steps=2)
    before = copy.deepcopy(optimizer.state_dict())
    fewer = copy.deepcopy(before)
    fewer["param_groups"][0]["params"].pop()
    other = copy.deepcopy(before)
    other["state"][0]["exp_avg"] = torch.zeros(3, 3)
    for state, message in (
        (fewer, "different parameter groups"),
        (other, r"exp_avg of .* has shape \(3, 3\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            optimizer.load_state_dict(state)
        assert_same_state(optimizer.state_dict(), before)


# -- optimizers that bring something along ---------------------------------------------------------


def _wrap_late() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Take two steps on the whole batch without ZeRO, then two with it."""
    model = odd_net()
    inner = adamw(model.named_parameters())
    for step in range(2):
        inner.zero_grad()
        loss_of(model, tokens_of(step)).backward()
        inner.step()
    inner.zero_grad()
    optimizer = LowLevelZeroOptimizer(inner)
    for step in (2, 3):
        _step(model, optimizer, step)
    return copy.deepcopy((weights(model), optimizer.state_dict()))


def test_optimizer_keeps_the_state_and_the_names_it_had_before_wrapping() -> None:
    want, plain = train_plain(num_steps=4)
    for model_state, state in run_on_ranks(_wrap_late, 4):
        assert state["param_groups"][0]["param_names"] == [name for name, _ in odd_net().named_parameters()]
        assert [float(entry["step"]) for entry in state["state"].values()] == [4.0] * len(plain.state)
        for name, weight in weights(want).items():
            torch.testing.assert_close(model_state[name], weight, rtol=0, atol=TOLERANCE)


def _with_states_in_files(fraction: float) -> tuple[dict[str, Tensor], dict[str, Any]]:
    model, optimizer = train(
        make=lambda params: CPUAdam(params, lr=1e-2, nvme_offload_fraction=fraction), num_steps=3
    )
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    _step(model, optimizer, 3)
    return copy.deepcopy((weights(model), optimizer.state_dict()))


def test_states_in_files_are_saved_loaded_and_trained_as_those_in_memory() -> None:
    want = run_on_ranks(_with_states_in_files, 2, 0.0)[0]
    for got in run_on_ranks(_with_states_in_files, 2, 1.0):
        assert_same(got[0], want[0])
        assert_same_state(got[1], want[1])


def _scheduled() -> list[float]:
    model = odd_net()
    inner = adamw([{"params": [model.bias], "lr": 0.5}, {"params": [model.gain]}])
    optimizer = LowLevelZeroOptimizer(inner)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    seen = []
    for step in range(3):
        _step(model, optimizer, step)
        scheduler.step()
        if step == 1:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        seen += [group["lr"] for group in inner.param_groups]
    return seen


def test_schedulers_and_groups_keep_working_also_after_loading() -> None:
    for seen in run_on_ranks(_scheduled, 2):
        assert seen == [0.25, 0.005, 0.125, 0.0025, 0.0625, 0.00125]
