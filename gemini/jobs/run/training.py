"""The training loop of a job: steps, evaluations and checkpoints, until the end or a request to stop.

Ctrl-C requests a stop, and the loop stops between two steps. Also has the learning rate schedules; the
default warms up, then follows a cosine down to a tenth.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Generic, Protocol, TypeGuard, TypeVar

import torch

from gemini.comm.ranks import Rank
from gemini.errors import CheckpointError, ConfigError, IoError
from gemini.jobs.run.display import Display
from gemini.jobs.run.managed import Tiered
from gemini.jobs.run.report import StepReport, tier_uses
from gemini.jobs.run.run_directory import RunDirectory
from gemini.jobs.run.trackers import TrackedRun, Trackers

Value = TypeVar("Value")
EngineT = TypeVar("EngineT", bound=Tiered)


_FLOOR = 0.1
_OWED = "evaluation_owed"  # key in the extra data of a checkpoint
_MAX_WARMUP_STEPS = 100


def lr_factor(step: int, *, steps: int) -> float:
    """Return the factor for the base learning rate at 0-based ``step`` of ``steps``."""
    warmup = max(1, min(_MAX_WARMUP_STEPS, steps // 10))
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return _FLOOR + (1 - _FLOOR) * 0.5 * (1 + math.cos(math.pi * progress))


def shaped_factor(step: int, *, steps: int, warmup: int, shape: str) -> float:
    """Return the learning rate factor at 0-based ``step``. It rises over ``warmup`` steps, then falls to 0 as
    a ``"cosine"`` or a line (``"linear"``), or stays (``"constant"``)."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    if shape == "constant":
        return 1.0
    return 1 - progress if shape == "linear" else 0.5 * (1 + math.cos(math.pi * progress))


def lr_schedule(optimizer: torch.optim.Optimizer, *, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Return a plain torch scheduler over ``optimizer``. Step it once after every optimizer step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, partial(lr_factor, steps=steps))


