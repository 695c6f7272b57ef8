"""The job of the cases of ``gemini bench parallel``: a LLaMA-like model on the same tokens, over a grid."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from gemini_bench.llama import Llama, LlamaConfig, SplitAttention, num_parameters
from gemini_bench.trainee import Batch

ADAM: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0}
_SEED = 1234


@dataclass(frozen=True)
class Job:
    """Training over ``pp`` x ``dp`` x ``tp`` ranks, as both sides do it. ``batch``: sequences of ``seq``
    tokens that the ranks of one model take in a step, in ``microbatches``; ``chunks``: stages of a rank in
    interleaved schedules; ``large``: the model whose memory is measured, which outweighs torch itself.
    ``place``: a directory for what is not in memory."""

    model: LlamaConfig
    large: LlamaConfig
    pp: int = 1
    dp: int = 1
    tp: int = 1
    batch: int = 2
    seq: int = 128
    microbatches: int = 1
    chunks: int = 2
    warmup_steps: int = 2
    measured_steps: int = 9
    memory_steps: int = 2  # the second one has gradients beside states
    place: str = "."

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Job:
        """Return the job that ``dataclasses.asdict`` has made plain data of."""
        values = {field.name: options[field.name] for field in dataclasses.fields(cls)}
        models = {name: LlamaConfig(**values[name]) for name in ("model", "large")}
        return cls(**{**values, **models})

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self.pp * self.dp * self.tp

    def model_data_bytes(self) -> int:
        """The bytes of parameters, gradients and moments of a rank, if no copy of the model shares them."""
        return 16 * num_parameters(self.model) // (self.pp * self.tp)

    def make_model(self) -> Llama:
        """Return the whole model with its first values, the same in every process."""
        torch.manual_seed(_SEED)
        return Llama(self.model, SplitAttention)

    def batch_of(self, step: int, rank: int) -> Batch:
        """Return the tokens of a step, and those that follow them, for the model that ``rank`` has a part
        of. Ranks lie in the order pp, dp, tp, the last one neighbours."""
        copy = rank // self.tp % self.dp
        generator = torch.Generator().manual_seed(_SEED + step * self.dp + copy)
        tokens = torch.randint(self.model.vocab, (self.batch, self.seq + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Contender(Protocol):
    """A model over the ranks, and its trainer."""

    def step(self, batch: Batch) -> float | None:
        """Train on one batch; return its loss, or None where other ranks have it."""

    def close(self) -> None:
        """Release memory."""


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss of ``logits`` (batch, seq, vocab) against ``labels`` (batch, seq)."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
