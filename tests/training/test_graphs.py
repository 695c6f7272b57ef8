"""Whatever is done with the graph, backward reads the right weights."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from device_thread import advance_node_number, backward_on_its_own_thread, on_a_thread_of_its_own
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from training_harness import KIB, Recipe, assert_trains_alike, moved_bytes, seeded, tight
from training_models import Around, square_loss

from gemini import GeminiDDP


class Mlp(nn.Module):
    """Smooth layers, so that second derivatives exist."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers."""
        for fc in self.fc:
            x = torch.tanh(fc(x))
        return x


def build() -> Around:
    """Return the model of this file: 110 KiB of model data in fp32."""
    return Around(Mlp())


def inputs(index: int) -> Tensor:
    """Return the batch of a step."""
    return torch.randn(6, 32, generator=torch.Generator().manual_seed(index))


def retain_graph_twice(m: nn.Module, i: int) -> Tensor:
    loss = square_loss(m, i)
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    return loss


def two_losses_of_one_forward(m: nn.Module, i: int) -> Tensor:
    out = m(inputs(i))
    out.sum().backward(retain_graph=True)
    return out.square().mean()


def two_forwards_then_one_backward(m: nn.Module, i: int) -> Tensor:
    return square_loss(m, i) + 0.5 * square_loss(m, i + 100)


def backward_in_reverse_order_of_forward(m: nn.Module, i: int) -> Tensor:
    first, second = square_loss(m, i), square_loss(m, i + 100)
    second.backward()
    return first


def gradient_of_the_input(m: nn.Module, i: int) -> Tensor:
    x = inputs(i).requires_grad_()
    (slope,) = torch.autograd.grad(m(x).sum(), x)
    return square_loss(m, i) * slope.norm().item()


def gradient_penalty(m: nn.Module, i: int) -> Tensor:
    x = inputs(i).requires_grad_()
    out = m(x)
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return out.square().mean() + 0.01 * slope.square().sum()


def penalty_of_parameter_gradients(m: nn.Module, i: int) -> Tensor:
    loss = square_loss(m, i)
    slopes = torch.autograd.grad(loss, list(m.parameters()), create_graph=True)
    return loss + sum(slope.square().sum() for slope in slopes)


def hessian_vector_product(m: nn.Module, i: int) -> Tensor:
    loss = square_loss(m, i)
    weights = [p for p in m.parameters() if p.dim() == 2]
    slopes = torch.autograd.grad(loss, weights, create_graph=True)
    products = torch.autograd.grad(sum((s * s.detach()).sum() for s in slopes), weights, retain_graph=True)
    return loss * (1 + sum(p.norm() for p in products).item())


def weight_decay_in_the_loss(m: nn.Module, i: int) -> Tensor:
    return square_loss(m, i) + 1e-2 * sum(p.square().sum() for p in m.parameters())


def checkpointed_with_nesting(m: nn.Module, i: int) -> Tensor:
    def outer(x: Tensor) -> Tensor:
        return checkpoint(m, x, use_reentrant=False)

    out: Tensor = checkpoint(outer, inputs(i), use_reentrant=False)
    return out.square().mean()


def checkpoint_of_which_one_output_is_used(m: nn.Module, i: int) -> Tensor:
    inner = m.module if isinstance(m, GeminiDDP) else m

    def region(x: Tensor) -> tuple[Tensor, Tensor]:
        used = torch.tanh(inner.before(x)) @ inner.core.fc[0].weight
        for fc in (*inner.core.fc, inner.after[0], inner.after[2]):
            x = torch.tanh(fc(x))
        return used, x

    used, _ = checkpoint(region, inputs(i), use_reentrant=False)
    return used.square().mean() + square_loss(m, i)


def checkpoint_of_a_sequence(m: nn.Module, i: int) -> Tensor:
    inner = m.module if isinstance(m, GeminiDDP) else m
    layers = nn.Sequential(inner.before, *inner.core.fc, inner.after)
    out: Tensor = checkpoint_sequential(layers, 2, inputs(i).requires_grad_(), use_reentrant=True)
    return out.square().mean() + square_loss(m, i)


def saved_on_cpu(m: nn.Module, i: int) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return square_loss(m, i)


def hooks_on_parameters(m: nn.Module, i: int) -> Tensor:
    if i == 0:
        for p in m.parameters():
            p.register_hook(lambda grad: grad * 0.5)
    return square_loss(m, i)


