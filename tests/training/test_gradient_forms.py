"""A gradient in any form that autograd can deliver: the update has the bits of plain training.

The last test runs the others where freed memory is written over: what reads a copy that is gone gets other
bits.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import pairs
from torch import Tensor, nn

from gemini import CPUAdam, GeminiDDP, GeminiOptimizer, Lamb, Lion

STEPS = 3
POISONED = "GEMINI_TESTS_POISONED"
# glibc writes over all memory that is freed, once none of it is kept for the next request.
POISON = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.perturb=165", POISONED: "1"}

Form = Callable[[Tensor], Tensor]


def ordinary(grad: Tensor) -> Tensor:
    return grad


def permuted(grad: Tensor) -> Tensor:
    return grad.mT.contiguous().mT


def unit_strides(grad: Tensor) -> Tensor:
    """Other strides in dimensions of size 1, which no element depends on."""
    strides = [7 if size == 1 else stride for size, stride in zip(grad.shape, grad.stride(), strict=True)]
    return grad.as_strided(grad.shape, strides)


def expanded(grad: Tensor) -> Tensor:
    return grad.flatten()[:1].view([1] * grad.dim()).expand(grad.shape)


def narrow(grad: Tensor) -> Tensor:
    return torch.stack([grad, grad * 9.0], -1)[..., 0]


def channels_last(grad: Tensor) -> Tensor:
    return grad.contiguous(memory_format=torch.channels_last) if grad.dim() == 4 else grad.clone()


def negated(grad: Tensor) -> Tensor:
    wide = grad.float()  # there are no complex numbers of bf16
    view = torch.complex(torch.zeros_like(wide), -wide).conj().imag
    assert view.is_neg()
    return view.to(grad.dtype)


def zeros_without_memory(grad: Tensor) -> Tensor:
    return torch._efficientzerotensor(grad.shape, dtype=grad.dtype)


FORMS: dict[str, Form] = {
    form.__name__: form
    for form in (
        permuted, unit_strides, expanded, narrow, channels_last, negated, zeros_without_memory
    )
}  # fmt: skip
RULES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda params: CPUAdam(params, lr=1e-2, weight_decay=0.01),
    "adam-int8": lambda params: CPUAdam(params, lr=1e-2, state_dtype="int8"),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "lion": lambda params: Lion(params, lr=1e-3),
    "lamb": lambda params: Lamb(params, lr=1e-2),
    "torch-adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
}
SMALL = {"device_bytes": 2**15, "non_model_bytes": 0, "min_chunk_size_mb": 2**-8, "search_range_mb": 2**-8}
TIERS: dict[str, dict[str, Any]] = {
    "resident": {},
    "device": {**SMALL, "device_bytes": 2**19},
    "host": {**SMALL, "host_bytes": 2**20},
    "disk": {**SMALL, "host_bytes": 2**15},
}


class Delivered(torch.autograd.Function):
    """Gives a parameter its gradient in a form."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, form: Form) -> Tensor:
        ctx.form = form
        return param.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.form(grad), None


