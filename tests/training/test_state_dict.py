"""Weights and optimizer states go in and out whole, under any budget, or not at all."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training_harness import (
    KIB,
    Recipe,
    assert_same_state,
    assert_within_budgets,
    managed_optimizer,
    managed_step,
    seeded,
    tight,
    train_plain,
)
from training_models import Around, TinyGPT, gpt_loss, square_loss

from gemini import ConfigError, GeminiDDP

BOTH = pytest.mark.parametrize("precision", [None, "bf16"])


def trained(
    tmp_path: Path, precision: str | None = None, device_bytes: int | None = 72 * KIB
) -> tuple[Any, Any]:
    """Return a managed GPT after two steps and its optimizer."""
    model = GeminiDDP(seeded(TinyGPT), mixed_precision=precision, **tight(tmp_path, device_bytes))
    optimizer = managed_optimizer(model)
    for step in range(2):
        managed_step(model, optimizer, gpt_loss, Recipe(), step)
    return model, optimizer


def saved_and_loaded(state: Any) -> Any:
    """Pass ``state`` through a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@BOTH
def test_a_saved_state_dict_loads_into_plain_torch(precision: str | None, tmp_path: Path) -> None:
    model, _ = trained(tmp_path, precision)
    with model:
        loaded = saved_and_loaded(model.state_dict())
        assert_within_budgets(model.stats())
    want = train_plain(seeded(TinyGPT), gpt_loss, Recipe(steps=2, precision=precision))
    assert_same_state(loaded, want.state)
    TinyGPT().load_state_dict(loaded)


@BOTH
def test_the_modules_own_state_dict_can_be_saved_and_loaded(precision: str | None, tmp_path: Path) -> None:
    model, _ = trained(tmp_path, precision)
    with model:
        loaded = saved_and_loaded(model.module.state_dict())
        assert list(loaded) == list(model.module.state_dict())
        for key, param in model.module.named_parameters():
            assert type(loaded[key]) is torch.Tensor
            assert torch.equal(param, loaded[key])
        assert_within_budgets(model.stats())


def test_a_state_dict_does_not_change_when_training_goes_on(tmp_path: Path) -> None:
    model, optimizer = trained(tmp_path)
    with model:
        state = model.state_dict()
        before = {key: value.clone() for key, value in state.items()}
        managed_step(model, optimizer, gpt_loss, Recipe(), 2)
        assert_same_state(state, before)
    assert_same_state(state, before)


@BOTH
@pytest.mark.parametrize("device_bytes", [None, 72 * KIB])
def test_training_resumes_bit_for_bit_from_the_two_state_dicts(
    precision: str | None, device_bytes: int | None, tmp_path: Path
) -> None:
    model, optimizer = trained(tmp_path, precision)
    with model:
        states = saved_and_loaded([model.state_dict(), optimizer.state_dict()])
        want = [managed_step(model, optimizer, gpt_loss, Recipe(), step) for step in (2, 3)]
        end = {key: value.clone() for key, value in model.state_dict().items()}
    options = tight(tmp_path, device_bytes)
    with GeminiDDP(seeded(TinyGPT, 9), mixed_precision=precision, **options) as fresh:
        second = managed_optimizer(fresh)
        fresh.load_state_dict(states[0])
        second.load_state_dict(states[1])
        assert [managed_step(fresh, second, gpt_loss, Recipe(), step) for step in (2, 3)] == want
        assert_same_state(fresh.state_dict(), end)


@BOTH
def test_optimizer_states_load_into_torchs_adamw_and_back(precision: str | None, tmp_path: Path) -> None:
    model, optimizer = trained(tmp_path, precision)
    with model:
        state = optimizer.state_dict()
        plain = TinyGPT()
        adamw = torch.optim.AdamW(plain.parameters())
        adamw.load_state_dict(state)
        assert adamw.param_groups[0]["lr"] == Recipe().adam["lr"]
        optimizer.load_state_dict(adamw.state_dict())
        again = optimizer.state_dict()["state"]
        for index, entry in state["state"].items():
            for name, value in entry.items():
                assert torch.equal(again[index][name], value)