def follow_schedule(scheduler: torch.optim.lr_scheduler.LambdaLR) -> tuple[float, float]:
    """Set the optimizer's rates for the next step from the functions of ``scheduler``, after a restore, which
    sets the saved rates. Return the rates of the first group before and after."""
    groups = scheduler.optimizer.param_groups
    before = float(groups[0]["lr"])
    for group, highest, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
        group["lr"] = highest * factor(scheduler.last_epoch)
    return before, float(groups[0]["lr"])


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Context manager for signals: the first SIGINT, SIGTERM or SIGUSR1 is recorded, the second raises
    KeyboardInterrupt at once.

    ``notify`` is called from the handler, so it must not write to a buffered stream. Python permits handlers
    only in the main thread; in other threads, signals are not changed. The previous handlers are restored on
    exit.
    """

    def __init__(self, notify: Callable[[], None], rank: Rank | None = None) -> None:
        """``rank``: this process among those of the run. All ranks stop after the same step."""
        self.signum: int | None = None
        self._heard: int | None = None
        self._rank = Rank() if rank is None else rank
        self._notify = notify
        self._previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal asked the run to end."""
        return self.signum is not None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._previous = {signum: signal.signal(signum, self._on_signal) for signum in _SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous = {}

    def agree(self) -> None:
        """Find out whether any rank was asked to end. Collective: all ranks call it after a step. Over
        several ranks only this call changes :attr:`requested`."""
        if not self._rank.is_alone:
            said = [int(text) for text in self._rank.collect(lambda: str(self._heard or 0))]
            self.signum = next((signum for signum in said if signum), None)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._heard is not None:
            raise KeyboardInterrupt
        self._heard = signum
        if self._rank.is_alone:
            self.signum = signum
        self._notify()


@dataclass(frozen=True)
class RunOptions:
    """Options of a run, independent of the model. ``kept``: the options that are stored for a resume;
    ``trackers``: names of the packages that get its metrics."""

    steps: int
    checkpoint_every: int
    resume: bool
    overwrite: bool
    device_kind: str
    kept: Mapping[str, Any]
    trackers: tuple[str, ...] = ()


class Task(Protocol[EngineT]):
    """The model and data that a run trains. ``command`` is its name for messages."""

    command: str
    options: RunOptions

    def identity(self) -> dict[str, Any]:
        """Return the settings that the numbers depend on, as plain data."""

    def engine(self) -> EngineT:
        """Build the engine. The caller closes it."""

    def prepare(self, engine: EngineT, display: Display, stop: StopRequest) -> bool:
        """Do the work before the first step, with the initial weights: a resumed run has not read its
        checkpoint yet. Return False if ``stop`` was requested before the work was finished; the same command
        then continues it."""

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return the learning rate scheduler, which is stepped after every step."""

    def step(self, engine: EngineT, step: int) -> tuple[float, int]:
        """Run optimizer step ``step`` (from 0). Return the mean loss in nats and the number of tokens."""

    def values(self) -> Mapping[str, float]:
        """Return further values of the last step, by name."""

    def evaluate(self, engine: EngineT, step: int) -> float | None:
        """Return the held-out loss after 0-based ``step``; None if no evaluation is due."""

    def check_history(self, horizons: list[int], devices: list[str]) -> None:
        """Raise ConfigError if a run that earlier had other numbers of steps, or other devices, cannot
        continue."""

    def finish(self, engine: EngineT) -> None:
        """Do the work after all steps are done and saved."""


@dataclass
class Progress:
    """The progress of a run: losses by 0-based step, including those before a resume, and reports of this
    process."""

    first_step: int = 0
    last_step: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    reports: list[StepReport] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    timeline: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Training(Generic[EngineT]):
    """One managed run, from building the model to closing it. Use once."""

    def __init__(
        self, task: Task[EngineT], directory: RunDirectory | None, display: Display, stop: StopRequest
    ) -> None:
        self._task = task
        self._options = task.options
        self._directory = directory
        self._display = display
        self._stop = stop
        self._progress = Progress()
        self._identity = task.identity()
        self._horizons = [task.options.steps]
        self._devices = [task.options.device_kind]
        self._saved_step: int | None = None
        self._stall_seconds = 0.0
        self._told_of_metrics = False
        self._owes_evaluation = False  # the last step was not evaluated because of a stop request
        self._trackers = Trackers(task.options.trackers, self._note)

    def run(self) -> Progress:
        """Train and save. Call ``Task.finish`` unless a stop was requested."""
        self._check_directory()
        engine = self._task.engine()
        try:
            scheduler = self._task.schedule(engine.optimizer)
            if not self._options.resume and self._directory is not None:
                # Only after the engine was built: a refused budget must not delete the older run.
                self._directory.start(self._identity, self._options.kept)
            if not self._task.prepare(engine, self._display, self._stop):
                if self._options.resume and self._directory is not None:
                    self._progress.first_step = self._progress.last_step = self._directory.saved_step()
                self._progress.stats = engine.stats()
                return self._progress
            if self._options.resume:
                self._restore(engine, scheduler)
            self._stall_seconds = float(engine.stats()["stall_seconds"])
            self._track()
            self._make_up_evaluation(engine)
            self._loop(engine, scheduler)
            self._save(engine, scheduler)
            self._progress.stats, self._progress.timeline = engine.stats(), engine.timeline()
            if not self._stop.requested:
                self._task.finish(engine)
            self._trackers.close(failed=False)
        finally:
            self._trackers.close(failed=True)  # no tracker is open if the run succeeded
            engine.close()
        return self._progress

    def _track(self) -> None:
        """Begin the run in its trackers, or continue it there."""
        directory = self._directory
        if directory is None or not self._options.trackers:
            return
        given = {name: each for name, each in self._options.kept.items() if each is not None}
        run = TrackedRun(directory.path, {**self._identity, **given}, self._progress.first_step)
        found = self._trackers.begin(run, directory.tracker_identities())
        for place in self._trackers.places:
            self._display.note(place)
        directory.keep_tracker_identities(found)

    def _check_directory(self) -> None:
        if self._directory is None:
            return
        if self._options.resume:
            self._directory.check_resume(self._identity)
        elif not self._options.overwrite:
            self._directory.refuse_older_run()

    def _loop(self, engine: EngineT, scheduler: Any) -> None:
        every = self._options.checkpoint_every
        for step in range(self._progress.first_step, self._options.steps):
            report = self._evaluated(engine, self._step(engine, scheduler, step))
            self._progress.losses[step] = report.loss
            self._progress.reports.append(report)
            self._progress.last_step = step + 1
            self._record(report)
            self._trackers.log(report)
            self._display.step(report)
            self._stop.agree()
            if self._stop.requested:
                return
            if every and (step + 1) % every == 0:
                self._save(engine, scheduler)

    def _record(self, report: StepReport) -> None:
        """Write the metrics of a step. Training continues if that fails."""
        if self._directory is None:
            return
        try:
            self._directory.append_metrics(report.to_metrics())
        except IoError as error:
            if not self._told_of_metrics:
                self._told_of_metrics = True
                self._note(f"{error}; training continues, and a later step writes the missing lines")

    def _note(self, text: str) -> None:
        self._progress.notes.append(text)
        self._display.note(text)

    def _step(self, engine: EngineT, scheduler: Any, step: int) -> StepReport:
        lr = float(engine.optimizer.param_groups[0]["lr"])
        started = time.perf_counter()
        loss, tokens = self._task.step(engine, step)
        scheduler.step()
        self._stop.agree()  # before the evaluation: all ranks must run it, or all skip it
        seconds = time.perf_counter() - started
        if not math.isfinite(loss):
            raise ConfigError(
                f"the loss became {loss} at step {step + 1} with learning rate {lr:.2e}; lower --lr "
                "or set --clip 1.0; the last checkpoint is unchanged"
            )
        stats = engine.stats()
        stalled = float(stats["stall_seconds"]) - self._stall_seconds
        self._stall_seconds += stalled
        measured = getattr(engine.optimizer, "get_grad_norm", None)
        norm = None if measured is None else measured()
        extra = self._task.values()
        report = StepReport(step + 1, loss, lr, seconds, tokens, stalled, tier_uses(stats), grad_norm=norm)
        return replace(report, extra=extra)

    def _evaluated(self, engine: EngineT, report: StepReport) -> StepReport:
        """Return the report with the held-out loss, if it is due. Evaluation does not count as time of the
        step."""
        self._owes_evaluation = self._stop.requested
        loss = None if self._owes_evaluation else self._task.evaluate(engine, report.step - 1)
        if loss is None:
            return report
        self._stall_seconds = float(engine.stats()["stall_seconds"])
        return replace(report, eval_loss=loss)

    def _make_up_evaluation(self, engine: EngineT) -> None:
        """Evaluate the step from which a resumed run continues, if a stop request prevented it. Metrics and
        best weights are then the same as without the interruption."""
        step = self._progress.last_step
        if not self._owes_evaluation:
            return
        loss = self._task.evaluate(engine, step - 1)
        self._owes_evaluation = False
        if loss is None or self._directory is None:
            return
        self._directory.add_to_metrics(step, {"eval_loss": loss})
        self._trackers.log_evaluation(loss, step)
        self._display.note(f"held out, after step {step}: loss {loss:.4f}")

    def _save(self, engine: EngineT, scheduler: Any) -> None:
        step = self._progress.last_step
        if self._directory is None or self._saved_step == step:
            return
        extra = {
            "step": step,
            "horizons": self._horizons,
            "devices": self._devices,
            _OWED: self._owes_evaluation,
        }
        engine.save(self._directory.checkpoint, scheduler, extra)
        self._saved_step = step
        if self._stop.requested:
            self._display.note(f"saved step {step} in {self._directory.path}; --resume continues from there")

    def _restore(self, engine: EngineT, scheduler: Any) -> None:
        assert self._directory is not None
        extra = engine.load(self._directory.checkpoint, scheduler)
        step: Any = extra.get("step")
        horizons, devices = extra.get("horizons"), extra.get("devices", ["cpu"])
        is_step = type(step) is int and step >= 0
        if not (is_step and _is_list_of(horizons, int) and _is_list_of(devices, str)):
            raise CheckpointError(f"{self._directory.checkpoint} was not written by {self._task.command}")
        refuse_past(self._directory.path, step, self._options.steps)
        self._owes_evaluation = extra.get(_OWED) is True
        self._horizons = _followed_by(list(horizons), self._options.steps)
        self._devices = _followed_by(list(devices), self._options.device_kind)
        self._task.check_history(self._horizons, self._devices)
        self._directory.keep_options(self._options.kept)
        self._progress.first_step = self._progress.last_step = self._saved_step = step
        for record in self._directory.read_metrics(step):
            self._progress.losses[record["step"] - 1] = float(record["loss"])
        is_done = step == self._options.steps
        self._display.note(
            f"{nothing_left(step)}; raise --steps to continue" if is_done else f"resumed after step {step}"
        )
        if len(horizons) < len(self._horizons) and not is_done:
            self._follow_steps(scheduler, horizons[-1])

    def _follow_steps(self, scheduler: Any, before: int) -> None:
        """Set the learning rate of the next step for the new number of steps. The checkpoint has the rate for
        a run of ``before`` steps."""
        old, new = follow_schedule(scheduler)
        self._note(
            f"the number of steps changed from {before:,} to {self._options.steps:,}: from now on "
            f"the learning rate follows the new schedule; the next step has {new:.3g} instead of "
            f"{old:.3g}"
        )


def refuse_past(path: Path, step: int, steps: int) -> None:
    """Raise ConfigError if the run in ``path`` has already done more than ``steps`` steps."""
    if step > steps:
        raise ConfigError(f"{path} is at step {step}, past --steps {steps}; raise --steps")


def nothing_left(step: int) -> str:
    """Return the message for a resumed run that has no steps left."""
    return f"nothing is left to train: {step} steps are done"


def _is_list_of(values: object, kind: type) -> TypeGuard[list[Any]]:
    """Return whether ``values`` is a non-empty list of one type."""
    return isinstance(values, list) and values != [] and all(type(value) is kind for value in values)


def _followed_by(values: list[Value], value: Value) -> list[Value]:
    return values if values[-1] == value else [*values, value]
