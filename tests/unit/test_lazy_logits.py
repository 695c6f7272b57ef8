"""Lazy logits are logits: a loss of them is tiled, anything else sees their values."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gemini.errors import StateError
from gemini.losses.lazy_logits import HeadCall, LazyLogits

ENTRIES = 11
Use = Callable[[Tensor, Tensor], Tensor]


class Head:
    """Operands of a head; ``read``: the bytes of logits that were computed."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        draw = torch.Generator().manual_seed(0)
        shapes = ((3, 6, 8), (ENTRIES, 8), (ENTRIES,))
        self.operands = [torch.randn(s, generator=draw).to(dtype).requires_grad_() for s in shapes]
        self.labels = torch.randint(ENTRIES, (3, 6), generator=draw)
        self.read: list[int] = []
        self.step = 0

    def lazy(self) -> LazyLogits:
        hidden, weight, bias = self.operands
        return LazyLogits(HeadCall.of((hidden, weight, bias), lambda: self.step, self.read.append))

    def whole(self) -> Tensor:
        return functional.linear(*self.operands)

    def gradients(self, logits: Tensor, use: Use) -> list[Tensor]:
        return list(torch.autograd.grad(use(logits, self.labels), self.operands))


def of_transformers(logits: Tensor, labels: Tensor) -> Tensor:
    labels = functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    logits = logits.float().view(-1, ENTRIES)
    return functional.cross_entropy(logits, labels.view(-1).to(logits.device), reduction="sum") / 7


def of_older_models(logits: Tensor, labels: Tensor) -> Tensor:
    shifted = logits[..., :-1, :].contiguous()
    return torch.nn.CrossEntropyLoss()(shifted.view(-1, shifted.size(-1)), labels[..., 1:].reshape(-1))


TILED: dict[str, Use] = {
    "of transformers": of_transformers,
    "of older models": of_older_models,
    "capped": lambda z, y: of_transformers(torch.tanh(z / 2.0) * 2.0, y),
    "scaled": lambda z, y: of_transformers(0.25 * z, y),
    "divided": lambda z, y: functional.cross_entropy(
        z.div(4).flatten(0, 1), y.flatten(), label_smoothing=0.1
    ),
    "with another bias": lambda z, y: of_transformers(
        z + torch.linspace(-1, 1, ENTRIES).to(z.dtype)[None], y
    ),
    "by a mask": lambda z, y: functional.cross_entropy(z[y > 3], y[y > 3]),
    "of one row": lambda z, y: functional.cross_entropy(z[0, 2:5].reshape(3, -1), y[0, 2:5]),
    "of double type": lambda z, y: functional.cross_entropy(z.double()[1], y[1]),
}
WHOLE: dict[str, Use] = {
    "weighted": lambda z, y: functional.cross_entropy(z.view(-1, ENTRIES), y.view(-1), torch.ones(ENTRIES)),
    "each row": lambda z, y: (
        functional.cross_entropy(z.view(-1, ENTRIES), y.view(-1), reduction="none").square().mean()
    ),
    "other order": lambda z, y: functional.cross_entropy(z.transpose(1, 2), y),
    "with probabilities": lambda z, y: functional.cross_entropy(
        z[0], functional.one_hot(y[0], ENTRIES).float()
    ),
    "log_softmax": lambda z, y: -z.log_softmax(-1).gather(-1, y[..., None]).mean(),
    "some entries": lambda z, y: functional.cross_entropy(z[0, :, 2:], y[0].clamp(max=8)),
    "with a bias of each row": lambda z, y: of_transformers(z + torch.ones(6, 1), y),
    "a tensor as scale": lambda z, y: of_transformers(z * torch.tensor(0.5), y),
    "capped twice": lambda z, y: of_transformers(z.tanh().tanh(), y),
    "written": lambda z, y: of_transformers(z.index_fill_(-1, torch.tensor([10]), -9.0), y),
    "mixed rows": lambda z, y: z.reshape(-1, 2 * ENTRIES).sin().sum(),
}


