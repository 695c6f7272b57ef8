"""The two models that a case compares: plain torch with everything resident, and the same one managed."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gemini.errors import ConfigError
from gemini.jobs.gpt.model import GPT, GPTConfig, language_loss, num_parameters
from gemini.model.ddp import GeminiDDP
from gemini.optim import CPUAdam, GeminiOptimizer
from gemini.optim.managed_groups import Overlap
from gemini.runtime import init_on

# fp32: parameter, gradient and the two moments of Adam.
MODEL_DATA_BYTES_PER_PARAMETER = 16
# bf16: parameter, gradient and remainder, two int8 moments and the scales of their blocks.
COMPACT_BYTES_PER_PARAMETER = 8 + 8 / 256
_SEED = 1234
_LEARNING_RATE = 1e-4

GPT2_124M = GPTConfig(vocab=50257, layers=12, hidden=768, heads=12, seq=1024)

Batch = tuple[Tensor, Tensor]


def model_data_bytes(config: GPTConfig, *, compact: bool = False) -> int:
    """Return the bytes of parameters, gradients and Adam states of ``GPT(config)``, without padding."""
    each = COMPACT_BYTES_PER_PARAMETER if compact else MODEL_DATA_BYTES_PER_PARAMETER
    return math.ceil(each * num_parameters(config))


def make_batches(config: GPTConfig, *, count: int, batch: int, seq: int) -> list[Batch]:
    """Return ``count`` batches of random tokens, the same in every process.

    Raises:
        ConfigError: ``seq`` is longer than the model's positions.
    """
    if seq > config.seq:
        raise ConfigError(f"sequences of {seq} tokens do not fit a model of {config.seq} positions")
    generator = torch.Generator().manual_seed(_SEED)
    batches = []
    for _ in range(count):
        tokens = torch.randint(config.vocab, (batch, seq + 1), generator=generator)
        batches.append((tokens[:, :-1], tokens[:, 1:]))
    return batches


class Trainee(Protocol):
    """A model and its optimizer."""

    def step(self, batch: Batch) -> float:
        """Train on one batch and return its loss."""


class StepParts(NamedTuple):
    """The loss of one step and the seconds of its parts, as the program has them: with updates that wait,
    ``forward`` contains those of the step before."""

    loss: float
    forward: float
    backward: float
    update: float

    @property
    def whole(self) -> float:
        """The seconds of the step."""
        return self.forward + self.backward + self.update


class PlainTrainee:
    """Plain torch with this project's CPUAdam; everything stays in memory.

    ``keep_gradients``: fill gradients with zeros instead of giving them up, so that model data is 16 bytes
    per parameter at every moment after the first step.
    """

    def __init__(self, config: GPTConfig, *, keep_gradients: bool = False) -> None:
        torch.manual_seed(_SEED)
        self._model = GPT(config)
        self._optimizer = CPUAdam(self._model.parameters(), lr=_LEARNING_RATE)
        self._set_to_none = not keep_gradients

    def step(self, batch: Batch) -> float:
        """Train on one batch and return its loss."""
        loss = language_loss(self._model(batch[0]), batch[1])
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=self._set_to_none)
        return float(loss.detach())


class ManagedTrainee:
    """The same model under GeminiDDP, built on ``meta`` so that it is never whole outside its chunks.

    ``compact``: bf16 weights with remainders and int8 moments in place of fp32. ``overlap`` and ``max_norm``
    are GeminiOptimizer's, ``budgets`` keywords of GeminiDDP. Close it, or leave that to the end of the
    process.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        compact: bool = False,
        overlap: Overlap = True,
        max_norm: float = 0.0,
        **budgets: Any,
    ) -> None:
        torch.manual_seed(_SEED)
        with init_on("meta"):
            module = GPT(config).to(torch.bfloat16 if compact else torch.float32)
        # A rule that is announced gets room for fp32 states; compact ones come with the optimizer.
        self.model = GeminiDDP(module, "cpu", optimizer_rule="none" if compact else "adam", **budgets)
        formats: dict[str, Any] = {"state_dtype": "int8", "master_remainders": True} if compact else {}
        adam = CPUAdam(self.model.parameters(), lr=_LEARNING_RATE, **formats)
        self._optimizer = GeminiOptimizer(adam, self.model, overlap=overlap, max_norm=max_norm)

    def step(self, batch: Batch) -> float:
        """Train on one batch and return its loss."""
        return self.step_in_parts(batch).loss

    def step_in_parts(self, batch: Batch) -> StepParts:
        """Train on one batch; return its loss and the seconds of each part of the step."""
        times = [time.perf_counter()]
        loss = language_loss(self.model(batch[0]), batch[1])
        times.append(time.perf_counter())
        self._optimizer.backward(loss)
        times.append(time.perf_counter())
        self._optimizer.step()
        times.append(time.perf_counter())
        return StepParts(float(loss.detach()), *(after - before for before, after in pairwise(times)))

    @property
    def resident(self) -> bool:
        """Whether all chunks stay on DEVICE."""
        return self.model._gemini.manager.resident

    def close(self) -> None:
        """Release memory and disk space."""
        self.model.close()


def timed_step(trainee: Trainee, batch: Batch) -> tuple[float, float]:
    """Train on one batch; return the loss and the seconds it took."""
    start = time.perf_counter()
    loss = trainee.step(batch)
    return loss, time.perf_counter() - start


def train(trainee: Trainee, batches: Sequence[Batch]) -> list[float]:
    """Train on every batch once and return the losses."""
    return [trainee.step(batch) for batch in batches]
