"""The engines that run training steps: the tiered runtime, and plain torch to compare it with.

Both run the same model, loss and Adam from the same seed. The plain engine is the reference of law 1:
ordinary fp32, or a short loop with bf16 weights and fp32 masters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

import gemini
from gemini.jobs.gpt.config import TrainConfig
from gemini.jobs.gpt.model import GPT
from gemini.jobs.run.managed import ManagedTraining, Tiered, make_disk_directory
from gemini.system.device import resolve_device

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.01


class Engine(Protocol):
    """A model under training. One thread uses it."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that a learning-rate scheduler drives."""

    @property
    def device(self) -> torch.device:
        """The device on which the inputs must be."""

    def run_step(self, step: Callable[[], float]) -> float:
        """Call ``step``, a whole training step; call it again if memory ran out and the step was undone."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits for int64 ``tokens`` ``[batch, seq]``."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of ``loss`` to the accumulated gradients."""

    def step(self) -> None:
        """Clip, update every weight, and discard the gradients."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight in fp32 on the CPU; with 16-bit training, the masters."""


class TieredEngine(Engine, Tiered, Protocol):
    """An engine with managed memory."""


class ManagedEngine(ManagedTraining):
    """Trains under byte budgets with ``GeminiDDP``; the model is never whole in memory."""

    def __init__(self, config: TrainConfig) -> None:
        torch.manual_seed(config.seed)
        with gemini.init_on("meta"):
            module = GPT(config.gpt())
        if config.disk_dir is not None:
            make_disk_directory(config.disk_dir)
        model = gemini.GeminiDDP(
            module,
            **config.managed_options(),
            optimizer_rule="adam",
        )
        adam = gemini.HybridAdam(model.parameters(), lr=config.lr, betas=BETAS, weight_decay=WEIGHT_DECAY)
        super().__init__(model, gemini.GeminiOptimizer(adam, model, max_norm=config.clip))
        self._network = model
        self.device = next(iter(model.parameters())).device

    def forward(self, tokens: Tensor) -> Tensor:
        """Run the managed forward pass."""
        logits: Tensor = self._network(tokens)
        return logits

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the full fp32 weights in the module's order."""
        yield from self._model.state_dict().items()


class PlainEngine:
    """Trains a fully resident model with the same optimizer class and without the runtime."""

    def __init__(self, config: TrainConfig) -> None:
        torch.manual_seed(config.seed)
        self.device = resolve_device(config.device)
        self._module = GPT(config.gpt()).to(self.device)
        self._clip = config.clip
        self._masters: list[nn.Parameter] | None = None
        if config.precision == "bf16":
            self._masters = [nn.Parameter(p.detach().clone()) for p in self._module.parameters()]
            self._module.to(torch.bfloat16)
        self.optimizer: torch.optim.Optimizer = gemini.HybridAdam(
            self._updated(), lr=config.lr, betas=BETAS, weight_decay=WEIGHT_DECAY
        )

    def run_step(self, step: Callable[[], float]) -> float:
        """Call ``step``."""
        return step()

    def forward(self, tokens: Tensor) -> Tensor:
        """Run the plain forward pass."""
        logits: Tensor = self._module(tokens)
        return logits

    def backward(self, loss: Tensor) -> None:
        """Run the plain backward pass."""
        loss.backward()

    def step(self) -> None:
        """Clip by global norm, update, and copy the masters, if there are any, to the 16-bit weights."""
        if self._masters is not None:
            for master, weight in zip(self._masters, self._module.parameters(), strict=True):
                master.grad = None if weight.grad is None else weight.grad.float()
        if self._clip > 0:
            torch.nn.utils.clip_grad_norm_(self._updated(), self._clip)
        self.optimizer.step()
        self._cast_masters()
        self._module.zero_grad()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that the optimizer updates."""
        names = (name for name, _ in self._module.named_parameters())
        for name, weight in zip(names, self._updated(), strict=True):
            yield name, weight.detach().cpu()

    def _cast_masters(self) -> None:
        if self._masters is None:
            return
        with torch.no_grad():
            for master, weight in zip(self._masters, self._module.parameters(), strict=True):
                weight.copy_(master)

    def _updated(self) -> list[nn.Parameter]:
        return list(self._module.parameters()) if self._masters is None else self._masters
