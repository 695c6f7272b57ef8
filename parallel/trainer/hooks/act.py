"""Hooks that act during a run: step a scheduler, save, profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from gemini.checkpoint.contents import Scheduler
from gemini.errors import ConfigError
from gemini.parallel.engine import save_checkpoint
from gemini.parallel.launch import global_context
from gemini.parallel.trainer.hooks.metric import BaseHook
from gemini.parallel.trainer.metrics import RateMetric
from gemini.parallel.trainer.trainer_state import Training
from gemini.system.device import cuda_available

_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin")  # other dots belong to directory names: run-1.5


class LRSchedulerHook(BaseHook):
    """Steps a scheduler after every epoch, or every iteration.

    Args:
        store_lr_in_state: add the rate to the metrics of training, as ``LR``.
    """

    def __init__(
        self, lr_scheduler: Any, by_epoch: bool = True, store_lr_in_state: bool = True, priority: int = 1
    ) -> None:
        super().__init__(priority)
        self.lr_scheduler, self.by_epoch = lr_scheduler, by_epoch
        self._rate = RateMetric(epoch_only=by_epoch) if store_lr_in_state else None

    def after_hook_is_attached(self, trainer: Training) -> None:
        """Add the metric."""
        if self._rate is not None:
            self._rate.update(self.lr_scheduler.get_last_lr()[0])
            trainer.metrics["train"]["LR"] = self._rate

    def after_train_iter(self, trainer: Training, output: Any, label: Any, loss: Any) -> None:
        """Step after an iteration."""
        if not self.by_epoch:
            self._step()

    def after_train_epoch(self, trainer: Training) -> None:
        """Step after an epoch."""
        if self.by_epoch:
            self._step()

    def _step(self) -> None:
        self.lr_scheduler.step()
        if self._rate is not None:
            self._rate.update(self.lr_scheduler.get_last_lr()[0])


class SaveCheckpointHook(BaseHook):
    """Saves with :func:`gemini.parallel.engine.save_checkpoint` after every ``interval`` epochs.

    Args:
        checkpoint_dir: a directory, which gets ``epoch_<number>.pt``, or a file (``*.pt``, ``.pth``,
            ``.ckpt``, ``.bin``), which each save replaces.
        model: None saves the engine's model with its optimizer.
        lr_scheduler: saved too, if given.
        save_by_iter: ``interval`` counts iterations, and files are named ``step_<number>.pt``.

    Raises:
        ConfigError: ``checkpoint_dir`` is missing, or ``interval`` is below 1.
    """

    def __init__(
        self,
        interval: int = 1,
        checkpoint_dir: str | Path | None = None,
        model: nn.Module | None = None,
        lr_scheduler: Scheduler | None = None,
        *,
        save_by_iter: bool = False,
        priority: int = 10,
    ) -> None:
        super().__init__(priority)
        if checkpoint_dir is None:
            raise ConfigError("SaveCheckpointHook needs checkpoint_dir: a directory, or the path of a file")
        if interval < 1:
            raise ConfigError(f"interval is {interval}; give a whole number, 1 or more")
        self.interval, self.path = interval, Path(checkpoint_dir)
        self.model, self.lr_scheduler, self.save_by_iter = model, lr_scheduler, save_by_iter

    def after_train_iter(self, trainer: Training, output: Any, label: Any, loss: Any) -> None:
        """Save after an iteration."""
        if self.save_by_iter and trainer.cur_step % self.interval == 0:
            self._save(trainer, f"step_{trainer.cur_step}.pt")

    def after_train_epoch(self, trainer: Training) -> None:
        """Save after an epoch."""
        if not self.save_by_iter and trainer.cur_epoch % self.interval == 0:
            self._save(trainer, f"epoch_{trainer.cur_epoch}.pt")

    def _save(self, trainer: Training, name: str) -> None:
        file = self.path if self.path.suffix in _SUFFIXES else self.path / name
        if self.model is not None:
            save_checkpoint(file, trainer.cur_epoch, self.model, None, self.lr_scheduler)
            return
        engine = trainer.engine
        save_checkpoint(file, trainer.cur_epoch, engine.model, engine.optimizer, self.lr_scheduler)


class ProfilerHook(BaseHook):
    """Profiles some iterations with :mod:`torch.profiler`, and writes them to ``log_dir`` for TensorBoard or
    chrome://tracing.

    Args:
        wait, warmup, active, repeat: see :func:`torch.profiler.schedule`.
        options: further options of :class:`torch.profiler.profile`.
    """

    def __init__(
        self,
        log_dir: str,
        *,
        wait: int = 1,
        warmup: int = 1,
        active: int = 3,
        repeat: int = 1,
        priority: int = 10,
        **options: Any,
    ) -> None:
        super().__init__(priority)
        worker = f"rank_{global_context.get_global_rank()}"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda_available() else [])]
        self.profiler = profile(
            activities=activities,
            schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=repeat),
            on_trace_ready=torch.profiler.tensorboard_trace_handler(log_dir, worker),
            **options,
        )

    def before_train(self, trainer: Training) -> None:
        """Start the profiler."""
        self.profiler.start()

    def after_train_iter(self, trainer: Training, output: Any, label: Any, loss: Any) -> None:
        """Tell the profiler that an iteration is over."""
        self.profiler.step()

    def after_train(self, trainer: Training) -> None:
        """Stop the profiler."""
        self.profiler.stop()
