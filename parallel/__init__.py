"""Parallelism above the runtime. The folder ``parallel/`` is installed as ``gemini.parallel``."""

from __future__ import annotations

if __name__ == "parallel":
    # From a checkout Python would find this folder and make a second, different set of classes.
    raise ImportError("import it as gemini.parallel")

from gemini.collectives import join_ranks
from gemini.parallel.booster import Booster, GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from gemini.parallel.zero import LowLevelZeroModel, LowLevelZeroOptimizer

__all__ = [
    "Booster",
    "GeminiPlugin",
    "LowLevelZeroModel",
    "LowLevelZeroOptimizer",
    "LowLevelZeroPlugin",
    "TorchDDPPlugin",
    "join_ranks",
]
