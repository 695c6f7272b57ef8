"""ZeRO stages 1 and 2: optimizer states and gradients cut over data-parallel ranks."""

from __future__ import annotations

from .model import LowLevelZeroModel
from .optimizer import LowLevelZeroOptimizer
from .plugin import LowLevelZeroPlugin
from .state import StateShard

__all__ = ["LowLevelZeroModel", "LowLevelZeroOptimizer", "LowLevelZeroPlugin", "StateShard"]
