"""Trackers: packages that draw the metrics of a run (TensorBoard, W&B, MLflow), each imported on use.

Training does not depend on them. A tracker that fails is dropped with one warning.
"""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from gemini.errors import ConfigError, in_words
from gemini.jobs.run.report import StepReport
from gemini.system.config import did_you_mean

NONE = "none"
_MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
TRACKERS = tuple(_MODULES)
_INSTALLED_BY = {"tensorboard": "'gemini-runtime[tensorboard]'"}  # default: the package's own name
_FLUSH_SECONDS = 10
_EVAL_LOSS = "eval/loss"
_PROJECT = "gemini"
_MOST_PARAMETERS, _MOST_LETTERS = 100, 500  # MLflow's limits per call, and per value


@dataclass(frozen=True)
class TrackedRun:
    """The description of a run for a tracker. The next step is ``first_step`` + 1. ``identity``: the name
    that the tracker gave the run when it began, so that a resumed run continues its curves; None for a new
    run."""

    directory: Path
    options: Mapping[str, Any]
    first_step: int
    identity: str | None = None

    @property
    def name(self) -> str:
        """The name of the run's directory."""
        return self.directory.absolute().name


class Tracker(Protocol):
    """A run in one package. ``identity`` finds the run again later; ``place`` tells people where to look at
    it."""

    identity: str | None
    place: str

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Add values at a step, which counts from 1."""

    def close(self, *, failed: bool) -> None:
        """End the run."""


def parse_trackers(text: str) -> tuple[str, ...]:
    """Parse names such as ``tensorboard,wandb``. Duplicates are removed, and ``none`` gives an empty tuple.
    Raises ConfigError."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in (*TRACKERS, NONE):
            known = (*TRACKERS, NONE)
            raise ConfigError(
                f"--report-to is {name!r}{did_you_mean(name, known)}; it must be one of {', '.join(known)}"
            )
    if NONE in names and len(names) > 1:
        raise ConfigError(
            f"--report-to is {text!r}; {NONE} must be the only name; give {NONE}, or leave it out"
        )
    return tuple(name for name in names if name != NONE)


def require_trackers(text: str) -> None:
    """Raise ConfigError if a package that ``--report-to`` names cannot be imported."""
    for name in parse_trackers(text):
        try:
            importlib.import_module(_MODULES[name])
        except ImportError as error:
            raise ConfigError(
                f"--report-to {name} needs the package {name}: pip install "
                f"{_INSTALLED_BY.get(name, name)} ({in_words(error)}); or leave it out: "
                "metrics.jsonl has the same values"
            ) from error


def metrics_of(report: StepReport) -> dict[str, float]:
    """Return the values of a step by their names in trackers. Values that are not finite are left out."""
    values: dict[str, float | None] = {
        "train/loss": report.loss,
        "train/learning_rate": report.lr,
        "train/grad_norm": report.grad_norm,
        "train/tokens_per_second": report.tokens_per_second,
        "train/seconds": report.seconds,
        "train/stall_share": report.stall_share,
        _EVAL_LOSS: report.eval_loss,
        **{f"memory/{name}_bytes": use.nbytes for name, use in report.tiers.items()},
        **{f"train/{name}": value for name, value in report.extra.items()},
    }
    known = ((name, value) for name, value in values.items() if value is not None)
    return {name: float(value) for name, value in known if math.isfinite(value)}