class Net(nn.Module):
    """Parameters whose gradients often have strides of their own, and others, to fill budgets."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 9))
        self.row = nn.Parameter(torch.randn(7, 1).t())
        self.matrix = nn.Parameter(torch.randn(6, 5))
        self.transposed = nn.Parameter(torch.randn(40, 37).t())
        self.pointwise = nn.Conv2d(4, 3, 1, bias=False).to(memory_format=torch.channels_last).weight
        self.depthwise = nn.Conv2d(4, 4, 3, groups=4, bias=False).to(memory_format=torch.channels_last).weight
        self.filling = nn.ParameterList(torch.randn(32, 32) for _ in range(6))

    def forward(self, step: int, form: Form) -> Tensor:
        source = torch.Generator().manual_seed(step)
        total = torch.zeros(())
        for param in self.parameters():
            factors = torch.randn(param.shape, generator=source).to(param.dtype)
            total = total + (Delivered.apply(param, form) * factors).float().square().mean()
        return total


def made_ordinary(form: Form) -> Form:
    """Return what gives a gradient the same values, each in memory of its own."""

    def values_of(grad: Tensor) -> Tensor:
        return torch.zeros_like(grad).copy_(form(grad))

    return values_of


def net() -> Net:
    torch.manual_seed(0)
    return Net()


@cache
def plainly_trained(form: str, rule: str, max_norm: float) -> dict[str, Tensor]:
    model = net()
    optimizer = RULES[rule](model.parameters())
    for step in range(STEPS):
        model(step, made_ordinary(FORMS[form])).backward()
        if max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def train(model: GeminiDDP, optimizer: GeminiOptimizer, form: Form) -> dict[str, Tensor]:
    for step in range(STEPS):
        optimizer.backward(model(step, form))
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert list(got) == list(want)
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


@pairs(form=list(FORMS), rule=list(RULES), tier=list(TIERS), max_norm=[0.0, 0.5])
def test_a_gradient_of_any_form_is_updated_by(
    form: str, rule: str, tier: str, max_norm: float, tmp_path: Path
) -> None:
    want = plainly_trained(form, rule, max_norm)
    with GeminiDDP(net(), disk_dir=tmp_path, **TIERS[tier]) as model:
        optimizer = GeminiOptimizer(RULES[rule](model.parameters()), model, max_norm=max_norm)
        assert_same(train(model, optimizer, FORMS[form]), want)


@pairs(form=list(FORMS), precision=["bf16", "fp16"], tier=list(TIERS))
def test_a_gradient_of_any_form_moves_a_master(form: str, precision: Any, tier: str, tmp_path: Path) -> None:
    found = []
    for given in (FORMS[form], made_ordinary(FORMS[form])):
        with GeminiDDP(net(), disk_dir=tmp_path, mixed_precision=precision, **TIERS[tier]) as model:
            optimizer = GeminiOptimizer(RULES["adam"](model.parameters()), model, initial_scale=2**4)
            found.append(train(model, optimizer, given))
    assert_same(*found)


@pairs(form=list(FORMS), rule=list(RULES), tier=list(TIERS))
def test_a_gradient_of_any_form_can_be_assigned(form: str, rule: str, tier: str, tmp_path: Path) -> None:
    found = []
    for given in (FORMS[form], made_ordinary(FORMS[form])):
        with GeminiDDP(net(), disk_dir=tmp_path, **TIERS[tier]) as model:
            optimizer = GeminiOptimizer(RULES[rule](model.parameters()), model)
            for step in range(STEPS):
                optimizer.backward(model(step, ordinary))
                source = torch.Generator().manual_seed(step)
                for param in model.parameters():
                    param.grad = given(torch.randn(param.shape, generator=source))
                optimizer.step()
            found.append(model.state_dict())
    assert_same(*found)


@pairs(form=list(FORMS), dtype=["fp32", "bf16", "int8"], share=[0.0, 0.5, 1.0])
def test_a_gradient_of_any_form_is_updated_without_management(
    form: str, dtype: str, share: float, tmp_path: Path
) -> None:
    found = []
    for given in (FORMS[form], made_ordinary(FORMS[form])):
        model = net()
        options = {"nvme_offload_fraction": share, "nvme_offload_dir": tmp_path} if share else {}
        optimizer = CPUAdam(model.parameters(), lr=1e-2, state_dtype=dtype, **options)
        for step in range(STEPS):
            model(step, given).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        found.append(model.state_dict())
    assert_same(*found)


class Tokens(nn.Module):
    """A token in front of one row of others."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.linear = nn.Parameter(torch.randn(1, 1, 8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        return self.linear(torch.tanh(x)).square().mean()


class Convolved(nn.Sequential):
    """Convolutions of 1 x 1 and depthwise ones over channels_last."""

    def __init__(self) -> None:
        layers = nn.Conv2d(3, 8, 1), nn.Tanh(), nn.Conv2d(8, 8, 3, groups=8), nn.Tanh(), nn.Conv2d(8, 4, 1)
        super().__init__(*layers)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(1, 3, 4, -1).to(memory_format=torch.channels_last)
        return super().forward(x).square().mean()


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("build", [Tokens, Convolved])
def test_what_plain_modules_deliver_is_updated(build: Any, tier: str, tmp_path: Path) -> None:
    found = []
    for managed in (False, True):
        torch.manual_seed(0)
        module = build()
        model = GeminiDDP(module, disk_dir=tmp_path, **TIERS[tier]) if managed else module
        optimizer: Any = CPUAdam(model.parameters(), lr=1e-2)
        if managed:
            optimizer = GeminiOptimizer(optimizer, model)
        for step in range(4):
            model(torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: value.detach().clone() for name, value in module.named_parameters()})
    assert_same(*found)


@pytest.mark.dear("tests of this file once more, with freed memory poisoned")
@pytest.mark.skipif(POISONED in os.environ, reason="this is that process")
def test_nothing_reads_a_copy_that_was_freed() -> None:
    # Chunks are freed last of all: copies are made where gradients stay as autograd made them.
    copied = ["-k", "resident or device or management"]
    tests = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__, *copied]
    ran = subprocess.run(tests, env=os.environ | POISON, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-2000:]
