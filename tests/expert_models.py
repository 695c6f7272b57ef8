"""Small mixtures of experts whose layers call them in the ways that models do."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from gemini import GeminiDDP

EXPERTS, WIDTH, TOP = 8, 64, 2
ROW_BYTES = WIDTH * WIDTH * 4  # 16 KiB


class Arrays(nn.Module):
    """Experts in two parameters with a row for each, as transformers has them."""

    def __init__(self, product: str) -> None:
        super().__init__()
        self.num_experts, self.product = EXPERTS, product
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 8)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 8)
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH) / 8)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of what the chosen experts make of each token."""
        experts, order = chosen.flatten().sort(stable=True)
        tokens = x[order // TOP]
        made = getattr(self, f"_{self.product}")(tokens, experts) * weights.flatten()[order, None]
        return made[order.argsort()].view(len(x), TOP, WIDTH).sum(1)

    def _grouped(self, tokens: Tensor, experts: Tensor) -> Tensor:
        ends = torch.bincount(experts, minlength=EXPERTS).cumsum(0, dtype=torch.int32)
        hidden = functional.grouped_mm(tokens, self.up.transpose(-2, -1), offs=ends) + self.bias[experts]
        return functional.grouped_mm(functional.silu(hidden), self.down.transpose(-2, -1), offs=ends)

    def _one_by_one(self, tokens: Tensor, experts: Tensor) -> Tensor:
        made = torch.zeros_like(tokens)
        for expert in experts.unique():
            mine = experts == expert
            hidden = functional.linear(tokens[mine], self.up[expert]) + self.bias[expert]
            made[mine] = functional.linear(functional.silu(hidden), self.down[expert])
        return made

    def _gathered(self, tokens: Tensor, experts: Tensor) -> Tensor:
        hidden = torch.bmm(self.up[experts], tokens.unsqueeze(-1)).squeeze(-1) + self.bias[experts]
        return torch.bmm(self.down[experts], functional.silu(hidden).unsqueeze(-1)).squeeze(-1)


class Expert(nn.Module):
    """One of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Run both layers."""
        return self.down(functional.silu(self.up(x)))  # type: ignore[no-any-return]


class Mixture(nn.Module):
    """A layer that routes each token to two experts."""

    def __init__(self, product: str) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = (
            nn.ModuleList(Expert() for _ in range(EXPERTS)) if product == "list" else Arrays(product)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Add what the chosen experts make of each token."""
        weights, chosen = self.router(x).softmax(-1).topk(TOP)
        if not isinstance(self.experts, nn.ModuleList):
            return x + self.experts(x, chosen, weights)
        made = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            if len(token):
                made.index_add_(0, token, expert(x[token]) * weights[token, place, None])
        return x + made


PRODUCTS = ("grouped", "one_by_one", "gathered", "list")


def model(product: str, layers: int = 3) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(*(Mixture(product) for _ in range(layers)), nn.Linear(WIDTH, 4))
    return made.requires_grad_(False)


def tokens(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def managed(module: nn.Module, rows: float, disk: Path) -> GeminiDDP:
    """``module`` with room on DEVICE for so many experts' matrices."""
    room = int(rows * ROW_BYTES)
    return GeminiDDP(module, device_bytes=room, host_bytes=0, disk_dir=disk, non_model_bytes=0)
