"""Hooks that log metrics, memory and timers."""

from __future__ import annotations

import importlib
from collections.abc import Collection
from typing import Any

import psutil

from gemini.errors import ConfigError
from gemini.parallel.launch import get_dist_logger, global_context
from gemini.parallel.trainer.hooks.metric import BaseHook
from gemini.parallel.trainer.timer import MultiTimer
from gemini.parallel.trainer.trainer_state import Logs, Training
from gemini.system.config import format_bytes
from gemini.system.device import current_device, reserved_bytes


class _ByEpoch(BaseHook):
    """Logs a line on the first rank after every ``interval`` epochs; ``logger=None`` uses the trainer's."""

    def __init__(self, logger: Logs | None = None, interval: int = 1, priority: int = 10) -> None:
        if interval < 1:
            raise ConfigError(f"interval is {interval}; give a whole number of epochs, 1 or more")
        super().__init__(priority)
        self.logger, self.interval = logger, interval

    def is_due(self, trainer: Training) -> bool:
        """Return whether the finished epoch is logged."""
        return trainer.cur_epoch % self.interval == 0

    def say(self, trainer: Training, kind: str, text: str) -> None:
        """Log a line about the finished epoch."""
        logger = self.logger or trainer.logger or get_dist_logger()
        if global_context.get_global_rank() == 0:
            logger.info(f"[Epoch {trainer.cur_epoch} / {kind}]: {text}")


class LogMetricByEpochHook(_ByEpoch):
    """Logs all metrics after an epoch, and after a test."""

    def after_train_epoch(self, trainer: Training) -> None:
        """Log the metrics of training."""
        self._log(trainer, "Train")

    def after_test_epoch(self, trainer: Training) -> None:
        """Log the metrics of the test."""
        self._log(trainer, "Test")

    def _log(self, trainer: Training, kind: str) -> None:
        metrics = trainer.metrics[kind.lower()]
        if metrics and self.is_due(trainer):
            # Collective: all ranks compute the values.
            self.say(trainer, kind, " | ".join(f"{name} = {each.text()}" for name, each in metrics.items()))


class LogMetricByStepHook(BaseHook):
    """Shows all metrics of the last step beside the progress bar of the epoch."""

    def after_train_iter(self, trainer: Training, output: Any, label: Any, loss: Any) -> None:
        """Show the metrics of training."""
        trainer.show(_of_step(trainer, "train"))

    def after_test_iter(self, trainer: Training, output: Any, label: Any, loss: Any) -> None:
        """Show the metrics of the test."""
        trainer.show(_of_step(trainer, "test"))


class LogMemoryByEpochHook(_ByEpoch):
    """Logs the memory of this process on the first rank: resident, and reserved on the GPU if there is one.

    Args:
        log_eval: also after tests.
    """

    def __init__(
        self, logger: Logs | None = None, interval: int = 1, priority: int = 10, log_eval: bool = True
    ) -> None:
        super().__init__(logger, interval, priority)
        self.log_eval = log_eval

    def after_train_epoch(self, trainer: Training) -> None:
        """Log after an epoch."""
        self._log(trainer, "Train")

    def after_test(self, trainer: Training) -> None:
        """Log after a test."""
        if self.log_eval:
            self._log(trainer, "Test")

    def _log(self, trainer: Training, kind: str) -> None:
        if self.is_due(trainer):
            self.say(trainer, kind, _memory())


class LogTimingByEpochHook(_ByEpoch):
    """Logs the means and sums of the timers after an epoch, and after a test.

    Args:
        timer: None uses the trainer's.
    """

    def __init__(
        self,
        timer: MultiTimer | None = None,
        logger: Logs | None = None,
        interval: int = 1,
        priority: int = 10,
        log_eval: bool = True,
    ) -> None:
        super().__init__(logger, interval, priority)
        self.timer, self.log_eval = timer, log_eval

    def after_train_epoch(self, trainer: Training) -> None:
        """Log the timers of training."""
        self._log(trainer, "Train")

    def after_test(self, trainer: Training) -> None:
        """Log the timers of the test."""
        if self.log_eval:
            self._log(trainer, "Test")

    def _log(self, trainer: Training, kind: str) -> None:
        timer = self.timer or trainer.timer
        if timer is None:
            raise ConfigError(
                "LogTimingByEpochHook has no timer; pass one to it, or pass Trainer(timer=MultiTimer())"
            )
        if self.is_due(trainer):
            kept = [(name, each) for name, each in timer if name.startswith(kind) and each.has_history]
            told = (
                f"{name} = {each.get_history_mean():.5g} s, of {each.get_history_sum():.5g}"
                for name, each in kept
            )
            self.say(trainer, kind, " | ".join(told))


class TensorboardHook(BaseHook):
    """Writes metrics of steps and of epochs to ``log_dir`` for TensorBoard.

    Args:
        ranks: the ranks that write; None means all, each to its own directory.

    Raises:
        ConfigError: TensorBoard is not installed.
    """

    def __init__(self, log_dir: str, ranks: Collection[int] | None = None, priority: int = 10) -> None:
        super().__init__(priority)
        self._writer: Any = None
        rank = global_context.get_global_rank()
        if ranks is None or rank in ranks:
            try:
                writers = importlib.import_module("torch.utils.tensorboard")
            except ImportError as error:
                raise ConfigError("TensorboardHook needs TensorBoard; run pip install tensorboard") from error
            self._writer = writers.SummaryWriter(f"{log_dir}/rank_{rank}")

    def after_train_iter(self, trainer: Training, output: Any, label: Any, loss: Any) -> None:
        """Write the metrics of a step."""
        for name, metric in trainer.metrics["train"].items():
            if not metric.epoch_only:
                self._write(f"{name}/Train-step", metric.last_value(), trainer.cur_step)

    def after_train_epoch(self, trainer: Training) -> None:
        """Write the metrics of an epoch."""
        self._write_all(trainer, "train")

    def after_test_epoch(self, trainer: Training) -> None:
        """Write the metrics of a test."""
        self._write_all(trainer, "test")

    def after_train(self, trainer: Training) -> None:
        """Flush the writer."""
        if self._writer is not None:
            self._writer.flush()

    def _write_all(self, trainer: Training, kind: str) -> None:
        for name, metric in trainer.metrics[kind].items():
            self._write(f"{name}/{kind.capitalize()}", metric.value(), trainer.cur_epoch)

    def _write(self, name: str, value: float | None, number: int) -> None:
        if self._writer is not None and value is not None:
            self._writer.add_scalar(name, value, number)


def _of_step(trainer: Training, kind: str) -> str:
    each = trainer.metrics[kind].items()
    return " ".join(f"{name} = {metric.last_text()}" for name, metric in each if not metric.epoch_only)


def _memory() -> str:
    """Return the memory of this process, as text."""
    process = psutil.Process().memory_info()
    text = f"resident {format_bytes(process.rss)}"
    device = current_device()
    if device.type == "cpu":
        return text
    return f"{text}, reserved on {device} {format_bytes(reserved_bytes(device))}"
