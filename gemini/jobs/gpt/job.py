"""The main job: train a GPT on bytes under budgets, resumable, verified, summed up."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from gemini import checkpoint
from gemini.errors import ConfigError, IoError
from gemini.jobs.gpt.config import TrainConfig
from gemini.jobs.gpt.data import ByteCorpus
from gemini.jobs.gpt.display import Display, SilentDisplay
from gemini.jobs.gpt.engine import ManagedEngine, PlainEngine
from gemini.jobs.gpt.model import num_parameters
from gemini.jobs.gpt.picture import PLOT_HINT, draw_timeline
from gemini.jobs.gpt.report import (
    LINKS,
    TIERS,
    Summary,
    model_data_ratio,
    over_budget_note,
    steady_speed,
    tier_uses,
)
from gemini.jobs.gpt.run_directory import RunDirectory
from gemini.jobs.gpt.schedule import lr_schedule
from gemini.jobs.gpt.stop import StopRequest
from gemini.jobs.gpt.training import EngineFactory, Progress, Training, train_step
from gemini.jobs.gpt.verify import LossComparison, Verdict, WeightFile, compare_weights, verdict
from gemini.system.device import ran_out_of_memory, repeatable_operators, resolve_device


@dataclass(frozen=True)
class TrainResult:
    """What a run came to: ``exit_code`` is 0, 1 (verify: different) or 128 + signal (stopped and saved)."""

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
    """Train as ``config`` says and return the result.

    The first SIGINT or SIGTERM ends the run after its step with a checkpoint, the second at once. Raises a
    GeminiError before anything is trained where ``config`` cannot work; after a failure in the middle the
    last complete checkpoint is as it was.
    """
    shown = SilentDisplay() if display is None else display
    corpus = ByteCorpus(config.data)
    corpus.positions(
        0, batch=1, seq=config.seq, seed=config.seed
    )  # refuses a short corpus before any memory is taken
    directory = None
    if config.checkpoint is not None:
        directory = RunDirectory(config.checkpoint, is_complete)
    # Until all is written: what comes before is a request to stop, which may be too late for anything else.
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
    with display, contextlib.ExitStack() as scope:
        display.note(
            f"{num_parameters(config.gpt()):,} parameters on {corpus.nbytes:,} bytes of {corpus.source}"
        )
        weights = scope.enter_context(WeightFile(_scratch(config))) if config.verify else None
        progress = Training(config, corpus, directory, display, stop).run(engine_factory, weights)
        outcome: Verdict | None = None
        unverified: ConfigError | None = None
        if weights is not None and not stop.requested:
            try:
                outcome = _verify(config, corpus, progress.losses, weights, display, stop)
            except RuntimeError as error:
                if not ran_out_of_memory(error):
                    raise
                unverified = ConfigError(
                    f"--verify trains unmanaged, for which {config.device} has too little memory; what was "
                    "trained is complete. Verify a smaller model, or leave --verify out"
                )
    summary = _summarize(config, progress, outcome, directory, interrupted=stop.requested)
    if directory is not None and progress.reports:  # else there is that of the steps that were trained
        try:
            directory.write_summary(summary.to_dict())
        except IoError as error:
            summary = replace(summary, notes=(*summary.notes, str(error)))
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
    """Repeat the run unmanaged and compare; None if it was stopped before the end."""
    gc.collect()
    display.note("verifying: the same seed again, unmanaged (everything in memory, no budget)")
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


def _summarize(
    config: TrainConfig,
    progress: Progress,
    outcome: Verdict | None,
    directory: RunDirectory | None,
    *,
    interrupted: bool,
) -> Summary:
    """Put the numbers together and draw the picture next to the checkpoint."""
    stats, tiers = progress.stats, tier_uses(progress.stats)
    budgets = {name: tiers[name].budget_bytes if name in tiers else 0 for name in TIERS}
    speed, stall_share = steady_speed(progress.reports)
    picture, notes = None, list(progress.notes)
    if directory is not None and progress.timeline:
        try:
            if draw_timeline(directory.picture, progress.timeline, budgets):
                picture = str(directory.picture)
            else:
                notes.append(PLOT_HINT)
        except IoError as error:
            notes.append(str(error))
    notes += over_budget_note(progress.timeline, budgets["device"])
    if config.verify and outcome is None:
        notes.append("verify did not run to its end")
    return Summary(
        parameters=num_parameters(config.gpt()),
        model_data_bytes=int(stats["model_data_bytes"]),
        budget_bytes=budgets,
        ratio=model_data_ratio(int(stats["model_data_bytes"]), budgets),
        peak_bytes={name: use.peak_bytes for name, use in tiers.items()},
        peak_non_model_bytes=max((int(entry["non_model_bytes"]) for entry in progress.timeline), default=0)
        or None,
        link_bytes={link: int(stats[link]["bytes"]) for link in LINKS},
        first_step=progress.first_step,
        last_step=progress.last_step,
        first_loss=progress.losses.get(min(progress.losses, default=0)),
        last_loss=progress.losses.get(max(progress.losses, default=0)),
        tokens=sum(report.tokens for report in progress.reports),
        seconds=sum(report.seconds for report in progress.reports),
        tokens_per_second=speed,
        stall_share=stall_share,
        interrupted=interrupted,
        checkpoint=None if directory is None else str(directory.checkpoint),
        picture=picture,
        notes=tuple(notes),
        verify=outcome,
    )


def _scratch(config: TrainConfig) -> Path | None:
    """Return where to set weights aside: the run's own disk, for the default may be memory."""
    chosen = config.disk_dir or config.checkpoint
    return None if chosen is None else Path(chosen)
