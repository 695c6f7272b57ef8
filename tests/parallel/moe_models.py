"""Small mixtures that train over ranks as in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gemini.parallel.moe import (
    Capacity,
    Experts,
    MoeLayer,
    TopKRouter,
    VanillaFFN,
    moe_mlp_args,
    moe_set_seed,
)

EXPERTS, WIDTH, TOP, ROWS, STEPS = 4, 16, 2, 24, 4


class Rows(nn.Module):
    """Experts in parameters with a row for each, called as those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH) / 4)

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of what the chosen experts make of each token."""
        made = torch.zeros_like(tokens)
        for expert in chosen.unique().tolist():
            token, place = torch.where(chosen == expert)
            result = functional.linear(tokens[token], self.up[expert], self.bias[expert]).tanh()
            made = made.index_add(0, token, result * weights[token, place, None])
        return made


class CalledLayer(nn.Module):
    """A layer that routes each token to two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Rows()

    def forward(self, x: Tensor) -> Tensor:
        """Add what the chosen experts make of each token."""
        weights, chosen = self.router(x).softmax(-1).topk(TOP)
        return x + self.experts(x, chosen, weights)  # type: ignore[no-any-return]


class OwnLayer(nn.Module):
    """The same with layers of the library."""

    def __init__(self, capacity: Capacity | None = None, **options: Any) -> None:
        super().__init__()
        router = TopKRouter(TOP, capacity=capacity)
        experts = Experts(VanillaFFN, EXPERTS, **moe_mlp_args(WIDTH, 2 * WIDTH))
        self.layer = MoeLayer(WIDTH, EXPERTS, router, experts, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Add what the chosen experts make of each token."""
        return x + self.layer(x)  # type: ignore[no-any-return]


def mixture(layer: Callable[[], nn.Module] = OwnLayer) -> nn.Sequential:
    """Two layers of experts between dense ones."""
    moe_set_seed(3)
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), layer(), layer(), nn.Linear(WIDTH, 3))


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Return tokens and targets of a global batch."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, 3, generator=generator)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean loss."""
    return functional.mse_loss(output, target)


def train_alone(model: nn.Module) -> dict[str, Any]:
    """Train in one process with SGD; return losses, norms and weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses, norms = [], []
    for step in range(STEPS):
        tokens, target = batch_of(step)
        loss = loss_of(model(tokens), target)
        loss.backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        norms.append(float(nn.utils.get_total_norm(grads)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "weights": dict(model.state_dict())}