def _without(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key != "after.0.bias"}


def _edited(key: str, value: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda state: {**state, key: value}


def _quantized(state: dict[str, Any]) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is about to give them up
        value = torch.quantize_per_tensor(torch.eye(32), 0.1, 0, torch.quint8)
    return {**state, "after.2.weight": value}


BAD_STATES: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], type[Exception], str]] = {
    "missing": (_without, RuntimeError, "after.0.bias"),
    "unexpected": (_edited("extra.weight", torch.zeros(2)), RuntimeError, "extra.weight"),
    "shape": (
        _edited("after.2.weight", torch.zeros(3, 3)),
        ConfigError,
        r"after.2.weight.*\(3, 3\).*\(32, 32\)",
    ),
    "shape of the last": (_edited("after.2.bias", torch.zeros(1)), ConfigError, "after.2.bias"),
    "shape of a buffer": (_edited("core.running_mean", torch.zeros(3)), ConfigError, "running_mean"),
    "not a tensor": (_edited("after.2.weight", 3.0), ConfigError, "after.2.weight"),
    "sparse": (
        _edited("after.2.weight", torch.eye(32).to_sparse()),
        ConfigError,
        r"'after.2.weight' is sparse_coo in the state .* value.to_dense\(\)",
    ),
    "sparse by rows": (
        _edited("after.2.weight", torch.eye(32).to_sparse_csr()),
        ConfigError,
        "'after.2.weight' is sparse_csr",
    ),
    "sparse buffer": (
        _edited("core.running_mean", torch.ones(32).to_sparse()),
        ConfigError,
        "'core.running_mean' is sparse_coo",
    ),
    "quantized": (_quantized, ConfigError, r"'after.2.weight' is quantized .* value.dequantize\(\)"),
    "without values": (
        _edited("after.2.weight", torch.empty(32, 32, device="meta")),
        ConfigError,
        "'after.2.weight' is on meta",
    ),
}


@BOTH
@pytest.mark.parametrize("name", BAD_STATES)
def test_a_state_that_does_not_match_changes_nothing(
    name: str, precision: str | None, tmp_path: Path
) -> None:
    edit, error, message = BAD_STATES[name]
    options = tight(tmp_path, 40 * KIB)
    with GeminiDDP(seeded(lambda: Around(nn.BatchNorm1d(32))), mixed_precision=precision, **options) as model:
        before = {key: value.clone() for key, value in model.state_dict().items()}
        other = seeded(lambda: Around(nn.BatchNorm1d(32)), 7).state_dict()
        with pytest.raises(error, match=message):
            model.load_state_dict(edit(other))
        assert_same_state(model.state_dict(), before)


def test_a_loose_load_takes_what_is_there_and_says_what_is_not(tmp_path: Path) -> None:
    with GeminiDDP(seeded(lambda: Around(nn.BatchNorm1d(32))), **tight(tmp_path, 40 * KIB)) as model:
        other = seeded(lambda: Around(nn.BatchNorm1d(32)), 7).state_dict()
        result = model.load_state_dict({**_without(other), "extra": torch.zeros(1)}, strict=False)
        assert result.missing_keys == ["after.0.bias"]
        assert result.unexpected_keys == ["extra"]
        assert torch.equal(model.state_dict()["after.0.weight"], other["after.0.weight"])


def test_an_optimizer_state_that_does_not_match_changes_nothing(tmp_path: Path) -> None:
    with GeminiDDP(seeded(lambda: Around(nn.BatchNorm1d(32))), **tight(tmp_path, 40 * KIB)) as model:
        optimizer = managed_optimizer(model)
        managed_step(model, optimizer, square_loss, Recipe(), 0)
        before = optimizer.state_dict()
        bad = optimizer.state_dict()
        bad["state"][3] = {**bad["state"][3], "exp_avg": torch.zeros(2)}
        few = {**before, "param_groups": [{**before["param_groups"][0], "params": [0, 1]}]}
        for state in (bad, few):
            with pytest.raises(ConfigError):
                optimizer.load_state_dict(state)
            for index, entry in optimizer.state_dict()["state"].items():
                assert all(torch.equal(entry[name], before["state"][index][name]) for name in entry)


