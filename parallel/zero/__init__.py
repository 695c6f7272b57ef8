"""ZeRO stages 1 and 2: optimizer states and gradients cut over data-parallel ranks."""

from __future__ import annotations

from .model import LowLevelZeroModel, spread_rest
from .optimizer import LowLevelZeroOptimizer
from .state import StateShard

__all__ = ["LowLevelZeroModel", "LowLevelZeroOptimizer", "StateShard", "spread_rest"]
