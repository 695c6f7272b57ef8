"""The main job of ``gemini train``: trains a GPT on bytes under budgets; resumable, with verification and a
summary."""

from __future__ import annotations

import contextlib
import gc
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from gemini import checkpoint
from gemini.errors import ConfigError
from gemini.jobs.gpt.config import TrainConfig
from gemini.jobs.gpt.data import ByteCorpus
from gemini.jobs.gpt.engine import ManagedEngine, PlainEngine
from gemini.jobs.gpt.model import num_parameters
from gemini.jobs.gpt.task import EngineFactory, GPTTask, train_step
from gemini.jobs.run.display import Display, SilentDisplay
from gemini.jobs.run.outcome import summarize, written
from gemini.jobs.run.report import Summary
from gemini.jobs.run.run_directory import RunDirectory
from gemini.jobs.run.trackers import require_trackers
from gemini.jobs.run.training import StopRequest, Training, lr_schedule
from gemini.jobs.run.verify import LossComparison, Verdict, WeightFile, compare_weights, verdict
from gemini.system.device import ran_out_of_memory, repeatable_operators, resolve_device


@dataclass(frozen=True)
class TrainResult:
    """The result of a run. ``exit_code``: 0, 1 (verify found differences) or 128 + signal (stopped and
    saved)."""

    summary: Summary
    losses: tuple[float, ...]
    exit_code: int


def run(
    config: TrainConfig,
    *,
    display: Display | None = None,
    engine_factory: EngineFactory = ManagedEngine,
    is_complete: Callable[[Path], bool] = checkpoint.is_complete,
) -> TrainResult:
    """Train with ``config`` and return the result.

    The first SIGINT, SIGTERM or SIGUSR1 ends the run after its step with a checkpoint; the second ends it at
    once.

    Raises a GeminiError before anything is trained if ``config`` cannot work. After a later failure, the last
    complete checkpoint is unchanged.
    """
    require_trackers(config.report_to)
    shown = SilentDisplay() if display is None else display
    corpus = ByteCorpus(config.data)
    corpus.positions(
        0, batch=1, seq=config.seq, seed=config.seed
    )  # refuses a short corpus before memory is allocated
    directory = None
    if config.checkpoint is not None:
        directory = RunDirectory(config.checkpoint, is_complete)
        directory.refuse_unmakeable()
    # The handlers stay until everything is written: a late signal must not interrupt the writing.

    with (
        StopRequest(shown.stopping) as stop,
        repeatable_operators(resolve_device(config.device)),
        contextlib.ExitStack() as scope,
    ):
        if directory is not None:
            scope.callback(directory.release)
        return _run(config, corpus, directory, shown, stop, engine_factory)


def _run(
    config: TrainConfig,
    corpus: ByteCorpus,
    directory: RunDirectory | None,
    display: Display,
    stop: StopRequest,
    engine_factory: EngineFactory,
) -> TrainResult:
    resume = directory is not None and directory.resumes(config.resume, overwrite=config.overwrite)
    with display, contextlib.ExitStack() as scope:
        display.note(
            f"{num_parameters(config.gpt()):,} parameters on {corpus.nbytes:,} bytes of {corpus.source}"
        )
        weights = scope.enter_context(WeightFile(_scratch(config))) if config.verify else None
        task = GPTTask(config, corpus, engine_factory, weights, resume=resume)
        progress = Training(task, directory, display, stop).run()
        outcome: Verdict | None = None
        unverified: ConfigError | None = None
        if weights is not None and not stop.requested:
            try:
                outcome = _verify(config, corpus, progress.losses, weights, display, stop)
            except RuntimeError as error:
                if not ran_out_of_memory(error):
                    raise
                unverified = ConfigError(
                    f"--verify trains unmanaged, and {config.device} has too little memory for that; "
                    "the training itself is complete. Verify a smaller model, or leave --verify out"
                )
    if config.verify and outcome is None:
        progress.notes.append(_unverified_note(config, stopped=unverified is None))
    summary = summarize(progress, num_parameters(config.gpt()), directory, interrupted=stop.requested)
    summary = written(replace(summary, verify=outcome), progress, directory)
    if unverified is not None:
        raise unverified
    code = (
        128 + stop.signum if stop.signum is not None else int(outcome is not None and not outcome.identical)
    )
    return TrainResult(summary, tuple(progress.losses[step] for step in sorted(progress.losses)), code)


def _verify(
    config: TrainConfig,
    corpus: ByteCorpus,
    losses: dict[int, float],
    weights: WeightFile,
    display: Display,
    stop: StopRequest,
) -> Verdict | None:
    """Repeat the run unmanaged and compare. Return None if a stop was requested before the end."""
    gc.collect()
    display.note("verifying: training again from the same seed, unmanaged (everything in memory, no budget)")
    engine = PlainEngine(config)
    scheduler = lr_schedule(engine.optimizer, steps=config.steps)
    comparison = LossComparison(losses)
    for step in range(config.steps):
        comparison.add(step, train_step(engine, corpus, config, step))
        scheduler.step()
        display.verifying(step + 1)
        if stop.requested:
            return None
    return verdict(comparison, len(losses), compare_weights(weights.read(), engine.weights()))


def _unverified_note(config: TrainConfig, *, stopped: bool) -> str:
    """Return the reason why nothing was compared, and a remedy."""
    if not stopped:
        return (
            f"not verified: {config.device} has too little memory to train unmanaged; verify a smaller model"
        )
    again = "run the same command again"
    if config.checkpoint is not None:
        command = f"gemini train --checkpoint {shlex.quote(config.checkpoint)} --resume --verify"
        again = f"{command} continues and compares"
    return f"not verified: the run was stopped before the comparison was done; {again}"


def _scratch(config: TrainConfig) -> Path | None:
    """Return a directory for the weight file: the run's own disk, because the default may be in memory."""
    chosen = config.disk_dir or config.checkpoint
    return None if chosen is None else Path(chosen)
