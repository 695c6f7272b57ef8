"""What carries out a training step: the tiered runtime, or plain torch to compare it with.

Both run the same model, loss and Adam from the same seed. The plain one is the yardstick of law 1: fp32 as
anyone would write it, bf16 as the short loop with bf16 weights and fp32 masters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import gemini
from gemini import checkpoint
from gemini.errors import ConfigError
from gemini.jobs.gpt.config import TrainConfig
from gemini.jobs.gpt.model import GPT
from gemini.model.ddp import GeminiDDP
from gemini.model.in_place import InPlace
from gemini.system.device import resolve_device
from gemini.timeline import TimelineRecorder

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.01


class Engine(Protocol):
    """A model under training, used by one thread."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Return what a learning-rate scheduler drives."""

    @property
    def device(self) -> torch.device:
        """Return where the inputs must be."""

    def run_step(self, step: Callable[[], float]) -> float:
        """Call ``step``, a whole training step; once more if memory ran out and it was taken back."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits for int64 ``tokens`` ``[batch, seq]``."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of ``loss`` to what has accumulated."""

    def step(self) -> None:
        """Clip, update every weight, and forget the gradients."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight in fp32 on the CPU, the masters where training is in 16 bits."""


class Tiered(Protocol):
    """A model under training whose memory is managed: it can be measured, saved and restored.

    Its maker closes it.
    """

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Return what a learning-rate scheduler drives."""

    def stats(self) -> dict[str, Any]:
        """Return the runtime's counters, see ``GeminiDDP.stats``."""

    def timeline(self) -> list[dict[str, Any]]:
        """Return bytes per tier at every moment of the last complete step."""

    def save(self, directory: Path, scheduler: Any, extra: Mapping[str, Any]) -> None:
        """Write a checkpoint into ``directory``, complete or not at all."""

    def load(self, directory: Path, scheduler: Any) -> dict[str, Any]:
        """Restore a checkpoint bit for bit, return its ``extra``. Raise CheckpointError if it is another."""

    def close(self) -> None:
        """Give everything back; the engine cannot be used afterwards."""


class TieredEngine(Engine, Tiered, Protocol):
    """An engine that is both."""


class ManagedTraining:
    """What is the same for every managed model (a GeminiDDP, or a handle) with its optimizer."""

    optimizer: gemini.GeminiOptimizer

    def __init__(self, model: GeminiDDP | InPlace, optimizer: gemini.GeminiOptimizer) -> None:
        self._model = model
        self.optimizer = optimizer

    def run_step(self, step: Callable[[], float]) -> float:
        """Call ``step``, if need be twice."""
        return self._model.retry_step(step)

    def backward(self, loss: Tensor) -> None:
        """Run the managed backward pass."""
        self.optimizer.backward(loss)

    def step(self) -> None:
        """Update every chunk where it lives; gives the gradients back too."""
        self.optimizer.step()

    def stats(self) -> dict[str, Any]:
        """Return the runtime's counters."""
        return dict(self._model.stats())

    def timeline(self) -> list[dict[str, Any]]:
        """Return the last complete step, moment by moment."""
        return list(self._model.timeline())

    def record_timeline(self) -> TimelineRecorder:
        """Return what records steps while it is entered."""
        return self._model.record_timeline()

    def save(self, directory: Path, scheduler: Any, extra: Mapping[str, Any]) -> None:
        """Stream model, optimizer, scheduler and RNG state to ``directory``."""
        checkpoint.save(directory, self._model, self.optimizer, scheduler=scheduler, extra=dict(extra))

    def load(self, directory: Path, scheduler: Any) -> dict[str, Any]:
        """Stream everything back."""
        return dict(checkpoint.load(directory, self._model, self.optimizer, scheduler=scheduler))

    def close(self) -> None:
        """Release chunks, threads and the disk file."""
        self._model.close()


class ManagedEngine(ManagedTraining):
    """Train under byte budgets with ``GeminiDDP``; the model is never whole in memory."""

    def __init__(self, config: TrainConfig) -> None:
        torch.manual_seed(config.seed)
        with gemini.init_on("meta"):
            module = GPT(config.gpt())
        if config.disk_dir is not None:
            make_disk_directory(config.disk_dir)
        model = gemini.GeminiDDP(
            module,
            device=config.device,
            placement_policy=config.policy,
            mixed_precision="bf16" if config.precision == "bf16" else None,
            device_bytes=config.device_bytes,
            host_bytes=config.host_bytes,
            disk_dir=config.disk_dir,
            disk_bytes=config.disk_bytes,
            non_model_bytes=config.non_model_bytes,
            activation_offload=False if config.activations == "keep" else "auto",
            activation_recompute=config.activations == "plan",
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
    """Train everything resident with the same optimizer class and no runtime at all."""

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
        """Clip by global norm, update, and copy the masters to 16 bits where there are any."""
        if self._masters is not None:
            for master, weight in zip(self._masters, self._module.parameters(), strict=True):
                master.grad = None if weight.grad is None else weight.grad.float()
        if self._clip > 0:
            torch.nn.utils.clip_grad_norm_(self._updated(), self._clip)
        self.optimizer.step()
        self._cast_masters()
        self._module.zero_grad()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights the optimizer updates."""
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


def make_disk_directory(path: str) -> None:
    """Make the directory of the DISK tier where there is none. Raise ConfigError where that cannot be."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make --disk-dir {path}: {error.strerror}") from error
