"""A managed parameter answers like a parameter, wherever its chunk is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from training_harness import (
    KIB,
    Recipe,
    assert_same_state,
    assert_within_budgets,
    managed_optimizer,
    seeded,
    tight,
    train_managed,
    train_plain,
)
from training_models import Around, square_loss

from gemini import ConfigError, CPUAdam, GeminiAdamOptimizer, GeminiDDP, OutOfBudgetError


def build() -> Around:
    """Return a model with a core weight that is not square."""
    return Around(nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 32)))


@pytest.fixture(params=[None, "bf16"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Around, GeminiDDP]]:
    """Yield a plain model and the same one managed, most of its chunks evicted."""
    plain = seeded(build)
    if request.param == "bf16":
        plain.to(torch.bfloat16)
    with GeminiDDP(seeded(build), mixed_precision=request.param, **tight(tmp_path, 40 * KIB)) as model:
        yield plain, model


def evicted(model: GeminiDDP) -> nn.Parameter:
    """Return the first weight of the core after other chunks pushed it out."""
    for param in model.module.after.parameters():
        param.norm()
    if not model.storage.trains:
        GeminiAdamOptimizer(model)  # for its states, which push others out
    for group in model.storage.groups:
        for piece in group.pieces:
            with model.manager.operator(tuple(piece.tensors.values())):
                pass
    param = model.module.core[0].weight
    tier = model.manager.chunks.table.valid_tiers(param._slot.group.param.id)
    assert [t.name for t in tier] == ["DISK"]
    return param


READS: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda p: p.norm().item(),
    "data": lambda p: p.data.sum().item(),
    "detach": lambda p: p.detach().abs().max().item(),
    "clone": lambda p: p.clone().tolist(),
    "tolist": lambda p: p.tolist(),
    "item": lambda p: p[3, 4].item(),
    "float": lambda p: float(p[0, 1]),
    "index": lambda p: p[2:5, ::3].float().sum().item(),
    "mask": lambda p: p[p > 0].tolist(),
    "iterate": lambda p: [row.norm().item() for row in p],
    "compare": lambda p: (p == p).all().item() and torch.equal(p, p.clone()),
    "unbind": lambda p: [row.tolist() for row in p.unbind(1)],
    "arithmetic": lambda p: (
        (2 * p + p / 3 - p @ p.t()[:, :1]).tolist() if p.shape[0] == p.shape[1] else (2 * p).tolist()
    ),
    "numpy": lambda p: p.detach().float().numpy().copy().tolist(),
    "asarray": lambda p: np.asarray(p.detach().float()).sum().item(),
    "cast": lambda p: p.to(torch.float64).sum().item(),
    "shape": lambda p: (
        p.shape,
        p.stride(),
        p.dtype,
        p.numel(),
        len(p),
        p.is_leaf,
        p.requires_grad,
        p.grad,
        p.dim(),
    ),
    "strings": lambda p: str(p.detach().float()[:2].clone()),
    "inference": lambda p: _in_inference_mode(p),
    "late view": lambda p: p.t().view(-1)[5].item() if p.t().is_contiguous() else p.view(-1)[5].item(),
    "deepcopy": lambda p: copy.deepcopy(p).tolist(),
}


def _in_inference_mode(p: Tensor) -> list[float]:
    with torch.inference_mode():
        return [p.norm().item(), p.detach().sum().item(), p[0].sum().item()]


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("read", READS)
def test_reading_an_evicted_parameter_fetches_it(pair: tuple[Around, GeminiDDP], read: str) -> None:
    plain, model = pair
    assert READS[read](evicted(model)) == READS[read](plain.core[0].weight)
    assert_within_budgets(model.stats())


def test_printing_an_evicted_parameter_shows_its_values(pair: tuple[Around, GeminiDDP]) -> None:
    plain, model = pair
    digits = repr(plain.core[0].weight.data)[len("tensor([[") : 60]
    assert digits in repr(evicted(model))
    assert digits in str(evicted(model))
    assert digits in f"{evicted(model)}"


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda p: p.add_(1),
    "augmented": lambda p: p.__iadd__(1),
    "through data": lambda p: p.data.mul_(2),
    "through detach": lambda p: p.detach().sub_(0.5),
    "set data": lambda p: setattr(p, "data", torch.ones_like(p)),
    "copy_": lambda p: p.copy_(torch.arange(p.numel()).view_as(p)),
    "set item": lambda p: p.__setitem__((slice(1, 3), 2), 7.0),
    "row": lambda p: p[4].fill_(3.0),
    "out argument": lambda p: torch.mul(p.clone(), 2, out=p),
    "init": lambda p: nn.init.orthogonal_(p) if p.dtype == torch.float32 else nn.init.ones_(p),
    "init normal": lambda p: nn.init.normal_(p, generator=torch.Generator().manual_seed(3)),
    "numpy-like foreach": lambda p: torch._foreach_add_([p], 1.0),
}


@pytest.mark.parametrize("write", WRITES)
def test_writing_to_an_evicted_parameter_persists(pair: tuple[Around, GeminiDDP], write: str) -> None:
    plain, model = pair
    with torch.no_grad():
        torch.manual_seed(5)
        WRITES[write](plain.core[0].weight)
        torch.manual_seed(5)
        WRITES[write](evicted(model))
    assert torch.equal(evicted(model), plain.core[0].weight)
    assert torch.equal(model.state_dict()["core.0.weight"], plain.core[0].weight.float())


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("write", ["add_", "through data", "set data", "init normal"])
def test_training_goes_on_from_what_the_user_wrote(precision: str | None, write: str, tmp_path: Path) -> None:
    def edited() -> Around:
        module = seeded(build)
        with torch.no_grad():
            module.core[0].weight.copy_(module.core[0].weight.to(torch.bfloat16))
            weight = module.core[0].weight
            written = weight.to(torch.bfloat16) if precision else weight  # random numbers depend on the type
            WRITES[write](written)
            weight.copy_(written)
        return module

    def exact_start() -> Around:
        module = seeded(build)
        with torch.no_grad():
            module.core[0].weight.copy_(module.core[0].weight.to(torch.bfloat16))
        return module

    recipe = Recipe(steps=3, precision=precision)
    want = train_plain(edited(), square_loss, recipe)
    model = GeminiDDP(exact_start(), mixed_precision=precision, **tight(tmp_path, 40 * KIB))
    with torch.no_grad():
        WRITES[write](evicted(model))
    got = train_managed(model, square_loss, recipe)
    assert got.losses == want.losses
    assert_same_state(got.state, want.state)


def test_moving_the_model_to_where_it_is_changes_nothing(pair: tuple[Around, GeminiDDP]) -> None:
    _, model = pair
    before = {key: value.clone() for key, value in model.state_dict().items()}
    addresses = [param.data_ptr() for param in model.parameters()]
    model.to("cpu").train().eval().train()
    model.module.cpu().to(next(model.parameters()).dtype)
    optimizer = managed_optimizer(model)
    optimizer.step()
    assert_same_state(model.state_dict(), before)
    assert [param.data_ptr() for param in model.parameters()] == addresses


REFUSED: dict[str, Callable[[GeminiDDP], Any]] = {
    "double": lambda m: m.double(),
    "double inside": lambda m: m.module.double(),
    "half": lambda m: m.half(),
    "meta": lambda m: m.to("meta"),
    "data of another shape": lambda m: setattr(next(m.parameters()), "data", torch.zeros(3)),
    "data of another dtype": lambda m: setattr(
        next(m.parameters()), "data", torch.zeros(32, 32, dtype=torch.float64)
    ),
    "resize_": lambda m: next(m.parameters()).data.resize_(2, 2),
    "share memory": lambda m: m.share_memory(),
    "gradient of another shape": lambda m: setattr(next(m.parameters()), "grad", torch.zeros(1)),
    "gradient of a view": lambda m: setattr(next(m.parameters()).data, "grad", torch.zeros(32, 32)),
    "deepcopy": lambda m: copy.deepcopy(m),
    "load and assign": lambda m: m.load_state_dict(m.state_dict(), assign=True),
    "wrap again": lambda m: GeminiDDP(m.module),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_take_a_parameter_off_its_chunk_is_refused(
    pair: tuple[Around, GeminiDDP], name: str
) -> None:
    _, model = pair
    before = {key: value.clone() for key, value in model.state_dict().items()}
    addresses = [param.data_ptr() for param in model.parameters()]
    with pytest.raises(ConfigError):
        REFUSED[name](model)
    assert_same_state(model.state_dict(), before)
    assert [param.data_ptr() for param in model.parameters()] == addresses
    managed_optimizer(model).step()


def _after_backward(tmp_path: Path, device_bytes: int = 40 * KIB) -> tuple[Around, GeminiDDP]:
    plain, model = seeded(build), GeminiDDP(seeded(build), **tight(tmp_path, device_bytes))
    square_loss(plain, 0).backward()
    model.backward(square_loss(model, 0))
    return plain, model


def test_gradients_can_be_read_after_backward(tmp_path: Path) -> None:
    plain, model = _after_backward(tmp_path)
    with model:
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(q.grad, p.grad)
            assert q.grad.norm().item() == p.grad.norm().item()
            assert q.grad.shape == p.grad.shape


GRADIENT_EDITS: dict[str, Callable[[nn.Parameter], Any]] = {
    "none": lambda p: setattr(p, "grad", None),
    "replaced": lambda p: setattr(p, "grad", p.grad * 2),
    "in place": lambda p: p.grad.mul_(3),
    "augmented": lambda p: setattr(p, "grad", p.grad.__iadd__(1)),
    "zeroed": lambda p: p.grad.zero_(),
    "given": lambda p: setattr(p, "grad", torch.ones_like(p)),
}


@pytest.mark.parametrize("edit", GRADIENT_EDITS)
def test_the_update_uses_the_gradients_the_user_left(edit: str, tmp_path: Path) -> None:
    plain, model = _after_backward(tmp_path)
    with model, torch.no_grad():
        optimizer, reference = managed_optimizer(model), CPUAdam(plain.parameters(), **Recipe().adam)
        for module in (plain, model):
            for param in module.parameters():
                GRADIENT_EDITS[edit](param)
        optimizer.step()
        reference.step()
        assert_same_state(model.state_dict(), plain.state_dict())
        assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("how", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_torchs_own_clipping_works_under_a_tight_budget(how: Callable[..., Any], tmp_path: Path) -> None:
    plain, model = _after_backward(tmp_path)
    with model:
        assert how(list(plain.parameters()), 0.01) == how(list(model.parameters()), 0.01)
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(q.grad, p.grad)
        assert_within_budgets(model.stats())


def test_clipping_all_gradients_in_one_operator_that_cannot_fit_says_so(tmp_path: Path) -> None:
    _, model = _after_backward(tmp_path, device_bytes=20 * KIB)
    with model:
        with pytest.raises(
            OutOfBudgetError, match=r"needs [0-9.]+ KiB on DEVICE at once but the budget is 20.0 KiB"
        ):
            nn.utils.clip_grad_norm_(list(model.parameters()), 0.01, foreach=True)
        assert_within_budgets(model.stats())
        managed_optimizer(model).step()
        model.manager.chunks.table.check_invariants()


def test_autograd_grad_returns_gradients_and_keeps_none(tmp_path: Path) -> None:
    plain = seeded(build)
    want = torch.autograd.grad(square_loss(plain, 0), list(plain.parameters()))
    with GeminiDDP(seeded(build), **tight(tmp_path, 20 * KIB)) as model:
        got = torch.autograd.grad(square_loss(model, 0), list(model.parameters()))
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
        assert all(param.grad is None for param in model.parameters())
        assert_within_budgets(model.stats())


def test_autograd_grad_of_an_unused_parameter_is_none_or_zero(tmp_path: Path) -> None:
    with GeminiDDP(seeded(build), **tight(tmp_path, 20 * KIB)) as model:
        unused = model.module.core[0].weight
        loss = model.module.before.weight.square().sum()
        assert torch.autograd.grad(loss, [unused], allow_unused=True, retain_graph=True) == (None,)
        (zero,) = torch.autograd.grad(loss, unused, materialize_grads=True)
        assert torch.equal(zero, torch.zeros(16, 32))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("exact", [True, False])
def test_frozen_parameters_that_lose_bits_for_good_are_named(
    when: str, exact: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Frozen before wrapping there is no master: what 16 bits do not hold is nowhere any more."""
    module = nn.Linear(3, 3)
    nn.init.constant_(module.weight, 0.5 if exact else 0.1)
    module.weight.requires_grad_(when == "after")
    want = module.weight.detach().clone()
    with GeminiDDP(module, mixed_precision="fp16") as model:
        model.module.weight.requires_grad_(False)
        kept = torch.equal(model.state_dict()["weight"].float(), want)
    assert kept == (exact or when == "after")
    assert ("1 frozen parameters (first 'weight')" in caplog.text) == (not kept)