@pytest.mark.parametrize("use", TILED.values(), ids=TILED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_needs_no_logits(use: Use, dtype: torch.dtype) -> None:
    head = Head(dtype)
    got, want = head.gradients(head.lazy(), use), head.gradients(head.whole(), use)
    assert head.read == []
    near = 1e-6 if dtype is torch.float32 else 0.02
    for one, other in zip(got, want, strict=True):
        assert one.dtype is dtype
        assert ((one - other).float().norm() / other.float().norm()).item() < near


@pytest.mark.parametrize("use", WHOLE.values(), ids=WHOLE)
def test_what_tiles_cannot_do_is_done_with_all_logits(use: Use) -> None:
    head = Head()
    got, want = head.gradients(head.lazy(), use), head.gradients(head.whole(), use)
    assert len(head.read) >= 1
    assert all(torch.allclose(one, other, rtol=1e-5, atol=1e-7) for one, other in zip(got, want, strict=True))


def test_shape_and_type_are_known_without_values() -> None:
    head = Head()
    lazy, whole = head.lazy(), head.whole()
    for name in ("shape", "dtype", "device", "requires_grad", "ndim", "is_cuda"):
        assert getattr(lazy, name) == getattr(whole, name)
    assert (lazy.size(-1), lazy.numel(), len(lazy)) == (whole.size(-1), whole.numel(), len(whole))
    assert head.read == []


def test_values_are_those_of_the_head_however_they_are_read() -> None:
    head = Head()
    want = head.whole().detach()
    with torch.no_grad():
        for got in (
            head.lazy() + 0,
            torch.tensor(head.lazy().tolist()),
            torch.from_numpy(head.lazy().numpy()),
        ):
            assert torch.equal(got, want)
        assert torch.equal(copy.deepcopy(head.lazy()), want)
        assert torch.equal(pickle.loads(pickle.dumps(head.lazy())), want)
        assert repr(head.lazy()) == repr(want)


def test_a_look_without_gradients_leaves_a_loss_its_own() -> None:
    head = Head()
    logits, want = head.lazy(), head.gradients(head.whole(), of_transformers)
    with torch.no_grad():
        logits.argmax(-1)
    got = head.gradients(logits, of_transformers)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_autocast_is_that_of_the_forward_pass() -> None:
    head = Head()
    with torch.autocast("cpu", torch.bfloat16):
        lazy, want = head.lazy(), head.whole()
    assert lazy.dtype is torch.bfloat16
    assert torch.equal(lazy.clone(), want)
    got = head.gradients(lazy.clone(), of_transformers)
    assert all(each.dtype is torch.float32 for each in got)


@pytest.mark.parametrize("change", ["step", "weight", "hidden"])
def test_logits_of_changed_weights_are_refused(change: str) -> None:
    head = Head()
    weight = head.operands[1]
    logits = LazyLogits(
        HeadCall.of((head.operands[0], weight, None), lambda: (head.step, weight._version), head.read.append)
    )
    with torch.no_grad():
        if change == "step":
            head.step += 1
        else:
            head.operands[1 if change == "weight" else 0].add_(1)
    for use in (lambda: logits.sum(), lambda: of_transformers(logits, head.labels)):
        with pytest.raises(StateError, match="read them before optimizer"):
            use()


def test_a_gradient_that_would_be_lost_is_refused() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, value: Tensor) -> Tensor:
            return value * 2

        @staticmethod
        def backward(_ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2

    head = Head()
    with pytest.raises(StateError, match=r"logits\.clone"):
        Twice.apply(head.lazy()).sum().backward()  # type: ignore[no-untyped-call]
    Twice.apply(head.lazy().clone()).sum().backward()  # type: ignore[no-untyped-call]
    assert head.operands[1].grad is not None