def test_values_loaded_in_another_dtype_or_layout_are_the_same(tmp_path: Path) -> None:
    with GeminiDDP(
        seeded(lambda: Around(nn.Linear(32, 32))), mixed_precision="bf16", **tight(tmp_path)
    ) as model:
        other = seeded(lambda: Around(nn.Linear(32, 32)), 7).state_dict()
        strange = {
            key: value.double().t().contiguous().t() if value.dim() == 2 else value
            for key, value in other.items()
        }
        with torch.no_grad():
            next(model.parameters()).add_(1)  # a write that the load must make void
        model.load_state_dict(strange)
        assert_same_state(model.state_dict(), other)
        still = Recipe(adam={"lr": 0.0})
        managed_step(model, managed_optimizer(model, still), square_loss, still, 0)
        assert_same_state(model.state_dict(), other)


def test_keyword_arguments_of_state_dict_work_as_in_torch(tmp_path: Path) -> None:
    with GeminiDDP(seeded(lambda: Around(nn.BatchNorm1d(32))), **tight(tmp_path)) as model:
        state = model.state_dict(prefix="inner.")
        assert list(state) == [f"inner.{key}" for key in model.module.state_dict()]
        outer = nn.ModuleDict({"managed": model})
        assert {key.rsplit(".", 1)[-1] for key in outer.state_dict()} >= {"weight", "bias", "running_mean"}


class Outer(nn.Module):
    """A module of which one part may be managed."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.head = nn.Linear(32, 8)
        self.backbone = wrap(Around(nn.BatchNorm1d(32)))
        self.loads: list[str] = []
        part = getattr(self.backbone, "module", self.backbone)
        part.register_load_state_dict_pre_hook(lambda *_: self.loads.append("before"))
        part.register_load_state_dict_post_hook(lambda *_: self.loads.append("after"))


@BOTH
def test_a_larger_module_loads_what_it_returned_before_or_after_a_part_was_wrapped(
    precision: str | None, tmp_path: Path
) -> None:
    options = tight(tmp_path, 40 * KIB)
    with ExitStack() as stack:

        def wrap(part: nn.Module) -> nn.Module:
            return stack.enter_context(GeminiDDP(part, mixed_precision=precision, **options))

        plain, outer = seeded(lambda: Outer(lambda part: part), 7), seeded(lambda: Outer(wrap))
        want = {key: value.clone() for key, value in plain.state_dict().items()}
        assert outer.load_state_dict(want) == plain.load_state_dict(want)
        assert_same_state(outer.state_dict(), want)
        plain.load_state_dict(outer.state_dict())
        assert outer.loads == ["before", "after"]
        outer.load_state_dict(outer.state_dict())
        assert_same_state(outer.state_dict(), want)


def test_a_larger_module_names_what_is_missing_and_unexpected_as_it_was_unwrapped(tmp_path: Path) -> None:
    plain = seeded(lambda: Outer(lambda part: part), 7)
    state: dict[str, Any] = {**plain.state_dict(), "backbone.extra": torch.zeros(1)}
    del state["backbone.after.0.bias"], state["head.bias"]
    want = plain.load_state_dict(state, strict=False)
    outer = seeded(lambda: Outer(lambda part: GeminiDDP(part, **tight(tmp_path, 40 * KIB))))
    with outer.backbone:
        assert outer.load_state_dict(state, strict=False) == want
        with pytest.raises(RuntimeError, match=r"Missing.*backbone\.after\.0\.bias"):
            outer.load_state_dict(state)
        with pytest.raises(ConfigError, match="assign"):
            outer.load_state_dict(plain.state_dict(), assign=True)
        assert isinstance(outer.backbone.module, Around)
        assert list(outer.state_dict()) == list(plain.state_dict())