def no_grad_regions(m: nn.Module, i: int) -> Tensor:
    with torch.no_grad():
        target = m(inputs(i + 50))
    return F.mse_loss(m(inputs(i)), target.detach())


def retained_intermediate(m: nn.Module, i: int) -> Tensor:
    out = m(inputs(i))
    out.retain_grad()
    out.square().mean().backward(retain_graph=True)
    return out.square().mean() * out.grad.norm().item()


def backward_to_all_parameters(m: nn.Module, i: int) -> Tensor:
    loss = square_loss(m, i)
    loss.backward(inputs=list(m.parameters()), retain_graph=True)
    return loss


def backward_to_inputs_with_python_within(m: nn.Module, i: int) -> Tensor:
    inner = m.module if isinstance(m, GeminiDDP) else m
    x = inputs(i).requires_grad_()
    x.register_hook(lambda grad: grad @ inner.core.fc[1].weight.detach())
    checkpoint(m, x, use_reentrant=False).sum().backward(inputs=[x, inner.core.fc[0].weight])
    return square_loss(m, i) * x.grad.norm().item()


def backward_through_a_tangent(m: nn.Module, i: int) -> Tensor:
    with forward_ad.dual_level():
        dual = m(forward_ad.make_dual(inputs(i), inputs(i + 50)))
        out, tangent = forward_ad.unpack_dual(dual)
    return out.square().mean() + tangent.square().mean()


def tangents_written_in_place(m: nn.Module, i: int) -> Tensor:
    inner = m.module if isinstance(m, GeminiDDP) else m
    with forward_ad.dual_level():
        x = forward_ad.make_dual(inputs(i) * 1, inputs(i + 50) * 1)
        x *= inner.core.fc[0].weight[:6]
        tangent = forward_ad.unpack_dual(m(x)).tangent
    return square_loss(m, i) + tangent.square().mean()


def gradients_of_batched_gradients(m: nn.Module, i: int) -> Tensor:
    jacobian = torch.autograd.functional.jacobian(
        lambda x: m(x).sum(0), inputs(i)[:2], create_graph=True, vectorize=True
    )
    return jacobian.square().mean()


def gradients_of_gradients_under_vmap(m: nn.Module, i: int) -> Tensor:
    x = inputs(i)[:2].requires_grad_()
    out = m(x).sum(0)

    def slope(direction: Tensor) -> Tensor:
        return torch.autograd.grad(out, x, direction, create_graph=True)[0]

    return torch.vmap(slope)(torch.eye(32)).square().mean()


GRAPHS = (
    retain_graph_twice,
    two_losses_of_one_forward,
    two_forwards_then_one_backward,
    backward_in_reverse_order_of_forward,
    gradient_of_the_input,
    gradient_penalty,
    penalty_of_parameter_gradients,
    hessian_vector_product,
    weight_decay_in_the_loss,
    checkpointed_with_nesting,
    checkpoint_of_which_one_output_is_used,
    checkpoint_of_a_sequence,
    saved_on_cpu,
    hooks_on_parameters,
    no_grad_regions,
    retained_intermediate,
    backward_to_all_parameters,
    backward_to_inputs_with_python_within,
    backward_through_a_tangent,
    tangents_written_in_place,
    gradients_of_batched_gradients,
)
ON_ONE_THREAD = (gradients_of_gradients_under_vmap,)  # torch keeps the levels of vmap for each thread


@pytest.mark.parametrize("device_bytes", [None, 40 * KIB, 24 * KIB])
@pytest.mark.parametrize("loss_fn", GRAPHS + ON_ONE_THREAD, ids=lambda loss_fn: loss_fn.__name__)
def test_any_graph_gives_the_same_numbers(
    loss_fn: Callable[..., Any], device_bytes: int | None, tmp_path: Path
) -> None:
    got = assert_trains_alike(build, loss_fn, tight(tmp_path, device_bytes), Recipe(steps=4))
    assert (moved_bytes(got.stats) > 0) == (device_bytes is not None)


