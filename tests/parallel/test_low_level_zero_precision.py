"""Masters, sums and the loss scale of ZeRO 1 and 2 under 16-bit precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import pairs
from processes import own_part, run_on_ranks
from torch import Tensor, nn
from torch import distributed as dist
from zero_models import adamw, assert_same, loss_of, odd_net, tokens_of, weights

from gemini import CPUAdam, StateError
from gemini.parallel.zero import LowLevelZeroOptimizer

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SCALER_WITHOUT_CHANGE = {"initial_scale": 1.0, "growth_interval": 10**6}


def sgd(model: nn.Module, **options: Any) -> LowLevelZeroOptimizer:
    return LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), **options)


def line(*values: float) -> nn.Module:
    """Return a model whose gradient is its input: out = sum(weight * x)."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.tensor(values))
    return model


def give(optimizer: LowLevelZeroOptimizer, model: nn.Module, *grad: float) -> None:
    """Run a backward pass that gives ``model.weight`` this gradient, times the loss scale."""
    weight = model.weight
    assert isinstance(weight, Tensor)
    optimizer.backward((weight * torch.tensor(grad, dtype=weight.dtype)).float().sum())


# -- masters -------------------------------------------------------------------------------------


def _masters_after_wrapping(precision: str) -> tuple[dict[str, Tensor], dict[int, Tensor]]:
    model = odd_net()
    before = weights(model)
    optimizer = LowLevelZeroOptimizer(adamw(model.parameters()), precision=precision)
    assert {param.dtype for param in model.parameters()} == {HALVES[precision]}
    return before, optimizer.state_dict()["masters"]


@pytest.mark.parametrize("precision", HALVES)
def test_masters_are_the_original_weights_not_their_16_bit_casts(precision: str) -> None:
    for before, masters in run_on_ranks(_masters_after_wrapping, 2, precision):
        for number, (name, weight) in enumerate(before.items()):
            assert torch.equal(masters[number], weight), name
            assert torch.equal(masters[number], weight.to(HALVES[precision]).float()) == (
                name in {"norm.weight", "norm.bias", "gain", "bias", "unused"}
            )


def _steps_too_small_for_16_bits() -> float:
    model = line(1.0, 1.0, 1.0)
    optimizer = sgd(model, precision="bf16")
    for _ in range(64):
        give(optimizer, model, 1 / 1024, 1 / 1024, 1 / 1024)
        optimizer.step()
    return float(model.weight[0])


def test_updates_too_small_for_16_bits_add_up_in_the_masters() -> None:
    assert run_on_ranks(_steps_too_small_for_16_bits, 2) == [1.0 - 64 / 1024] * 2


@pytest.mark.parametrize("precision", HALVES)
def test_weights_written_behind_masters_are_refused_until_taken_over(precision: str) -> None:
    model = odd_net()
    optimizer = LowLevelZeroOptimizer(adamw(model.parameters()), precision=precision)
    other = {name: value + 1 for name, value in model.state_dict().items()}
    model.load_state_dict(other)
    optimizer.backward(loss_of(model, tokens_of(0)))
    with pytest.raises(StateError, match="update_master_params"):
        optimizer.step()
    assert_same(weights(model), other)
    optimizer.update_master_params()
    masters = optimizer.state_dict()["masters"].values()
    assert all(torch.equal(got, want.float()) for got, want in zip(masters, other.values(), strict=True))
    optimizer.step()


# -- sums ----------------------------------------------------------------------------------------


def _mean_of(precision: str, grads: list[float]) -> float:
    model = line(0.0)
    optimizer = sgd(model, precision=precision, **SCALER_WITHOUT_CHANGE)
    give(optimizer, model, grads[dist.get_rank()])
    optimizer.step()
    return -float(optimizer.state_dict()["masters"][0])


def test_16_bit_gradients_are_summed_over_ranks_in_fp32() -> None:
    # bf16 has 8 bits: 256 + 1 is 256 there, and the mean of three would lose both ones.
    assert run_on_ranks(_mean_of, 3, "bf16", [256.0, 1.0, 1.0]) == [86.0] * 3
    # fp16 ends at 65504: the sum does not fit, the mean does.
    assert run_on_ranks(_mean_of, 2, "fp16", [60000.0, 40000.0]) == [50000.0] * 2