class Trackers:
    """The trackers of one run. If one fails, ``warn`` is called once and the tracker is dropped; none of
    their errors is raised."""

    def __init__(self, names: Sequence[str], warn: Callable[[str], None]) -> None:
        self._names = names
        self._warn = warn
        self._open: dict[str, Tracker] = {}

    def begin(self, run: TrackedRun, identities: Mapping[str, str]) -> dict[str, str]:
        """Begin or continue ``run`` in each tracker. Return the identity that each tracker gives it.
        ``identities``: those of an earlier part of the run."""
        for name in self._names:
            own = replace(run, identity=identities.get(name))
            self._attempt(name, partial(self._begin, name, own))
        found = {name: tracker.identity for name, tracker in self._open.items()}
        return {**identities, **{name: each for name, each in found.items() if each is not None}}

    @property
    def places(self) -> list[str]:
        """Where people can look at the run, one line per tracker."""
        return [tracker.place for tracker in self._open.values()]

    def log(self, report: StepReport) -> None:
        """Pass the values of a step to each tracker."""
        self._log(metrics_of(report), report.step)

    def log_evaluation(self, loss: float, step: int) -> None:
        """Pass a held-out loss that was computed after the other values of its step to each tracker."""
        self._log({_EVAL_LOSS: loss} if math.isfinite(loss) else {}, step)

    def _log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, tracker in list(self._open.items()):
            self._attempt(name, partial(tracker.log, metrics, step))

    def close(self, *, failed: bool) -> None:
        """End the run in each tracker."""
        for name, tracker in list(self._open.items()):
            self._attempt(name, partial(tracker.close, failed=failed))
        self._open.clear()

    def _begin(self, name: str, run: TrackedRun) -> None:
        self._open[name] = _MAKERS[name](run)

    def _attempt(self, name: str, action: Callable[[], None]) -> None:
        """Run ``action``, and drop the tracker if it fails. Packages raise any exception, and an unreachable
        server must not end days of training."""
        try:
            action()
        except Exception as error:
            self._open.pop(name, None)
            self._warn(
                f"--report-to {name}: {in_words(error)}; training continues without it, and "
                "metrics.jsonl has all values"
            )


class _TensorBoard:
    """Event files in ``tensorboard/`` of the run's directory."""

    identity: str | None = None

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        directory = run.directory / "tensorboard"
        self.place = f"tensorboard --logdir {directory}"
        # Hide values that an interrupted run logged for steps after its last checkpoint.
        purged = run.first_step + 1 if run.first_step else None
        self._writer: Any = SummaryWriter(str(directory), purge_step=purged, flush_secs=_FLUSH_SECONDS)
        rows = [f"| {name} | {_cell(value)} |" for name, value in sorted(run.options.items())]
        self._writer.add_text("options", "\n".join(["| | |", "|---|---|", *rows]), run.first_step)
        self._writer.flush()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, failed: bool) -> None:
        self._writer.close()


class _WandB:
    """A run of W&B. If there is no API key and no WANDB_MODE, it runs offline in ``wandb/`` of the run's
    directory, for ``wandb sync``: otherwise W&B would prompt for a key and block."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        package: Any = wandb
        mode = os.environ.get("WANDB_MODE") or (None if _has_key(package) else "offline")
        self._run: Any = package.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=os.environ.get("WANDB_NAME", run.name),
            dir=str(run.directory),
            config=dict(run.options),
            id=run.identity,
            resume="allow",
            mode=mode,
            settings=package.Settings(silent=True, console="off"),
        )
        self.identity: str | None = self._run.id
        kept = run.directory / "wandb"
        self.place = f"wandb: saved in {kept}; upload it with wandb sync {kept}/offline-run-*"
        if mode is None or mode == "online":
            self.place = f"wandb: {self._run.url}"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _MLflow:
    """A run of MLflow, at ``MLFLOW_TRACKING_URI`` in ``MLFLOW_EXPERIMENT_NAME``."""

    def __init__(self, run: TrackedRun) -> None:
        import mlflow

        package: Any = mlflow
        # Calls name the run: a program around this one may have an active run of its own.
        self._client = package.MlflowClient()
        if run.identity is None:
            experiment = package.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT))
            made = self._client.create_run(experiment.experiment_id, run_name=run.name)
            self.identity: str | None = made.info.run_id
            for name, value in list(run.options.items())[:_MOST_PARAMETERS]:
                self._client.log_param(self.identity, name, str(value)[:_MOST_LETTERS])
        else:
            self.identity = run.identity
            self._client.update_run(self.identity, status="RUNNING")
        self.place = f"mlflow: run {self.identity} at {package.get_tracking_uri()}"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._client.log_metric(self.identity, name, value, step=step)

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self.identity, "FAILED" if failed else "FINISHED")


def _has_key(wandb: Any) -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return bool(wandb.login(prompt=False))
    except TypeError:  # older versions have no ``prompt``
        return bool(wandb.api.api_key)


def _cell(value: Any) -> str:
    return json.dumps(value).strip('"').replace("|", "\\|")


_MAKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WandB,
    "mlflow": _MLflow,
}
