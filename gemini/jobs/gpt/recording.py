"""Training a little in order to record it (``gemini trace``)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from gemini.errors import ConfigError
from gemini.jobs.gpt.config import TrainConfig
from gemini.jobs.gpt.data import ByteCorpus
from gemini.jobs.gpt.engine import ManagedEngine
from gemini.jobs.gpt.work import train_step
from gemini.jobs.run.display import Display
from gemini.jobs.run.schedule import lr_schedule
from gemini.jobs.run.stop import StopRequest
from gemini.system.device import repeatable_operators, resolve_device
from gemini.timeline import TimelineRecorder


def record_training(
    config: TrainConfig, *, warmup: int, display: Display, keep: Callable[[TimelineRecorder], None]
) -> int:
    """Train as ``config`` says, record what comes after ``warmup`` steps, and give the recording to ``keep``.

    Return 0, or 128 + signal where SIGINT or SIGTERM ended it after its step; a second one ends it at once
    with KeyboardInterrupt. Whatever ends it, what was recorded so far is kept.

    Raises:
        ConfigError: it ended before anything was recorded.
    """
    corpus = ByteCorpus(config.data)
    corpus.positions(0, batch=1, seq=config.seq, seed=config.seed)  # refuses a short corpus at once
    on_device = repeatable_operators(resolve_device(config.device))
    with display, on_device, StopRequest(display.stopping) as stop:
        engine = ManagedEngine(config)
        with contextlib.ExitStack() as scope:
            scope.callback(engine.close)
            recorder = engine.record_timeline()
            scheduler = lr_schedule(engine.optimizer, steps=config.steps)
            for step in range(config.steps):
                if step == warmup:
                    scope.callback(keep, recorder)
                    scope.enter_context(recorder)
                loss = train_step(engine, corpus, config, step)
                scheduler.step()
                what = "recorded" if step >= warmup else "not recorded: warmup"
                display.note(f"step {step + 1}/{config.steps}  loss {loss:.4f}  {what}")
                if stop.requested:
                    break
            if step < warmup:
                raise ConfigError(f"stopped in step {step + 1}, before recording began; nothing was written")
        return 0 if stop.signum is None else 128 + stop.signum
