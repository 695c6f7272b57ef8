"""``param.grad`` is what the user left there: given up, it cannot be used; assigned, it is that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import pairs
from torch import Tensor, nn
from training_harness import KIB, Recipe, managed_optimizer, managed_step, seeded, tight
from training_models import Around, square_loss

from gemini import ConfigError, GeminiDDP, GeminiOptimizer, StateError


def build() -> Around:
    """Return a model whose core weight is square."""
    return Around(nn.Linear(32, 32))


@pytest.fixture
def model(tmp_path: Path) -> Iterator[GeminiDDP]:
    """Yield a managed model, most of its chunks evicted."""
    with GeminiDDP(seeded(build), **tight(tmp_path, 40 * KIB)) as managed:
        yield managed


def _after_backward(model: GeminiDDP) -> tuple[nn.Parameter, Tensor]:
    square_loss(model, 0).backward()
    weight = model.module.core.weight
    return weight, weight.grad.clone()


GIVE_UP: dict[str, Callable[[GeminiDDP, GeminiOptimizer, nn.Parameter], Any]] = {
    "step": lambda m, o, p: o.step(),
    "zero_grad": lambda m, o, p: o.zero_grad(),
    "zero_grad of the model": lambda m, o, p: m.zero_grad(),
    "none": lambda m, o, p: setattr(p, "grad", None),
    "replaced": lambda m, o, p: setattr(p, "grad", torch.ones(32, 32)),
}
USES: dict[str, Callable[[Tensor, nn.Parameter], Any]] = {
    "read": lambda g, p: g.norm(),
    "write": lambda g, p: g.zero_(),
    "detach": lambda g, p: g.detach(),
    "view": lambda g, p: g.t(),
    "print": lambda g, p: repr(g),
    "with the parameter": lambda g, p: p + g,
    "after the parameter": lambda g, p: g + p,
    "inside a list": lambda g, p: torch.stack([p, g]),
    "assigned": lambda g, p: setattr(p, "grad", g),
}


@pairs(give_up=GIVE_UP, use=USES, next_backward=[False, True])
def test_a_gradient_kept_after_it_was_given_up_cannot_be_used(
    model: GeminiDDP, give_up: str, use: str, next_backward: bool
) -> None:
    weight, _ = _after_backward(model)
    kept, part = weight.grad, weight.grad[0]
    GIVE_UP[give_up](model, managed_optimizer(model), weight)
    if next_backward:
        square_loss(model, 1).backward()
    want = None if weight.grad is None else weight.grad.clone()
    for stale in (kept, part):
        with pytest.raises(StateError, match=r"clone\(\)"), torch.no_grad():
            USES["read" if stale is part and use == "assigned" else use](stale, weight)
    assert kept.shape == (32, 32)
    if want is None:
        assert weight.grad is None
        assert model.manager.tensors.state(weight._slot.grad.ref.tensors[0]).name == "FREE"
    else:
        assert torch.equal(weight.grad, want)
    model.manager.chunks.table.check_invariants()


@pytest.mark.parametrize("device_bytes", [None, 40 * KIB])
def test_a_gradient_kept_across_accumulation_sees_the_sum(device_bytes: int | None, tmp_path: Path) -> None:
    with GeminiDDP(seeded(build), **tight(tmp_path, device_bytes)) as model:
        weight, first = _after_backward(model)
        kept = weight.grad
        square_loss(model, 0).backward()
        assert torch.equal(kept, first + first)
        model.zero_grad(set_to_none=False)
        assert kept.count_nonzero().item() == 0


def test_a_gradient_kept_while_everything_is_resident_is_an_ordinary_tensor(tmp_path: Path) -> None:
    with GeminiDDP(seeded(build), **tight(tmp_path, None)) as model:
        optimizer = managed_optimizer(model)
        square_loss(model, 0).backward()
        in_chunk = model.module.core.weight.grad
        optimizer.step()
        for step in range(2):
            managed_step(model, optimizer, square_loss, Recipe(), step)
        assert model.manager.resident
        with pytest.raises(StateError, match=r"clone\(\)"):
            model.module.core.weight + in_chunk
        weight, want = _after_backward(model)
        kept = weight.grad
        optimizer.step()
        square_loss(model, 1).backward()
        assert torch.equal(kept, want)


def test_autograd_refuses_a_gradient_that_was_given_up_since_it_was_saved(model: GeminiDDP) -> None:
    weight, _ = _after_backward(model)
    penalty = (weight * weight.grad).sum()
    weight.grad = None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()


def test_a_saved_gradient_does_not_mind_those_of_other_parameters(tmp_path: Path) -> None:
    with GeminiDDP(seeded(build), **tight(tmp_path, 160 * KIB, min_chunk_size_mb=16 * KIB / 2**20)) as model:
        weight, want = _after_backward(model)
        others = [p for p in model.parameters() if p is not weight]
        (x,) = [p for p in others if p._slot.group is weight._slot.group][:1]
        probe = torch.ones(32, 32, requires_grad=True)
        loss = (probe * weight.grad).sum()
        x.sum().backward()
        loss.backward()
        assert torch.equal(probe.grad, want)


ASSIGNED: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda g: g.t(),
    "one row for all": lambda g: g[0].expand(32, 32),
    "one column for all": lambda g: g[:, :1].expand(32, 32),
    "flipped": lambda g: g.flip(0),
    "itself": lambda g: g,
    "detached": lambda g: g.detach(),
    "transposed twice": lambda g: g.t().t(),
}


@pytest.mark.parametrize("device_bytes", [None, 40 * KIB])
@pytest.mark.parametrize("name", ASSIGNED)
def test_an_assigned_gradient_is_what_was_assigned(
    name: str, device_bytes: int | None, tmp_path: Path
) -> None:
    with GeminiDDP(seeded(build), **tight(tmp_path, device_bytes)) as model:
        for step in range(3):
            managed_step(model, managed_optimizer(model), square_loss, Recipe(), step)
        assert model.manager.resident == (device_bytes is None)
        weight, grad = _after_backward(model)
        weight.grad = ASSIGNED[name](weight.grad)
        assert torch.equal(weight.grad, ASSIGNED[name](grad))


def test_a_gradient_may_be_assigned_under_fp16(tmp_path: Path) -> None:
    with GeminiDDP(seeded(build), mixed_precision="fp16", **tight(tmp_path, 40 * KIB)) as model:
        weight = model.module.core.weight
        for value in (2.0, 3.0):
            weight.grad = torch.full((32, 32), value, dtype=torch.float16)
            assert torch.equal(weight.grad, torch.full((32, 32), value, dtype=torch.float16))
        weight.grad = weight.grad * 2
        assert weight.grad.unique().tolist() == [6.0]
        with pytest.raises(ConfigError, match="unscaled loss"):
            square_loss(model, 0).backward()


REFUSED: dict[str, Callable[[], Tensor]] = {
    "another shape": lambda: torch.zeros(3),
    "another dtype": lambda: torch.zeros(32, 32, dtype=torch.float64),
    "sparse": lambda: torch.eye(32).to_sparse(),
    "another device": lambda: torch.zeros(32, 32, device="meta"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_assignment_keeps_the_gradient(model: GeminiDDP, name: str) -> None:
    weight, want = _after_backward(model)
    with pytest.raises(ConfigError):
        weight.grad = REFUSED[name]()
    assert torch.equal(weight.grad, want)


def test_a_gradient_that_a_backward_node_read_last_can_be_given_up(model: GeminiDDP) -> None:
    weight, _ = _after_backward(model)
    probe = torch.ones(32, 32, requires_grad=True)
    (probe * weight.grad).sum().backward()
    weight.grad = None
    assert weight.grad is None
    square_loss(model, 1).backward()
    want = seeded(build)
    square_loss(want, 1).backward()
    assert torch.equal(weight.grad, want.core.weight.grad)


def test_a_gradient_in_use_stays_when_it_cannot_be_given_up(model: GeminiDDP) -> None:
    weight, want = _after_backward(model)
    with model.manager.operator(weight._slot.grad.tensors), pytest.raises(StateError):
        weight.grad = None
    assert torch.equal(weight.grad, want)
