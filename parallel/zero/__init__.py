"""ZeRO stages 1 and 2: data-parallel ranks shard optimizer states and gradients."""

from __future__ import annotations

from gemini.parallel.zero.model import LowLevelZeroModel
from gemini.parallel.zero.optimizer import LowLevelZeroOptimizer

__all__ = [
    "LowLevelZeroModel",
    "LowLevelZeroOptimizer",
]
