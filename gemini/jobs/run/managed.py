"""A model under training whose memory is managed, as the loop of a job drives it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from gemini import checkpoint
from gemini.model.ddp import GeminiDDP
from gemini.model.in_place import InPlace
from gemini.optim import GeminiOptimizer
from gemini.timeline import TimelineRecorder


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


class ManagedTraining:
    """What is the same for every managed model (a GeminiDDP, or a handle) with its optimizer."""

    optimizer: GeminiOptimizer

    def __init__(self, model: GeminiDDP | InPlace, optimizer: GeminiOptimizer) -> None:
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
