"""What autograd saves may leave DEVICE; the bits, and what autograd refuses, stay the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from activation_harness import Net, activation_bytes, both, net_loss, offloaded, store_small_tensors
from torch import Tensor, nn
from training_harness import (
    KIB,
    LossFn,
    Recipe,
    managed_optimizer,
    managed_step,
    random_batch,
    seeded,
)
from training_models import TinyGPT, gpt_loss

from gemini import GeminiDDP
from gemini.runtime.activation import activations

pytestmark = pytest.mark.usefixtures(store_small_tensors.__name__)


def twice(model: nn.Module, index: int) -> Tensor:
    loss = net_loss(model, index)
    loss.backward(retain_graph=True)
    return loss


def two_graphs(model: nn.Module, index: int) -> Tensor:
    return net_loss(model, index) + net_loss(model, index + 100)


def sometimes_longer(model: nn.Module, index: int) -> Tensor:
    torch.manual_seed(index)
    loss: Tensor = model(random_batch(index, 5 + 7 * (index % 3), 16, 32)).square().mean()
    return loss


def longer_for_good(model: nn.Module, index: int) -> Tensor:
    torch.manual_seed(index)
    loss: Tensor = model(random_batch(index, 5 if index < 1 else 19, 16, 32)).square().mean()
    return loss


def with_evaluation(model: nn.Module, index: int) -> Tensor:
    with torch.no_grad():
        model(random_batch(index, 8, 16, 32))
    loss = net_loss(model, index)
    with torch.no_grad():
        model(random_batch(index, 8, 16, 32))
    return loss


def forward_without_backward(model: nn.Module, index: int) -> Tensor:
    model(random_batch(index, 8, 16, 32)).sum()
    return net_loss(model, index)


LOSSES: list[LossFn] = [
    net_loss,
    twice,
    two_graphs,
    sometimes_longer,
    longer_for_good,
    with_evaluation,
    forward_without_backward,
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("device_bytes", [300 * KIB, 10_000 * KIB])
def test_offload_never_changes_the_numbers(loss: LossFn, device_bytes: int, tmp_path: Path) -> None:
    both(Net, loss, Recipe(steps=6), offloaded(tmp_path, device_bytes))


class Parts(nn.Module):
    """Saves parts of one memory that have version counters of their own, some written meanwhile."""

    def __init__(self, use: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 64)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        """Use the parts."""
        return self.use(self.fc(x))


def view_then_part(both: Tensor) -> Tensor:
    other = both.unsafe_chunk(2, -1)[1]
    return both[..., :32].square() + other.mul_(2).square()


def part_then_part(both: Tensor) -> Tensor:
    first, second = torch.unsafe_split(both, 32, -1)
    squared = first.square()
    second.mul_(3)
    return squared[:-1] + second[:-1].square()  # which lies between the elements of the first


def whole_then_part(both: Tensor) -> Tensor:
    whole = both.detach().clone()
    saved = both * whole
    first, second = whole.unsafe_chunk(2, -1)
    first.sigmoid_()
    return saved[..., :32].detach() + both[..., 32:] * first + second


@pytest.mark.parametrize("use", [view_then_part, part_then_part, whole_then_part])
def test_parts_of_one_memory_that_are_written_later_are_stored_anew(
    use: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    both(lambda: Parts(use), net_loss, Recipe(steps=3), offloaded(tmp_path, 300 * KIB))


@pytest.mark.parametrize("inplace", [False, True])
def test_a_result_that_is_saved_as_such_and_as_an_operand_is_stored_once(
    inplace: bool, tmp_path: Path
) -> None:
    module = nn.Sequential(nn.Linear(32, 32), nn.ReLU(inplace), nn.Linear(32, 32))
    with GeminiDDP(module, **offloaded(tmp_path, 4000 * KIB)) as model:
        out = model(random_batch(0, 256, 32).requires_grad_())
        assert activation_bytes(model) == 2 * 256 * 32 * 4  # the input; what ReLU returns
        del out


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_left_where_they_are(tmp_path: Path) -> None:
    def use(both: Tensor) -> Tensor:
        nested = torch.nested.as_nested_tensor([both[0], both[1][:9], both[2]])
        parts = [part.sin().square() for part in nested.unbind()]
        with torch.no_grad():
            fixed = torch.nested.as_nested_tensor([one.clone() for one in both[:3]]).unbind()
        return torch.cat(parts).sum() + sum(part[:, :-1].mul(both[0, :, :-1]).sum() for part in fixed)

    both(lambda: Parts(use), net_loss, Recipe(steps=3), offloaded(tmp_path, 300 * KIB))


@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_offload_and_checkpointing_together_change_nothing(
    kind: str, accumulate: int, tmp_path: Path
) -> None:
    recipe = Recipe(steps=4, accumulate=accumulate, clip=("norm", 0.1))
    both(lambda: Net(kind), net_loss, recipe, offloaded(tmp_path, 400 * KIB))


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("host_bytes", [0, "4MiB"])
def test_a_gpt_trains_alike_with_all_activations_offloaded(
    precision: str | None, host_bytes: int | str, tmp_path: Path
) -> None:
    options = offloaded(tmp_path, 100 * KIB, host_bytes=host_bytes)
    got = both(TinyGPT, gpt_loss, Recipe(steps=5, precision=precision), options)
    assert got.stats["disk_write" if host_bytes == 0 else "d2h"]["bytes"] > 0


def test_steps_alike_follow_the_recorded_order(tmp_path: Path) -> None:
    with GeminiDDP(seeded(Net), **offloaded(tmp_path, 300 * KIB)) as model:
        optimizer = managed_optimizer(model)
        for step in range(4):
            managed_step(model, optimizer, net_loss, Recipe(), step)
            assert not model.manager.chunks.table.diverged()
        num_chunks = len(model.manager.chunks.chunks)
        managed_step(model, optimizer, net_loss, Recipe(), 4)
        assert len(model.manager.chunks.chunks) == num_chunks


class Writes(nn.Module):
    """Writes in place to a tensor that an operator has saved: to its result, its input, or a kept view."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 32)
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        """Run one layer and write."""
        h = self.fc(x)
        y = h.exp() if self.what == "result" else h.square()
        (y if self.what == "result" else h if self.what == "input" else h[:1]).add_(1)
        return y


@pytest.mark.parametrize("smallest", [1, 2**30])
@pytest.mark.parametrize("what", ["result", "input", "view"])
def test_a_saved_tensor_that_is_written_is_refused_as_by_autograd(
    what: str, smallest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activations, "SMALLEST_BYTES", smallest)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Writes(what)(random_batch(0, 4, 32)).sum().backward()
    with GeminiDDP(Writes(what), **offloaded(tmp_path)) as model:
        loss = model(random_batch(0, 4, 32)).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_second_backward_is_refused_as_by_autograd(tmp_path: Path) -> None:
    with GeminiDDP(seeded(Net), **offloaded(tmp_path, 300 * KIB)) as model:
        loss = net_loss(model, 0)
        loss.backward()
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()


class Penalized(nn.Module):
    """Smooth, so that second derivatives exist."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers."""
        for fc in self.fc:
            x = torch.tanh(fc(x))
        return x


def penalty(model: nn.Module, index: int) -> Tensor:
    x = random_batch(index, 6, 32).requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return out.square().mean() + 0.01 * slope.square().sum()


def test_gradients_of_gradients_are_the_same(tmp_path: Path) -> None:
    both(Penalized, penalty, Recipe(steps=4), offloaded(tmp_path))
