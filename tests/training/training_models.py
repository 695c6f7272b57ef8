"""The tiny GPT on which law 1 is stated, and its data."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gemini.jobs.gpt.model import GPT, GPTConfig, language_loss

CONFIG = GPTConfig(vocab=32, layers=2, hidden=32, heads=2, seq=16)


class TinyGPT(GPT):
    """The GPT of the main job; ``checkpointing`` is "none", "reentrant" or "non-reentrant"."""

    def __init__(self, checkpointing: str = "none") -> None:
        super().__init__(CONFIG)
        self.checkpointing = checkpointing

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits for ``tokens``."""
        if self.checkpointing == "none" or not torch.is_grad_enabled():
            return super().forward(tokens)
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        return F.linear(self.norm(x), self.tokens.weight)


def gpt_loss(model: nn.Module, index: int) -> Tensor:
    """Return the loss of batch ``index``: two sequences of tokens."""
    tokens = torch.randint(0, CONFIG.vocab, (2, 17), generator=torch.Generator().manual_seed(index))
    return language_loss(model(tokens[:, :-1]), tokens[:, 1:])


class Around(nn.Module):
    """A core, ``[n, 32]`` to ``[n, 32]``, between layers whose chunks push its own out of a small DEVICE."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(32, 32)
        self.core = core
        self.after = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        """Run ``x`` through the core."""
        out: Tensor = self.after(self.core(torch.tanh(self.before(x))))
        return out


def square_loss(model: nn.Module, index: int) -> Tensor:
    """Return the mean square of the output for batch ``index`` of shape ``[6, 32]``."""
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(index))
    out: Tensor = model(x.to(next(model.parameters()).dtype))
    return out.float().square().mean()
