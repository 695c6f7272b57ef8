"""Under fp16 a loss may go through several managed models: each takes its scale out, and none steps alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import pairs
from torch import Tensor, nn
from training_harness import KIB, random_batch, tight

from gemini import ConfigError, GeminiAdamOptimizer, GeminiDDP

Trained = tuple[GeminiDDP, GeminiAdamOptimizer]
Two = tuple[Trained, Trained]


def half(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))


@contextmanager
def both(precision: str | None = "fp16", scale: float = 2.0**15) -> Iterator[Two]:
    """Yield two models with an optimizer each: fp16, and ``precision`` with ``scale``."""
    with (
        GeminiDDP(half(1), mixed_precision="fp16", force_outputs_fp32=True) as a,
        GeminiDDP(half(2), mixed_precision=precision) as b,
    ):
        first = GeminiAdamOptimizer(a, lr=1e-2, hysteresis=1)
        yield (a, first), (b, GeminiAdamOptimizer(b, lr=1e-2, hysteresis=1, initial_scale=scale))


def loss_of(*models: nn.Module, batch: Tensor | None = None) -> Tensor:
    out = random_batch(0, 4, 32) if batch is None else batch
    for model in models:
        out = model(out)
    return out.float().square().mean()


def weights(*models: GeminiDDP) -> list[Tensor]:
    return [value.clone() for model in models for value in model.state_dict().values()]


def are_equal(got: list[Tensor], want: list[Tensor]) -> list[bool]:
    return [torch.equal(*pair) for pair in zip(got, want, strict=True)]


def scale_of(optimizer: GeminiAdamOptimizer) -> float:
    assert optimizer.loss_scale is not None
    return optimizer.loss_scale.scale


def assert_gradients(trained: Trained, module: nn.Module) -> None:
    """Compare with those of a plain module, up to the rounding of fp16."""
    for param, plain in zip(trained[0].parameters(), module.parameters(), strict=True):
        got, want = trained[1].get_param_grad(param), plain.grad
        assert got is not None
        assert want is not None
        torch.testing.assert_close(got, want, atol=float(want.abs().max()) * 2e-2, rtol=0)


def overflow_in(model: GeminiDDP) -> Any:
    """Have the gradient of the last parameter overflow, and nothing else."""
    return list(model.parameters())[-1].register_hook(lambda grad: grad * torch.inf)


@pytest.mark.parametrize("device_kib", [40, 1024])
def test_two_models_train_as_one_that_holds_both(device_kib: int, tmp_path: Path) -> None:
    options = {"mixed_precision": "fp16", **tight(tmp_path, device_kib * KIB)}
    with GeminiDDP(nn.Sequential(half(1), half(2)), **options) as whole:
        optimizer = GeminiAdamOptimizer(whole, lr=1e-2)
        for index in range(4):
            optimizer.backward(loss_of(whole, batch=random_batch(index, 4, 32)))
            optimizer.step()
        want = weights(whole)
    with GeminiDDP(half(1), **options) as a, GeminiDDP(half(2), **options) as b:
        first = GeminiAdamOptimizer(a, lr=1e-2)
        second = GeminiAdamOptimizer(b, lr=1e-2, initial_scale=8.0)  # which no loss here has
        for index in range(4):
            first.backward(loss_of(a, b, batch=random_batch(index, 4, 32)))
            first.step()
            second.step()
        assert all(are_equal(weights(a, b), want))


@pytest.mark.parametrize("precision", ["fp16", "bf16", None])
def test_norms_limits_and_gradients_are_without_the_scale(precision: str | None) -> None:
    plain = half(1), half(2)
    loss_of(*plain).backward()
    with both(precision) as ((a, first), (b, second)):
        first.backward(loss_of(a, b))
        assert_gradients((a, first), plain[0])
        assert_gradients((b, second), plain[1])
        want = nn.utils.get_total_norm([param.grad for param in plain[1].parameters()])
        torch.testing.assert_close(second.clip_grad_by_norm(0.5), want, rtol=1e-2, atol=0)


@pairs(precision=["fp16", "bf16"], where=[0, 1], order=[(0, 1), (1, 0)])
def test_an_overflow_in_either_skips_both_and_its_scale_backs_off(
    precision: str, where: int, order: tuple[int, int]
) -> None:
    with both(precision) as two:
        (a, first), (b, _) = two
        before = weights(a, b)
        hook = overflow_in((a, b)[where])
        first.backward(loss_of(a, b))
        for index in order:
            two[index][1].step()
        hook.remove()
        assert all(are_equal(weights(a, b), before))
        assert scale_of(first) == 2.0**14
        first.backward(loss_of(a, b))
        for index in order:
            two[index][1].step()
        assert not any(are_equal(weights(a, b), before))
        assert scale_of(first) == 2.0**14


def test_a_discriminator_gives_up_what_the_generator_left() -> None:
    plain = half(2)
    loss_of(plain, batch=random_batch(1, 4, 32)).backward()
    with both(scale=2.0**12) as ((generator, first), (critic, second)):
        first.backward(loss_of(generator, critic))
        second.zero_grad()
        second.backward(loss_of(critic, batch=random_batch(1, 4, 32)))
        assert_gradients((critic, second), plain)
        before = weights(generator, critic)
        first.step()
        second.step()
        assert not any(are_equal(weights(generator, critic), before))


@pytest.mark.parametrize("scale", [2.0**15, 2.0**13, 1000.0])
def test_gradients_of_two_losses_with_their_scales_add_up(scale: float) -> None:
    plain = half(1), half(2)
    loss_of(*plain).backward()
    loss_of(plain[0], batch=random_batch(1, 4, 32)).backward()
    loss_of(*plain, batch=random_batch(2, 4, 32)).backward()
    with both(scale=scale) as ((a, first), (b, second)):
        first.backward(loss_of(a, b))
        second.backward(loss_of(a, batch=random_batch(1, 4, 32)))
        second.backward(loss_of(a, b, batch=random_batch(2, 4, 32)))
        assert_gradients((a, first), plain[0])
        assert_gradients((b, second), plain[1])


def test_an_overflow_of_losses_that_share_a_model_skips_all_of_them() -> None:
    with both() as ((a, first), (b, second)), GeminiDDP(half(3), mixed_precision="fp16") as head:
        third = GeminiAdamOptimizer(head, lr=1e-2, hysteresis=1)
        before = weights(a, b, head)
        hook = overflow_in(head)
        features = a(random_batch(0, 4, 32))
        second.backward(loss_of(b, batch=features).add(0.0))
        third.backward(loss_of(head, batch=a(random_batch(1, 4, 32))))
        hook.remove()
        for optimizer in (second, first, third):
            optimizer.step()
        assert all(are_equal(weights(a, b, head), before))
        assert [scale_of(each) for each in (first, second, third)] == [2.0**14] * 3


def test_an_overflow_that_no_step_of_its_optimizer_sees_backs_off_too() -> None:
    with both() as ((a, first), (b, second)):
        hook = overflow_in(b)
        first.backward(loss_of(a, b))
        second.step()
        hook.remove()
        a.zero_grad()
        first.backward(loss_of(a, b))
        assert scale_of(first) == 2.0**14
        before = weights(b)
        second.step()
        assert not any(are_equal(weights(b), before))


def test_gradients_that_were_given_up_link_nothing() -> None:
    with both() as ((a, first), (b, _)):
        hook = overflow_in(b)
        first.backward(loss_of(a, b))
        hook.remove()
        for param in b.parameters():
            param.grad = None
        b.zero_grad()
        before = weights(a)
        first.step()
        assert not any(are_equal(weights(a), before))


def test_a_model_that_was_closed_links_nothing() -> None:
    with both() as ((a, first), (b, _)):
        first.backward(loss_of(a, b))
        before = weights(a)
        b.close()
        first.step()
        assert not any(are_equal(weights(a), before))


def test_an_unscaled_loss_is_refused_and_a_scaled_one_taken_after() -> None:
    with both() as ((a, first), (b, second)):
        with pytest.raises(ConfigError, match=r"optimizer\.backward\(loss\)"):
            loss_of(a, b).backward()
        for model in (a, b):
            model.zero_grad()
        first.backward(loss_of(a, b))
        with pytest.raises(ConfigError, match=r"optimizer\.backward\(loss\)"):
            loss_of(b).backward()
        before = weights(a)
        second.zero_grad()
        first.step()
        assert not any(are_equal(weights(a), before))
