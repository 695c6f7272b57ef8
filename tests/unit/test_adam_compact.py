"""What compact moments and split masters do to training: nearly nothing, and nothing at all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pairs import pairs

from gemini.optim.kernel_adam import CPUAdam
from gemini.optim.kernels import STATE_DTYPES

NUMEL = 700  # two whole blocks of 256 and a part


def quadratic_loss(state_dtype: str, *, dtype: torch.dtype = torch.float32, **options: Any) -> float:
    """Return the mean loss of the last 200 of 1000 steps on noisy gradients of a quadratic.

    Curvatures are two decades apart, and mixed within each block.
    """
    source = torch.Generator().manual_seed(0)
    curvature = torch.logspace(-1, 1, NUMEL)[torch.randperm(NUMEL, generator=source)]
    target = torch.randn(NUMEL, generator=source)
    noise = torch.randn(1000, NUMEL, generator=source)
    param = torch.zeros(NUMEL, dtype=dtype).requires_grad_()
    optimizer = CPUAdam([param], lr=0.02, state_dtype=state_dtype, **options)
    losses = []
    for row in noise:
        error = param.detach().float() - target
        param.grad = (curvature * (error + 0.3 * row)).to(dtype)
        optimizer.step()
        losses.append(float((curvature * error**2).sum()))
    return sum(losses[800:]) / 200


# How much higher the loss may be. Of bf16 parameters without remainders it is 2 % higher.
MARGIN = {"fp32": 0.005, "bf16": 0.005, "int8": 0.04}


@pytest.mark.parametrize("state_dtype", ["bf16", "int8"])
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.01}, {"betas": (0.8, 0.95)}])
def test_noisy_quadratic_gets_as_low_as_with_fp32(state_dtype: str, options: dict[str, Any]) -> None:
    want = quadratic_loss("fp32", **options)
    assert quadratic_loss(state_dtype, **options) == pytest.approx(want, rel=MARGIN[state_dtype])


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_split_master_gets_as_low_as_fp32_parameters(state_dtype: str) -> None:
    want = quadratic_loss("fp32")
    got = quadratic_loss(state_dtype, dtype=torch.bfloat16, master_remainders=True)
    assert got == pytest.approx(want, rel=MARGIN[state_dtype])


@pytest.mark.parametrize("state_dtype", ["bf16", "int8"])
def test_second_moment_of_steady_gradients_neither_vanishes_nor_drifts(state_dtype: str) -> None:
    sizes = torch.logspace(-2, 0, 256)  # square roots from 2.5 to 255 units of the block
    param = torch.zeros(256).requires_grad_()
    optimizer = CPUAdam([param], lr=1e-4, betas=(0.9, 0.99), state_dtype=state_dtype)
    signs = torch.randint(0, 2, (4000, 256), generator=torch.Generator().manual_seed(0)) * 2 - 1
    means = torch.zeros(256)
    for step, sign in enumerate(signs):
        param.grad = sizes * sign
        optimizer.step()
        if step >= 2000 and step % 10 == 0:
            means += optimizer.state_dict()["state"][0]["exp_avg_sq"] / 200
    # Rounding shakes roots by up to a unit: relatively more, the fewer units a root has.
    tolerance = 0.02 + (1.0 / (255.0 * sizes) if state_dtype == "int8" else 0.0)
    assert ((means / sizes**2 - 1).abs() <= tolerance).all()


def test_second_moment_of_an_element_far_below_its_block_is_never_zero() -> None:
    param = torch.zeros(256).requires_grad_()
    optimizer = CPUAdam([param], lr=1e-3, state_dtype="int8")
    grad = torch.full((256,), 1e-9)
    grad[7] = 1.0
    for _ in range(50):
        param.grad = grad
        optimizer.step()
    assert (optimizer.state[param]["exp_avg_sq"] > 0).all()
    assert param.abs().max() <= 50 * 1e-3 * 1.01  # no leap


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_equal_runs_with_compact_moments_are_equal_to_the_bit(state_dtype: str) -> None:
    assert quadratic_loss(state_dtype) == quadratic_loss(state_dtype)


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_threads_change_nothing(state_dtype: str) -> None:
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            param = torch.ones(100_003, dtype=torch.bfloat16).requires_grad_()
            optimizer = CPUAdam([param], state_dtype=state_dtype, master_remainders=True)
            for step in range(2):
                source = torch.Generator().manual_seed(step)
                param.grad = torch.randn(100_003, generator=source).to(torch.bfloat16)
                optimizer.step()
            results.append([param.detach(), *optimizer.state[param].values()])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], other, strict=True))


def joined(param: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Return the fp32 masters of bf16 parameters and their remainders."""
    bits = (param.detach().view(torch.int16).int() << 16) + remainder.int()
    return bits.view(torch.float32)


def rounded_ties_away(master: torch.Tensor) -> torch.Tensor:
    bits = (master.view(torch.int32).long() + 0x8000) >> 16
    return bits.to(torch.int16).view(torch.bfloat16)


@pairs(
    state_dtype=STATE_DTYPES,
    fraction=[0.0, 1.0],
    options=[{"weight_decay": 0.1}, {"adamw_mode": False, "weight_decay": 0.1}],
)
def test_split_master_is_the_fp32_master_of_every_step(
    state_dtype: str, fraction: float, options: dict[str, Any]
) -> None:
    source = torch.Generator().manual_seed(0)
    param = torch.randn(NUMEL, generator=source).to(torch.bfloat16).requires_grad_()
    master = param.detach().float().requires_grad_()
    settings = {"lr": 1e-3, "state_dtype": state_dtype, **options}
    split = CPUAdam([param], master_remainders=True, nvme_offload_fraction=fraction, **settings)
    plain = CPUAdam([master], **settings)
    for _ in range(30):
        param.grad = torch.randn(NUMEL, generator=source).to(torch.bfloat16)
        master.grad = param.grad.float()
        split.step()
        plain.step()
        assert torch.equal(joined(param, split.state_dict()["state"][0]["remainder"]), master)
        assert torch.equal(param, rounded_ties_away(master.detach()))


def test_updates_too_small_for_bf16_add_up_in_the_master() -> None:
    param = torch.ones(300, dtype=torch.bfloat16).requires_grad_()
    alone = copy.deepcopy(param)
    optimizers = [CPUAdam([param], lr=1e-4, master_remainders=True), CPUAdam([alone], lr=1e-4)]
    for _ in range(500):
        for each, optimizer in zip((param, alone), optimizers, strict=True):
            each.grad = torch.ones(300, dtype=torch.bfloat16)
            optimizer.step()
    assert (alone == 1.0).all()  # an update is 1e-4, an ulp 4e-3
    assert param.float().sub(0.95).abs().max() <= 2.0**-8


def test_remainders_concern_bf16_parameters_only() -> None:
    params = [torch.ones(5, dtype=dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    optimizer = CPUAdam(params, master_remainders=True)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert ["remainder" in optimizer.state[param] for param in params] == [False, False, True]
