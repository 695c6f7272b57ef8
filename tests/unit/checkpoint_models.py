"""A small model with everything a checkpoint must hold, and a training loop that can stop and go on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import gemini
from gemini import checkpoint

KIB = 1024


class Model(nn.Module):
    """Tied, frozen, non-contiguous and unused parameters, buffers, and dropout."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(17, width)
        self.up = nn.Linear(width, 6 * width)
        self.scale = nn.Parameter(torch.ones(6 * width), requires_grad=False)
        self.norm = nn.BatchNorm1d(6 * width)
        self.dropout = nn.Dropout(0.25)
        self.down = nn.Linear(6 * width, width)
        self.mix = nn.Parameter(torch.randn(width, width).t())
        self.unused = nn.Parameter(torch.randn(40))
        self.head = nn.Linear(width, 17, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.up(self.tokens(tokens).mean(1)) * self.scale)
        x = self.down(self.dropout(F.gelu(x)))
        out: torch.Tensor = self.head(x @ self.mix)
        return out


@dataclass
class Run:
    """A managed model in training; ``losses`` are exact."""

    model: gemini.GeminiDDP
    optimizer: gemini.GeminiOptimizer
    scheduler: Any
    accumulate: int = 1
    losses: list[float] = field(default_factory=list)

    def train(self, steps: int) -> Run:
        for _ in range(steps):
            for _ in range(self.accumulate):
                tokens = torch.randint(
                    0, 17, (6, 5)
                )  # from the global generator, which a checkpoint restores
                loss = F.cross_entropy(self.model(tokens).float(), tokens[:, 0])
                self.losses.append(loss.item())
                self.optimizer.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
        return self

    def save(self, directory: Path, **options: Any) -> Path:
        return checkpoint.save(directory, self.model, self.optimizer, scheduler=self.scheduler, **options)

    def load(self, directory: Path) -> dict[str, Any]:
        return checkpoint.load(directory, self.model, self.optimizer, scheduler=self.scheduler)


def start(
    seed: int = 0, *, accumulate: int = 1, max_norm: float = 0.0, width: int = 32, **options: Any
) -> Run:
    """Build the model from ``seed`` and manage it; ``options`` go to GeminiDDP."""
    torch.manual_seed(seed)
    model = gemini.GeminiDDP(Model(width), **{"non_model_bytes": 0, **options})
    params = dict(model.module.named_parameters())
    trained = [p for p in params.values() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "lr": 3e-3},
    ]
    optimizer = gemini.GeminiOptimizer(gemini.HybridAdam(groups, lr=1e-2), model, max_norm=max_norm)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 4, 7], gamma=0.5)
    return Run(model, optimizer, scheduler, accumulate)


def assert_same(got: Run, want: Run) -> None:
    """Compare weights, buffers, moments, step counts and settings bit for bit."""
    assert_equal(got.model.state_dict(), want.model.state_dict())
    assert_equal(got.optimizer.state_dict(), want.optimizer.state_dict())
    assert got.scheduler.state_dict() == want.scheduler.state_dict()
    for name, param in got.model.module.named_parameters():
        other = dict(want.model.module.named_parameters())[name]
        assert torch.equal(param.detach().clone().float(), other.detach().clone().float()), name


def assert_equal(got: Any, want: Any, where: str = "") -> None:
    """Compare nested dicts and lists of tensors and numbers exactly."""
    assert isinstance(got, type(want)), where
    if isinstance(got, torch.Tensor):
        assert got.dtype == want.dtype, where
        assert torch.equal(got, want), where
    elif isinstance(got, dict):
        assert got.keys() == want.keys(), where
        for key in got:
            assert_equal(got[key], want[key], f"{where}.{key}")
    elif isinstance(got, (list, tuple)):
        assert len(got) == len(want), where
        for index, (one, other) in enumerate(zip(got, want, strict=True)):
            assert_equal(one, other, f"{where}[{index}]")
    else:
        assert got == want, where