def _accumulate_small(precision: str) -> float:
    model = line(0.0)
    optimizer = sgd(model, precision=precision, **SCALER_WITHOUT_CHANGE)
    with optimizer.no_sync():
        give(optimizer, model, 256.0)
        give(optimizer, model, 0.5)
        give(optimizer, model, 0.25)
    give(optimizer, model, 0.125)
    optimizer.step()
    return -float(optimizer.state_dict()["masters"][0])


@pytest.mark.parametrize("precision", HALVES)
def test_micro_batches_are_summed_in_fp32(precision: str) -> None:
    assert run_on_ranks(_accumulate_small, 2, precision) == [256.875] * 2


def _send_as(dtype: torch.dtype) -> float:
    model = line(0.0)
    optimizer = sgd(model, communication_dtype=dtype)
    give(optimizer, model, 1.0 + 2.0**-12)
    optimizer.step()
    return -model.weight.item()


def test_communication_dtype_rounds_what_is_sent() -> None:
    assert run_on_ranks(_send_as, 2, torch.bfloat16) == [1.0] * 2
    assert run_on_ranks(_send_as, 2, torch.float64) == [1.0 + 2.0**-12] * 2


# -- clipping ------------------------------------------------------------------------------------


def _clip(precision: str, offload: bool, kernel: bool) -> tuple[dict[str, Tensor], float, float]:
    model = odd_net()
    params = model.parameters()
    inner = CPUAdam(params, lr=0.1, eps=1.0) if kernel else torch.optim.Adam(params, lr=0.1, eps=1.0)
    optimizer = LowLevelZeroOptimizer(inner, precision=precision, cpu_offload=offload, initial_scale=2.0**10)
    optimizer.backward(loss_of(model, own_part(tokens_of(0))))
    norm = optimizer.clip_grad_by_norm(0.01)
    again = optimizer.clip_grad_by_norm(0.01)
    optimizer.step()
    return weights(model), float(norm), float(again)


@pairs(precision=["fp32", "bf16", "fp16"], offload=[False, True], kernel=[False, True])
def test_clipping_is_by_the_true_norm_in_every_precision_offloaded_or_not(
    precision: str, offload: bool, kernel: bool
) -> None:
    """eps=1 makes Adam's first step nearly proportional to the gradient, so that a clip shows."""
    model = odd_net()
    loss_of(model, tokens_of(0)).backward()
    want_norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    torch.optim.Adam(model.parameters(), lr=0.1, eps=1.0).step()
    tolerance = {"fp32": 1e-6, "bf16": 1e-2, "fp16": 2e-3}[precision]
    for got, norm, again in run_on_ranks(_clip, 2, precision, offload, kernel):
        assert norm == pytest.approx(float(want_norm), rel=2 * tolerance)
        assert again == pytest.approx(0.01, rel=1e-3)
        for name, weight in weights(model).items():
            torch.testing.assert_close(got[name].float(), weight, rtol=tolerance, atol=1e-6)


# -- loss scale ----------------------------------------------------------------------------------


def _grow_every_step() -> list[float]:
    model = line(8.0, 8.0)
    optimizer = sgd(model, precision="fp16", initial_scale=4.0, growth_interval=1)
    seen = []
    for _ in range(3):
        give(optimizer, model, 1.0, 1.0)
        assert optimizer.loss_scale is not None
        seen.append(optimizer.loss_scale.scale)
        optimizer.step()
    return [*seen, float(model.weight[0]), float(model.weight[1])]


def test_step_on_which_the_scale_grows_divides_by_the_scale_of_its_backward() -> None:
    assert run_on_ranks(_grow_every_step, 2) == [[4.0, 8.0, 16.0, 5.0, 5.0]] * 2


