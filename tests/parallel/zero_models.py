"""Models and training loops for the tests of ZeRO over ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import torch
from processes import own_part
from torch import Tensor, nn

from gemini.parallel.zero import LowLevelZeroOptimizer

ROWS = 12  # of a global batch: divisible by 1, 2, 3 and 4
# Options of LowLevelZeroOptimizer that may change no bit.
EVERY_WAY: list[dict[str, Any]] = [
    {"stage": stage, "reduce_bucket_size": size, "overlap_communication": overlap, "cpu_offload": size == 1}
    for stage, size, overlap in product([1, 2], [1, 300, 2**20], [False, True])
]


class OddNet(nn.Module):
    """Tied weights, sizes that no number of ranks divides, a parameter that is not used, one in another
    memory order."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 11)
        self.hidden = nn.Linear(11, 13)
        self.back = nn.Linear(13, 11)
        self.norm = nn.LayerNorm(11)
        self.gain = nn.Parameter(torch.ones(()))
        self.bias = nn.Parameter(torch.zeros(17))
        self.unused = nn.Parameter(torch.ones(5))
        self.hidden.weight = nn.Parameter(torch.randn(11, 13).mul(0.3).t())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.back(torch.tanh(self.hidden(x)))
        return self.norm(x) * self.gain @ self.embed.weight.t() + self.bias


def tokens_of(step: int) -> Tensor:
    """Return the global batch of a step (rows, 6)."""
    return torch.randint(0, 17, (ROWS, 6), generator=torch.Generator().manual_seed(100 + step))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean cross entropy of predicting the next token, in fp32."""
    tokens = tokens.to(next(model.parameters()).device)
    logits = model(tokens[:, :-1]).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def odd_net() -> OddNet:
    """Return the same model on every call."""
    torch.manual_seed(7)
    return OddNet()


def row_major_net() -> OddNet:
    """Return an OddNet whose parameters are all in row-major order."""
    model = odd_net()
    model.hidden.weight = nn.Parameter(model.hidden.weight.detach().contiguous())
    return model


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def train(
    num_steps: int = 4,
    make: Callable[[Any], torch.optim.Optimizer] = adamw,
    micro_batches: int = 1,
    model: nn.Module | None = None,
    **options: Any,
) -> tuple[nn.Module, LowLevelZeroOptimizer]:
    """Train an OddNet on this rank's share of the batches; micro-batches but the last without sync."""
    model = model or odd_net()
    optimizer = LowLevelZeroOptimizer(make(model.parameters()), **options)
    for step in range(num_steps):
        parts = own_part(tokens_of(step)).chunk(micro_batches)
        for index, part in enumerate(parts):
            with optimizer.no_sync() if index + 1 < len(parts) else nullcontext():
                optimizer.backward(loss_of(model, part) / len(parts))
        optimizer.step()
    return model, optimizer


def train_plain(
    num_steps: int = 4,
    make: Callable[[Any], torch.optim.Optimizer] = adamw,
    max_norm: float = 0.0,
    model: nn.Module | None = None,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Train an OddNet on the whole batches by plain torch."""
    model = model or odd_net()
    optimizer = make(model.parameters())
    for step in range(num_steps):
        loss_of(model, tokens_of(step)).backward()
        if max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    different = [name for name in want if not torch.equal(got[name], want[name])]
    assert not different, f"{different} differ"
