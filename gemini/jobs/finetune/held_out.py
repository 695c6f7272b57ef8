"""Evaluation during a run: the held-out rows, and the weights with the lowest loss on them."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gemini.errors import CheckpointError
from gemini.jobs.finetune.samples import Batch, Samples
from gemini.system.files import io_errors

BEST = "best"  # directory inside the directory of a run
_STEP = "step-"


class HeldOut:
    """The held-out ``rows`` of ``samples``. They are evaluated after every ``every`` steps (0: never) and
    after the last of ``steps``. ``batch``: number of rows in a pass."""

    def __init__(
        self, samples: Samples, rows: npt.NDArray[np.int64], *, every: int, steps: int, batch: int
    ) -> None:
        self.num_rows = len(rows)
        self._samples = samples
        self._rows = rows
        self._every = every
        self._steps = steps
        self._batch = batch

    def is_due(self, done: int) -> bool:
        """Return whether to evaluate after ``done`` steps."""
        every = self._every
        return self.num_rows > 0 and (done == self._steps or (every > 0 and done > 0 and done % every == 0))

    def batches(self) -> list[Callable[[], Batch]]:
        """Return a function for each batch of rows that makes it."""
        rows = self._rows.tolist()
        parts = [rows[first : first + self._batch] for first in range(0, self.num_rows, self._batch)]
        return [partial(self._samples.rows, part) for part in parts]


class BestWeights:
    """The weights with the lowest loss so far, each exported to its own directory inside ``directory``.

    ``step`` counts from 1; None: nothing was evaluated yet. Of equal losses, the first wins. The weights that
    the newest checkpoint names stay until the next checkpoint is complete, because a resumed run needs them.
    Only a process that ``owns`` the directory removes anything there.
    """

    def __init__(self, directory: Path, *, owns: bool = True) -> None:
        self._owns = owns
        self.step: int | None = None
        self.loss = math.inf
        self.evaluated = 0  # the last step after which the loss was computed
        self._directory = directory
        self._saved: int | None = None

    @property
    def weights(self) -> Path:
        """The directory with the weights of :attr:`step`."""
        return self._of(self.step)

    def offer(self, step: int, loss: float, export: Callable[[Path], None]) -> None:
        """Keep the current weights if ``loss`` is the lowest; ``export`` writes them. Raises IoError."""
        self.evaluated = step
        if not loss < self.loss:
            return
        with io_errors("keep the best weights", self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
        export(self._of(step))
        self.step, self.loss = step, loss
        self._remove_others()

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        loss = None if self.step is None else self.loss
        return {"step": self.step, "loss": loss, "evaluated": self.evaluated}

    def restore(self, state: Any) -> None:
        """Restore the state of a checkpoint. None: that run kept no best weights.

        Raises:
            CheckpointError: the state is invalid, or the weights are gone.
        """
        if state is None:
            return
        step, loss, evaluated = _checked(state)
        self.step, self.loss, self.evaluated, self._saved = step, loss, evaluated, step
        if step is not None and not self.weights.is_dir():
            raise CheckpointError(
                f"{self.weights} is missing; it holds the weights of step {step}, with the lowest "
                "loss so far; restore it, or give --no-keep-best to continue without it"
            )
        self._remove_others()

    def saved(self) -> None:
        """Remove weights that are no longer needed. Call it after a checkpoint with :meth:`state` is
        complete."""
        self._saved = self.step
        self._remove_others()

    def _of(self, step: int | None) -> Path:
        return self._directory / f"{_STEP}{step}"

    def _remove_others(self) -> None:
        kept = {self._of(step) for step in (self.step, self._saved)}
        with io_errors("remove older weights", self._directory):
            if not self._owns or not self._directory.is_dir():
                return
            for entry in self._directory.iterdir():
                if entry.name.startswith(_STEP) and entry not in kept and not entry.is_symlink():
                    shutil.rmtree(entry, ignore_errors=True)


def _checked(state: Any) -> tuple[int | None, float, int]:
    """Return step, loss and last evaluated step from a checkpoint's state. Raises CheckpointError."""
    found = state if isinstance(state, Mapping) else {}
    step, loss, evaluated = (found.get(name) for name in ("step", "loss", "evaluated"))
    if type(evaluated) is int and evaluated >= 0:
        if step is None and loss is None:
            return None, math.inf, evaluated
        is_step = type(step) is int and 0 < step <= evaluated
        if is_step and isinstance(loss, float) and math.isfinite(loss):
            return step, loss, evaluated
    raise CheckpointError(
        f"the checkpoint has an invalid entry {state!r:.200} for the best weights; give "
        "--no-keep-best to continue without them, or start over with --overwrite"
    )