def _overflow_on_the_last_rank(stage: int, accumulate: bool) -> dict[str, Any]:
    model = line(1.0, 2.0, 3.0, 4.0, 5.0)
    inner = torch.optim.Adam(model.parameters(), lr=0.5)
    optimizer = LowLevelZeroOptimizer(
        inner, precision="fp16", stage=stage, initial_scale=8.0, hysteresis=1, clip_grad_norm=1.0
    )
    clean = (1.0, 1.0, 1.0, 1.0, 1.0)
    give(optimizer, model, *clean)
    optimizer.step()
    before, state = weights(model), optimizer.state_dict()
    bad = float("inf") if dist.get_rank() == dist.get_world_size() - 1 else 1.0
    if accumulate:
        with optimizer.no_sync():
            give(optimizer, model, 1.0, 1.0, bad, 1.0, 1.0)
        give(optimizer, model, *clean)
    else:
        give(optimizer, model, 1.0, 1.0, bad, 1.0, 1.0)
    optimizer.step()
    after, later = weights(model), optimizer.state_dict()
    give(optimizer, model, *clean)
    optimizer.step()
    return {
        "untouched": torch.equal(before["weight"], after["weight"])
        and all(torch.equal(state["state"][0][k], later["state"][0][k]) for k in state["state"][0]),
        "scales": (state["loss_scale"]["scale"], later["loss_scale"]["scale"]),
        "weight": weights(model)["weight"],
        "steps": float(optimizer.state_dict()["state"][0]["step"]),
    }


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("accumulate", [False, True])
def test_overflow_on_one_rank_skips_the_step_on_all_and_leaves_no_trace(stage: int, accumulate: bool) -> None:
    model = line(1.0, 2.0, 3.0, 4.0, 5.0)
    plain = torch.optim.Adam(model.parameters(), lr=0.5)
    for _ in range(2):
        model.weight.grad = torch.full((5,), 1 / 5**0.5)
        plain.step()
    for result in run_on_ranks(_overflow_on_the_last_rank, 3, stage, accumulate):
        assert result["untouched"]
        assert result["scales"] == (8.0, 4.0)
        assert result["steps"] == 2.0
        torch.testing.assert_close(result["weight"].float(), model.weight.detach(), rtol=1e-3, atol=1e-6)


def _scales(overflows: list[bool], options: dict[str, Any]) -> list[float]:
    """Return the scale after each step, of a run with these overflows."""
    model = line(1.0)
    optimizer = sgd(model, precision="fp16", **options)
    assert optimizer.loss_scale is not None
    scales = []
    for overflows_now in overflows:
        give(optimizer, model, float("nan") if overflows_now else 0.0)
        optimizer.step()
        scales.append(optimizer.loss_scale.scale)
    return scales


def test_every_argument_of_the_scaler_does_what_it_says() -> None:
    bad, good = True, False
    common = {"initial_scale": 16.0, "hysteresis": 1, "growth_interval": 2}
    assert _scales([good] * 4, common) == [16, 32, 32, 64]
    assert _scales([good] * 4, {**common, "growth_factor": 4.0}) == [16, 64, 64, 256]
    assert _scales([good] * 4, {**common, "max_scale": 40.0}) == [16, 32, 32, 40]
    assert _scales([good] * 3, {**common, "growth_interval": 3}) == [16, 16, 32]
    assert _scales([bad] * 3, common) == [8, 4, 2]
    assert _scales([bad] * 3, {**common, "backoff_factor": 0.25}) == [4, 1, 1]
    assert _scales([bad] * 3, {**common, "min_scale": 6.0}) == [8, 6, 6]
    assert _scales([bad] * 3, {**common, "hysteresis": 2}) == [16, 8, 4]
    assert _scales([good, bad, good, good], common) == [16, 8, 8, 16]


def test_gradient_whose_loss_was_not_scaled_is_refused_under_fp16() -> None:
    model = odd_net()
    optimizer = LowLevelZeroOptimizer(adamw(model.parameters()), precision="fp16")
    before = weights(model)
    with pytest.raises(StateError, match="not scaled"):
        loss_of(model, tokens_of(0)).backward()
    optimizer.zero_grad()
    optimizer.step()
    assert_same(weights(model), before)


def test_loading_another_scale_between_two_backward_passes_is_refused() -> None:
    model = line(1.0)
    optimizer = sgd(model, precision="fp16", initial_scale=8.0)
    state = optimizer.state_dict()
    state["loss_scale"]["scale"] = 4.0
    give(optimizer, model, 1.0)
    optimizer.load_state_dict(state)
    with pytest.raises(StateError, match="loss scale changed from 8"):
        give(optimizer, model, 1.0)
    optimizer.step()
    assert model.weight.item() == 0.0  # by the scale it had been computed with
