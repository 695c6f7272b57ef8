"""Lamb against its formula, and learning rates against torch's and past their end."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torchs

from gemini import ConfigError, Lamb
from gemini.optim.lr_scheduler import CosineAnnealingLR, CosineAnnealingWarmupLR, LinearWarmupLR


def by_formula(start: torch.Tensor, grads: list[torch.Tensor], *, corrects: bool) -> torch.Tensor:
    """Return the parameter after the steps of the paper, in double precision."""
    p, m, v = start.double(), torch.zeros(3, 2).double(), torch.zeros(3, 2).double()
    for step, grad in enumerate(grads, 1):
        g = grad.double()
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        first, second = (m / (1 - 0.9**step), v / (1 - 0.99**step)) if corrects else (m, v)
        u = first / (second.sqrt() + 1e-6) + 0.1 * p
        ratio = p.norm() / u.norm() if p.norm() > 0 and u.norm() > 0 else 1.0
        p = p - 0.02 * ratio * u
    return p.float()


@pytest.mark.parametrize("corrects", [True, False])
@pytest.mark.parametrize("start", [torch.ones(3, 2), torch.zeros(3, 2)], ids=["ones", "zeros"])
def test_lamb_is_its_formula(start: torch.Tensor, corrects: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(3, 2, generator=generator) for _ in range(5)]
    param = nn.Parameter(start.clone())
    optimizer = Lamb([param], 0.02, (0.9, 0.99), weight_decay=0.1, bias_correction=corrects)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
        assert torch.equal(param.grad, grad)
    torch.testing.assert_close(param.detach(), by_formula(start, grads, corrects=corrects))


def test_lamb_goes_on_from_its_state() -> None:
    param = nn.Parameter(torch.ones(4))
    first = Lamb([param], lr=0.1)
    param.grad = torch.ones(4)
    first.step()
    other = nn.Parameter(param.detach().clone())
    second = Lamb([other], lr=0.1)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for each, optimizer in ((param, first), (other, second)):
        each.grad = torch.full((4,), 2.0)
        assert optimizer.step(lambda: 7) == 7
    assert torch.equal(param, other)


@pytest.mark.parametrize("option", [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"eps": -1.0}, {"weight_decay": -1}])
def test_lamb_refuses_what_is_out_of_range(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        Lamb([nn.Parameter(torch.ones(1))], **option)


# -- learning rates --------------------------------------------------------------------------------


def rates(make: Any, count: int) -> list[float]:
    optimizer = torch.optim.SGD(
        [{"params": [nn.Parameter(torch.ones(1))], "lr": 8.0}, {"params": [nn.Parameter(torch.ones(1))]}],
        lr=4.0,
    )
    scheduler, found = make(optimizer), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # no step of the optimizer
        for _ in range(count):
            assert scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
            found.append(optimizer.param_groups[0]["lr"])
            assert optimizer.param_groups[1]["lr"] <= optimizer.param_groups[0]["lr"]
            scheduler.step()
    return found


def test_a_line_rises_falls_and_stays_at_its_end() -> None:
    got = rates(lambda optim: LinearWarmupLR(optim, 6, warmup_steps=1), 9)
    assert got == pytest.approx([4.0, 8.0, 6.4, 4.8, 3.2, 1.6, 0.0, 0.0, 0.0])


def test_more_warmup_than_steps_rises_and_then_ends() -> None:
    got = rates(lambda optim: LinearWarmupLR(optim, warmup_steps=3, total_steps=2), 6)
    assert got == pytest.approx([2.0, 4.0, 6.0, 8.0, 0.0, 0.0])


def test_a_cosine_is_torchs_up_to_its_end_and_stays_there() -> None:
    want = rates(lambda optim: torchs.CosineAnnealingLR(optim, 5, eta_min=1.0), 6)
    got = rates(lambda optim: CosineAnnealingLR(optim, total_steps=5, eta_min=1.0), 9)
    assert got == pytest.approx([*want, 1.0, 1.0, 1.0])
    warm = rates(lambda optim: CosineAnnealingWarmupLR(optimizer=optim, total_steps=7, warmup_steps=2), 9)
    plain = [4 * (1 + math.cos(math.pi * step / 5)) for step in range(6)]
    assert warm == pytest.approx([8 / 3, 16 / 3, *plain, 0.0])


def test_a_schedule_goes_on_from_its_state() -> None:
    def make() -> Any:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=4.0)
        return optimizer, CosineAnnealingWarmupLR(optimizer, 9, 2)

    (optimizer, scheduler), (other, resumed) = make(), make()
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    other.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(scheduler.state_dict())
    for each in (optimizer, other):
        each.step()
    scheduler.step()
    resumed.step()
    assert scheduler.get_last_lr() == resumed.get_last_lr() == [other.param_groups[0]["lr"]]


@pytest.mark.parametrize("option", [{"total_steps": 0}, {"total_steps": 2.5}, {"warmup_steps": -1}])
def test_lengths_are_whole_numbers(option: dict[str, Any]) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=4.0)
    with pytest.raises(ConfigError, match=next(iter(option))):
        LinearWarmupLR(optimizer, **{"total_steps": 4, **option})
