"""CPUAdam over a thousand steps: the numbers of torch and, where torch has none, of float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from gemini.optim.kernel_adam import CPUAdam

NUMEL, STEPS, LR = 256, 1000, 1e-2  # whole vectors: torch treats a tail otherwise
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES = list(itertools.product(DTYPES, (True, False), (0.0, 0.1)))  # dtype, adamw_mode, weight_decay

# ATen without AVX2 rounds multiply-adds twice: its last bits are its own.
needs_fused_aten = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="ATen fuses multiply-adds only in its AVX2 and AVX-512 kernels",
)


pytestmark = pytest.mark.usefixtures("one_thread")


def start(dtype: torch.dtype) -> torch.Tensor:
    source = torch.Generator().manual_seed(0)
    return torch.randn(NUMEL, generator=source).to(dtype)


def gradients(dtype: torch.dtype) -> torch.Tensor:
    """Return one row per step: noise, a slow wave and, element by element, sizes far apart."""
    source = torch.Generator().manual_seed(1)
    sizes = torch.logspace(-4, 1, NUMEL)
    wave = torch.sin(torch.arange(STEPS) / 50.0)[:, None]
    return ((torch.randn(STEPS, NUMEL, generator=source) + wave) * sizes).to(dtype)


def our_training(dtype: torch.dtype, **options: Any) -> tuple[torch.Tensor, CPUAdam]:
    param = start(dtype).requires_grad_()
    optimizer = CPUAdam([param], lr=LR, **options)
    for grad in gradients(dtype):
        param.grad = grad
        optimizer.step()
    return param.detach(), optimizer


def float64_training(
    dtype: torch.dtype, *, adamw_mode: bool, weight_decay: float, bias_correction: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return parameter and moments of Adam in double; the parameter is rounded to its type each step."""
    beta1, beta2, eps = 0.9, 0.999, 1e-8
    param = start(dtype).double()
    exp_avg, exp_avg_sq = torch.zeros_like(param), torch.zeros_like(param)
    for step, given in enumerate(gradients(dtype).double(), start=1):
        grad = given if adamw_mode else given + weight_decay * param
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        bias1 = 1 - beta1**step if bias_correction else 1.0
        bias2 = 1 - beta2**step if bias_correction else 1.0
        denom = (exp_avg_sq / bias2).sqrt_().add_(eps)
        kept = param * (1 - LR * weight_decay) if adamw_mode else param
        param = torch.addcdiv(kept, exp_avg, denom, value=-LR / bias1)
        if dtype != torch.float32:
            param = param.to(dtype).double()
    return param, exp_avg, exp_avg_sq


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize(("adamw_mode", "weight_decay"), [case[1:] for case in CASES[:4]])
def test_fp32_stays_within_rounding_of_float64(
    adamw_mode: bool, weight_decay: float, bias_correction: bool
) -> None:
    options = {"adamw_mode": adamw_mode, "weight_decay": weight_decay, "bias_correction": bias_correction}
    want = float64_training(torch.float32, **options)
    got, optimizer = our_training(torch.float32, **options)
    eps = torch.finfo(torch.float32).eps
    # 1000 updates of about lr, each with an ulp or so; the rounding of 1 - lr * weight_decay comes a
    # thousand times the same way.
    ulps = 32 if adamw_mode and weight_decay else 8
    assert (got - want[0]).abs().max() <= ulps * eps * (STEPS * LR + want[0].abs().max())
    state = optimizer.state_dict()["state"][0]
    # The averages forget: 10 and 1000 steps are left, of which each rounds beta the same way.
    scale = torch.logspace(-4, 1, NUMEL).double() + weight_decay
    assert ((state["exp_avg"] - want[1]).abs() <= 16 * eps * scale).all()
    assert ((state["exp_avg_sq"] - want[2]).abs() <= 256 * eps * want[2]).all()


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize(("dtype", "adamw_mode", "weight_decay"), CASES[4:])
def test_16_bit_parameters_are_float64s_rounded_each_step(
    dtype: torch.dtype, adamw_mode: bool, weight_decay: float, bias_correction: bool
) -> None:
    options = {"adamw_mode": adamw_mode, "weight_decay": weight_decay, "bias_correction": bias_correction}
    want = float64_training(dtype, **options)[0].to(dtype)
    got, _ = our_training(dtype, **options)
    # fp32 arithmetic rounds a few of 256,000 updates to the other neighbour.
    assert (got != want).sum() <= NUMEL // 16
    ulp = torch.finfo(dtype).eps * want.double().abs().clamp(min=1.0)
    assert ((got.double() - want.double()).abs() <= 2 * ulp).all()


@needs_fused_aten
@pytest.mark.parametrize(("dtype", "adamw_mode", "weight_decay"), CASES)
def test_every_bit_is_that_of_fused_torch_on_fp32(
    dtype: torch.dtype, adamw_mode: bool, weight_decay: float
) -> None:
    kind = torch.optim.AdamW if adamw_mode else torch.optim.Adam
    wide = start(dtype).float().requires_grad_()
    reference = kind([wide], lr=LR, weight_decay=weight_decay, fused=True)
    for grad in gradients(dtype).float():
        wide.grad = grad
        reference.step()
        with torch.no_grad():
            wide.copy_(wide.to(dtype))  # what a 16-bit parameter keeps of it
    got, optimizer = our_training(dtype, adamw_mode=adamw_mode, weight_decay=weight_decay)
    assert torch.equal(got.float(), wide)
    state = optimizer.state_dict()["state"][0]
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(state[name], reference.state[wide][name])
