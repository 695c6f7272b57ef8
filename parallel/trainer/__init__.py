"""Trainer: epochs over an engine, with hooks, metrics and timers (docs/engine.md)."""

from gemini.parallel.trainer import hooks
from gemini.parallel.trainer.metrics import Accuracy, MixupAccuracy
from gemini.parallel.trainer.timer import MultiTimer, Timer
from gemini.parallel.trainer.trainer import Trainer

__all__ = ["Accuracy", "MixupAccuracy", "MultiTimer", "Timer", "Trainer", "hooks"]
