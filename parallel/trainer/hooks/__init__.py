"""Hooks of a trainer (docs/engine.md)."""

from gemini.parallel.trainer.hooks.act import LRSchedulerHook, ProfilerHook, SaveCheckpointHook
from gemini.parallel.trainer.hooks.log_hooks import (
    LogMemoryByEpochHook,
    LogMetricByEpochHook,
    LogMetricByStepHook,
    LogTimingByEpochHook,
    TensorboardHook,
)
from gemini.parallel.trainer.hooks.metric import AccuracyHook, BaseHook, LossHook, ThroughputHook

__all__ = [
    "AccuracyHook",
    "BaseHook",
    "LRSchedulerHook",
    "LogMemoryByEpochHook",
    "LogMetricByEpochHook",
    "LogMetricByStepHook",
    "LogTimingByEpochHook",
    "LossHook",
    "ProfilerHook",
    "SaveCheckpointHook",
    "TensorboardHook",
    "ThroughputHook",
]
