"""Frozen quantized weights lie in chunks, and nothing of what a model computes shows it."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import quantized_models
import torch
from quantized_models import BITSANDBYTES, KINDS, VOCABULARY, build, loss_of, needs, train, trained
from torch import Tensor, nn

import gemini
from gemini import checkpoint
from gemini.errors import CheckpointError, ConfigError

KIB = 1024
IDS = torch.arange(10)[None]

every_kind = pytest.mark.parametrize("kind", KINDS)


def tight(**options: Any) -> dict[str, Any]:
    """Return a DEVICE that holds less than half of the model."""
    return {"device_bytes": 160 * KIB, "non_model_bytes": 0, "min_chunk_size_mb": 16 * KIB / 2**20, **options}


def managed(model: nn.Module, **options: Any) -> Any:
    gemini.manage(model, **tight(**options))
    return gemini.handle_of(model)


@pytest.fixture(params=["resident", "tight", "disk"])
def budget(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """A model that stays on DEVICE, one on HOST for the most part, one on DISK."""
    return {
        "resident": {"device_bytes": "64MiB"},
        "tight": {"host_bytes": "8MiB"},
        "disk": {"host_bytes": 0, "disk_dir": tmp_path},
    }[request.param]


@every_kind
def test_budgets_change_no_bit_of_losses_adapters_and_logits(kind: str, budget: dict[str, Any]) -> None:
    plain, model = build(kind), build(kind)
    want = train(plain, torch.optim.AdamW(trained(plain), lr=1e-2))
    handle = managed(model, **budget)
    got = train(model, torch.optim.AdamW(trained(model), lr=1e-2))
    assert got == want
    assert all(torch.equal(a, b) for a, b in zip(trained(model), trained(plain), strict=True))
    assert torch.equal(model.eval()(IDS), plain.eval()(IDS))
    stats = handle.stats()
    moved = sum(stats[link]["bytes"] for link in ("h2d", "disk_read"))
    assert moved > 0 or "64MiB" in budget.values()


@every_kind
def test_quantized_weights_count_in_the_budget_and_lie_nowhere_else(kind: str) -> None:
    model = build(kind)
    names = [name for name, _ in model.named_parameters() if name.endswith("base.weight")]
    handle = managed(model, host_bytes="8MiB")
    slots = [handle.storage.slots[name] for name in names]
    assert all(slot.param_view.dtype is torch.uint8 and slot.form is not None for slot in slots)
    assert handle.stats()["device"]["peak_bytes"] <= 160 * KIB
    held = sum(slot.param_view.numel() for slot in slots)
    assert held > 4 * 64 * 64 * 3 * (1 if kind.endswith("4bit") else 2)


@every_kind
def test_state_dict_is_that_of_the_unmanaged_model(kind: str) -> None:
    plain, model = build(kind), build(kind)
    want, got = plain.state_dict(), managed(model, host_bytes="8MiB").state_dict()
    assert list(got) == list(want)
    assert all(type(got[name]) is type(value) for name, value in want.items())
    same = [torch.equal(_values(got[name]), _values(value)) for name, value in want.items()]
    assert all(same)


def _values(tensor: Tensor) -> Tensor:
    """Return plain values of what may be a wrapper."""
    if hasattr(tensor, "get_original_weight"):
        return tensor.get_original_weight()
    return tensor.dequantize() if hasattr(tensor, "__tensor_flatten__") else tensor


@pytest.mark.parametrize("kind", ["torchao-4bit", "torchao-8bit", "bitsandbytes-8bit"])
def test_load_state_dict_takes_other_quantized_values(kind: str) -> None:
    model, other = build(kind), build(kind, seed=1)
    want = other(IDS)
    managed(model, host_bytes="8MiB")
    model.load_state_dict(other.state_dict())
    assert torch.equal(model(IDS), want)


def test_load_state_dict_refuses_values_quantized_otherwise() -> None:
    model = build("torchao-8bit")
    managed(model, host_bytes="8MiB")
    want = model(IDS)
    state = model.state_dict()
    state["blocks.0.widen.base.weight"] = torch.zeros(256, 64)
    with pytest.raises(ConfigError, match="quantized in the same way"):
        model.load_state_dict(state)
    model.load_state_dict(build("torchao-8bit").state_dict())
    assert torch.equal(model(IDS), want)


@every_kind
def test_resuming_from_a_checkpoint_changes_no_bit(kind: str, tmp_path: Path) -> None:
    model = build(kind)
    handle = managed(model, host_bytes="8MiB")
    optimizer = gemini.GeminiAdamOptimizer(model, lr=1e-2)
    train(model, optimizer, range(2))
    checkpoint.save(tmp_path, handle, optimizer)
    want = train(model, optimizer, range(2, 4))

    other = build(kind, seed=1)
    handle = managed(other, host_bytes="8MiB")
    resumed = gemini.GeminiAdamOptimizer(other, lr=1e-2)
    checkpoint.load(tmp_path, handle, resumed)
    assert train(other, resumed, range(2, 4)) == want


def test_a_checkpoint_of_another_quantization_is_refused(tmp_path: Path) -> None:
    model, other = build("torchao-8bit"), build("torchao-4bit")
    saved = gemini.GeminiAdamOptimizer(model, lr=1e-2) if managed(model, host_bytes="8MiB") else None
    checkpoint.save(tmp_path, gemini.handle_of(model), saved)
    handle = managed(other, host_bytes="8MiB")
    want = other(IDS)
    with pytest.raises(CheckpointError, match="Int8Tensor"):
        checkpoint.load(tmp_path, handle, gemini.GeminiAdamOptimizer(other, lr=1e-2))
    assert torch.equal(other(IDS), want)


@every_kind
def test_released_and_copied_models_are_ordinary_quantized_ones(kind: str) -> None:
    plain, model = build(kind), build(kind)
    want, weight = plain(IDS), model.blocks[0].widen.base.weight
    handle = managed(model, host_bytes="8MiB")
    assert torch.equal(model(IDS), want)
    copied = copy.deepcopy(model)
    assert torch.equal(copied(IDS), want)
    handle.release()
    kinds = {type(each.blocks[0].widen.base.weight) for each in (plain, model, copied)}
    assert len(kinds) == 1
    assert model.blocks[0].widen.base.weight is weight
    assert torch.equal(model(IDS), want)


@every_kind
def test_a_managed_weight_passes_for_the_class_that_it_was(kind: str) -> None:
    plain, model = build(kind), build(kind)
    managed(model, host_bytes="8MiB")
    got, want = model.blocks[1].narrow.base.weight, plain.blocks[1].narrow.base.weight
    assert isinstance(got, type(want))
    assert isinstance(got, nn.Parameter)
    assert type(got).__name__ == type(want).__name__
    assert (got.shape, got.dtype, got.requires_grad) == (want.shape, want.dtype, False)
    assert torch.equal(model.cpu()(IDS), plain(IDS))


@every_kind
@pytest.mark.parametrize("options", [{"activation_offload": True}, {"mixed_precision": "bf16"}])
def test_options_change_no_bit_beside_the_same_options_on_device(kind: str, options: dict[str, Any]) -> None:
    losses = []
    for budget in ({"device_bytes": "64MiB"}, {"device_bytes": 400 * KIB}):
        model = build(kind)
        managed(model, host_bytes="8MiB", **options, **budget)
        losses.append(train(model, gemini.GeminiAdamOptimizer(model, lr=1e-2)))
    assert losses[0] == losses[1]


@every_kind
def test_layers_that_come_later_are_adopted(kind: str) -> None:
    plain, model, late = build(kind), build(kind), build(kind).blocks[2]
    kept = model.blocks[:2]
    model.blocks = kept
    handle = managed(model, host_bytes="8MiB")
    model.blocks.append(late)
    handle.adopt()
    assert handle.storage.slots["blocks.2.widen.base.weight"].form is not None
    assert torch.equal(model(IDS), plain(IDS))


@pytest.mark.parametrize("kind", ["bitsandbytes-4bit", "bitsandbytes-8bit"])
def test_a_weight_moved_to_where_it_is_stays_itself(kind: str) -> None:
    model = build(kind)
    managed(model, host_bytes="8MiB")
    weight = model.blocks[0].widen.base.weight
    assert weight.to("cpu") is weight


@pytest.mark.parametrize("offload", [False, True])
def test_a_function_that_saves_a_managed_wrapper_has_its_values_in_backward(offload: bool) -> None:
    linear_nf4 = needs(quantized_models.NF4).linear_nf4  # as torchtune calls it
    grads = []
    for manages in (False, True):
        model = build("torchao-4bit")
        if manages:
            managed(model, host_bytes="8MiB", activation_offload=offload)
        for name, module in model.named_modules():
            if name.endswith(".base"):
                module.forward = partial(_called, linear_nf4, module)
        loss_of(model, 0).backward()
        grads.append([param.grad.clone() for param in trained(model)])
    assert all(map(torch.equal, *grads))


def _called(function: Any, layer: nn.Linear, x: Tensor) -> Tensor:
    out = function(x, layer.weight)
    return out if layer.bias is None else out + layer.bias


def test_a_trainable_quantized_weight_is_refused_by_name() -> None:
    model = build("torchao-8bit")
    model.blocks[1].narrow.base.weight.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"blocks\.1\.narrow\.base\.weight.*Int8Tensor.*trains"):
        managed(model)
    assert loss_of(model, 0).isfinite()


@every_kind
def test_unfreezing_a_managed_quantized_weight_is_refused_by_name(kind: str) -> None:
    model = build(kind)
    managed(model, host_bytes="8MiB")
    want = model(IDS)
    with pytest.raises(ConfigError, match=r"blocks\.0\.widen\.base\.weight.*stay frozen"):
        model.blocks[0].widen.base.weight.requires_grad_(True)
    assert torch.equal(model(IDS), want)


def test_a_weight_that_is_not_quantized_yet_is_refused_by_name() -> None:
    bnb = needs(BITSANDBYTES)
    model = nn.Sequential(bnb.nn.Linear4bit(64, 64))
    with pytest.raises(ConfigError, match=r"0\.weight.*Params4bit.*not quantized yet"):
        managed(model)


class Coded(nn.Parameter):
    """A class over memory of its own that nobody knows."""


def test_an_unknown_class_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Embedding(VOCABULARY, 8))
    model[0].weight = torch.Tensor._make_subclass(Coded, torch.zeros(VOCABULARY, 8), False)
    with pytest.raises(ConfigError, match=r"0\.weight.*Coded.*frozen quantized weight"):
        managed(model)


class Boxed(Tensor):
    """A wrapper that nobody has seen: of two halves."""

    @staticmethod
    def __new__(cls, left: Tensor, right: Tensor) -> Boxed:
        shape = (left.shape[0], left.shape[1] + right.shape[1])
        made: Boxed = Tensor._make_wrapper_subclass(cls, shape, dtype=left.dtype, device=left.device)
        made.left, made.right = left, right
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["left", "right"], None

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], _context: None, _size: Any, _stride: Any
    ) -> Boxed:
        return cls(inner["left"], inner["right"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def opened(value: Any) -> Any:
            return torch.cat([value.left, value.right], 1) if isinstance(value, Boxed) else value

        if func is torch.ops.aten.detach.default:
            return cls(args[0].left.detach(), args[0].right.detach())
        if func is torch.ops.aten.t.default:
            return opened(args[0]).t()
        return func(*map(opened, args), **(kwargs or {}))


def test_any_wrapper_of_plain_tensors_is_held() -> None:
    def build_boxed() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
        for layer in model:
            halves = layer.weight.detach()[:, :24].clone(), layer.weight.detach()[:, 24:].clone()
            layer.weight = nn.Parameter(Boxed(*halves), requires_grad=False)
        return model

    plain, model, x = build_boxed(), build_boxed(), torch.randn(3, 64)
    handle = managed(model, device_bytes=96 * KIB, host_bytes="8MiB")
    for each in (plain, model):
        each(x).square().sum().backward()
    grads = [[layer.bias.grad.clone() for layer in each] for each in (plain, model)]
    assert all(map(torch.equal, *grads))
    assert handle.stats()["h2d"]["bytes"] > 0


def test_an_inner_tensor_that_no_chunk_holds_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    weight = nn.Parameter(Boxed(torch.zeros(64, 24), torch.zeros(64, 40, device="meta")), requires_grad=False)
    model[0].weight = weight
    with pytest.raises(ConfigError, match=r"0\.weight.*Boxed.*'right' is on 'meta'"):
        managed(model)
