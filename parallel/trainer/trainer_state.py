"""Training: the state of a run that hooks see."""

from __future__ import annotations

from typing import Protocol

from gemini.parallel.engine import BaseSchedule, Engine
from gemini.parallel.trainer.metrics import Metric
from gemini.parallel.trainer.timer import MultiTimer


class Logs(Protocol):
    """A logger: of :mod:`logging`, or :class:`gemini.parallel.launch.DistributedLogger`."""

    def info(self, message: object, /, *args: object) -> None:
        """Log at level INFO."""
        ...


class Training:
    """The state of a run: hooks read it, and add ``metrics``.

    ``cur_epoch`` and ``cur_step`` count finished epochs and iterations; ``max_epochs`` and ``max_steps``
    (None: no limit) are where the run ends. ``metrics`` are by name, those of ``"train"`` and of ``"test"``;
    ``step_text`` is the last text of :meth:`show`.
    """

    def __init__(
        self, engine: Engine, schedule: BaseSchedule, timer: MultiTimer | None, logger: Logs | None
    ) -> None:
        self.engine, self.schedule, self.timer, self.logger = engine, schedule, timer, logger
        self.cur_epoch = self.cur_step = 0
        self.max_epochs = 0
        self.max_steps: int | None = None
        self.steps_per_epoch = 0
        self.metrics: dict[str, dict[str, Metric]] = {"train": {}, "test": {}}
        self.step_text = ""

    def show(self, text: str) -> None:
        """Show ``text`` beside the progress bar of the epoch."""
        self.step_text = text