@on_a_thread_of_its_own
@pytest.mark.parametrize("loss_fn", GRAPHS, ids=lambda loss_fn: loss_fn.__name__)
def test_backward_may_have_a_thread_of_its_own(
    loss_fn: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with backward_on_its_own_thread(monkeypatch):
        assert_trains_alike(build, loss_fn, tight(tmp_path, 40 * KIB), Recipe(steps=4))


def num_hooked(model: GeminiDDP, run: Callable[[], object]) -> int:
    """Return how many autograd nodes are hooked while ``run`` runs."""
    pins, count = model.manager.backward_pins, 0
    hooks = pins.hooks

    def counted(tensors: tuple[int, ...]) -> Any:
        nonlocal count
        count += 1
        return hooks(tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pins, "hooks", counted)
        run()
    return count


@pytest.mark.parametrize("ahead", range(-4, 5))
@on_a_thread_of_its_own
def test_nodes_of_another_thread_with_the_same_numbers_are_not_taken_for_an_operators(
    ahead: int, tmp_path: Path
) -> None:
    advance_node_number(5_000)  # another thread begins at 0
    with GeminiDDP(seeded(build), **tight(tmp_path, 40 * KIB)) as model:
        first, second = model.module.core.fc[0], model.module.core.fc[1]
        x = torch.tanh(first(inputs(0)))
        wanted = num_hooked(model, lambda: second(x))
        made = x.grad_fn._sequence_nr()
        with ThreadPoolExecutor(1) as other:
            other.submit(advance_node_number, made - ahead).result()
            assert num_hooked(model, lambda: other.submit(second, x).result()) == wanted


@pytest.mark.parametrize("ahead", range(-4, 12))
@on_a_thread_of_its_own
def test_the_node_that_runs_on_another_thread_is_not_taken_for_what_it_makes(
    ahead: int, tmp_path: Path
) -> None:
    advance_node_number(5_000)
    with GeminiDDP(seeded(build), **tight(tmp_path, 40 * KIB)) as model:

        def slopes() -> tuple[Tensor, ...]:
            return torch.autograd.grad(out.sum(), [x, *model.parameters()], create_graph=True)

        x = inputs(0).requires_grad_()
        out = model(x)
        wanted = num_hooked(model, slopes)
        out = model(x)
        with ThreadPoolExecutor(1) as other:
            other.submit(advance_node_number, out.grad_fn._sequence_nr() - 6 - ahead).result()
            assert num_hooked(model, lambda: other.submit(slopes).result()) == wanted


def test_backward_on_a_view_of_a_parameter_works(tmp_path: Path) -> None:
    with GeminiDDP(seeded(build), **tight(tmp_path, 40 * KIB)) as model:
        bias = model.module.before.bias
        bias[3].backward()
        assert bias.grad.tolist() == [0.0, 0.0, 0.0, 1.0] + [0.0] * 28
        (slope,) = torch.autograd.grad(bias[3], bias)
        assert slope.sum().item() == 1.0


def test_backward_to_parameters_takes_no_memory_for_them(tmp_path: Path) -> None:
    plain = seeded(build)
    square_loss(plain, 0).backward()
    with GeminiDDP(seeded(build), **tight(tmp_path, 24 * KIB)) as model:
        square_loss(model, 0).backward(inputs=list(model.parameters()))
        for got, want in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(got.grad, want.grad)


def test_backward_to_a_view_of_a_parameter_leaves_the_gradient_there(tmp_path: Path) -> None:
    with GeminiDDP(seeded(build), **tight(tmp_path, 40 * KIB)) as model:
        bias = model.module.before.bias
        part = bias[3:5]
        (part * 2).sum().backward(inputs=[part])
        assert part.grad.tolist() == [2.0, 2.0]
        assert bias.grad is None


def test_changing_a_weight_between_forward_and_backward_is_refused_by_autograd(tmp_path: Path) -> None:
    with GeminiDDP(seeded(build), **tight(tmp_path, 40 * KIB)) as model:
        loss = square_loss(model, 0)
        with torch.no_grad():
            model.module.core.fc[1].weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_user_hooks_see_the_accumulated_gradient(tmp_path: Path) -> None:
    seen: list[float] = []
    module = seeded(build)
    module.before.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum().item()))
    with GeminiDDP(module, **tight(tmp_path, 40 * KIB)) as model:
        model.module.before.bias.register_post_accumulate_grad_hook(
            lambda p: seen.append(p.grad.sum().item())
        )
        square_loss(model, 0).backward()
        square_loss(model, 0).backward()
        assert seen[1] == seen[0]
        assert seen[3] == model.module.before.bias.grad.sum().item()
        assert seen[3] == pytest.approx(2 * seen[1])
