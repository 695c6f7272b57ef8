"""A model with managed memory as the training loop of a job drives it, and the options for its memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from gemini import checkpoint
from gemini.errors import ConfigError
from gemini.model.ddp import GeminiDDP
from gemini.model.handle import handle_of
from gemini.model.in_place import InPlace
from gemini.optim import GeminiOptimizer
from gemini.timeline.event_recorder import TimelineRecorder


class Tiered(Protocol):
    """A model with managed memory under training. It can be measured, saved and restored. The caller that
    makes it closes it."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that a learning-rate scheduler drives."""

    def stats(self) -> dict[str, Any]:
        """Return the runtime's counters, see ``GeminiDDP.stats``."""

    def timeline(self) -> list[dict[str, Any]]:
        """Return bytes per tier at every moment of the last complete step."""

    def save(self, directory: Path, scheduler: Any, extra: Mapping[str, Any]) -> None:
        """Write a checkpoint into ``directory``, atomically."""

    def load(self, directory: Path, scheduler: Any) -> dict[str, Any]:
        """Restore a checkpoint bit for bit, and return its ``extra``. Raise CheckpointError if it does not
        match."""

    def close(self) -> None:
        """Release all resources; the model cannot be used afterwards."""


class ManagedTraining:
    """The common part of all managed models (a GeminiDDP, or a handle) with their optimizer."""

    optimizer: GeminiOptimizer

    def __init__(self, model: GeminiDDP | InPlace, optimizer: GeminiOptimizer) -> None:
        self._model = model
        self._over_ranks = handle_of(model).peers is not None
        self.optimizer = optimizer

    def run_step(self, step: Callable[[], float]) -> float:
        """Call ``step``; if memory runs out, call it a second time. Over several ranks it is never
        repeated."""
        return step() if self._over_ranks else self._model.retry_step(step)

    def backward(self, loss: Tensor) -> None:
        """Run the managed backward pass."""
        self.optimizer.backward(loss)

    def step(self) -> None:
        """Update every chunk on its current tier, and release the gradients."""
        self.optimizer.step()

    def stats(self) -> dict[str, Any]:
        """Return the runtime's counters."""
        return dict(self._model.stats())

    def timeline(self) -> list[dict[str, Any]]:
        """Return the last complete step, moment by moment."""
        return list(self._model.timeline())

    def record_timeline(self) -> TimelineRecorder:
        """Return a context manager that records steps."""
        return self._model.record_timeline()

    def save(self, directory: Path, scheduler: Any, extra: Mapping[str, Any]) -> None:
        """Stream model, optimizer, scheduler and RNG state to ``directory``."""
        checkpoint.save(directory, self._model, self.optimizer, scheduler=scheduler, extra=dict(extra))

    def load(self, directory: Path, scheduler: Any) -> dict[str, Any]:
        """Stream the state back from ``directory``, and return the checkpoint's ``extra``."""
        return dict(checkpoint.load(directory, self._model, self.optimizer, scheduler=scheduler))

    def close(self) -> None:
        """Release chunks, threads and the disk file."""
        self._model.close()


POLICIES = ("auto", "cpu", "cuda", "const")
PRECISIONS = ("fp32", "bf16")
ACTIVATIONS = ("keep", "offload", "plan")


@dataclass(frozen=True)
class MemoryOptions:
    """Memory options of every job. Sizes are in bytes; None lets the runtime choose a budget. ``device`` is
    an argument for ``GeminiDDP``."""

    device: str = "cpu"
    device_bytes: int | None = None
    host_bytes: int | None = None
    disk_dir: str | None = None
    disk_bytes: int | None = None
    non_model_bytes: int | None = None
    policy: str = "auto"
    precision: str = "fp32"
    activations: str = "keep"

    @property
    def device_kind(self) -> str:
        """The kind of device, ``cpu`` or ``cuda``. Devices of one kind compute the same numbers."""
        return self.device.partition(":")[0]

    def managed_options(self) -> dict[str, Any]:
        """Return the equivalent keywords of ``GeminiDDP``."""
        return {
            "device": self.device,
            "placement_policy": self.policy,
            "mixed_precision": "bf16" if self.precision == "bf16" else None,
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
            "disk_dir": self.disk_dir,
            "disk_bytes": self.disk_bytes,
            "non_model_bytes": self.non_model_bytes,
            "activation_offload": False if self.activations == "keep" else "auto",
            "activation_recompute": self.activations == "plan",
        }

    def check_activations(self) -> None:
        """Raise ConfigError if ``--activations`` is incompatible with the other options."""
        if self.activations not in ACTIVATIONS:
            raise ConfigError(
                f"--activations is {self.activations!r}; it must be one of {', '.join(ACTIVATIONS)}"
            )
        if self.activations != "keep" and not (self.disk_dir or self.host_bytes):
            raise ConfigError(
                f"--activations {self.activations} needs a tier below DEVICE; add --disk-dir DIR, or "
                "--host-bytes"
            )
        if self.activations == "plan" and self.device_kind != "cpu":
            raise ConfigError(
                f"--activations plan supports only the CPU, not --device {self.device}; use "
                "--activations offload, or --activation-checkpointing"
            )
        if self.activations != "keep" and self.policy != "auto":
            raise ConfigError(
                f"--activations {self.activations} needs --policy auto, which measures how much "
                "stays on DEVICE"
            )


def make_disk_directory(path: str) -> None:
    """Create the directory of the DISK tier if it does not exist. Raise ConfigError if that fails."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot create --disk-dir {path}: {error.strerror}; name another directory"
        ) from error
