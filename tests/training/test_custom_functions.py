"""Custom autograd functions that save weights train as in torch, whatever hooks look at what is saved."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from training_harness import KIB, Recipe, assert_trains_alike, moved_bytes, tight
from training_models import Around, square_loss

WIDTH = 32


class Whole(torch.autograd.Function):
    """Save the weight itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class Parts(torch.autograd.Function):
    """Save views of the weight: one that begins where it does, and one that does not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight.t(), weight[WIDTH // 2 :])
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, turned, lower = ctx.saved_tensors
        upper = turned[:, : WIDTH // 2].t()
        return grad @ torch.cat((upper, lower)), grad.t() @ x


class Accumulating(torch.autograd.Function):
    """Add to the gradient of the weight by hand, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, weight = ctx.saved_tensors
        if weight.grad is None:
            weight.grad = grad.t() @ x
        else:
            weight.grad.add_(grad.t() @ x)
        return grad @ weight, None


class Net(nn.Module):
    """Layers of one function, of which every other shares its weight with the one before it."""

    def __init__(self, function: Any, around: str) -> None:
        super().__init__()
        self.function, self.around = function, around
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 6) for _ in range(6))

    def layer(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(self.function.apply(torch.tanh(self.function.apply(x, weight)), weight))

    def forward(self, x: Tensor) -> Tensor:
        hooks: Any = {"save_on_cpu": save_on_cpu, "other hooks": _doing_nothing}.get(self.around, nullcontext)
        for weight in self.weights:
            if self.around.endswith("reentrant"):
                x = checkpoint(self.layer, x, weight, use_reentrant=self.around == "reentrant")
            else:
                with hooks():
                    x = self.layer(x, weight)
        return x


def _doing_nothing() -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)


AROUND = ["nothing", "non-reentrant", "reentrant", "other hooks", "save_on_cpu"]
CASES = [(function, around) for function in (Whole, Parts) for around in AROUND]
CASES.append((Accumulating, "nothing"))  # around it torch itself hands back other tensors


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(("function", "around"), CASES)
def test_a_function_that_saves_weights_trains_alike(
    function: Any, around: str, offload: bool, tmp_path: Path
) -> None:
    options = tight(tmp_path, 48 * KIB, activation_offload=offload)
    got = assert_trains_alike(lambda: Around(Net(function, around)), square_loss, options, Recipe(steps=5))
    assert moved_bytes(got.stats) > 0
