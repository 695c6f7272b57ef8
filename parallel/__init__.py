"""Parallelism above the runtime. The folder ``parallel/`` is installed as ``gemini.parallel``."""

from __future__ import annotations

if __name__ == "parallel":
    # From a checkout Python would find this folder and make a second, different set of classes.
    raise ImportError("import it as gemini.parallel")

from gemini.comm.ranks import join_ranks
from gemini.parallel.booster import (
    Booster,
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    MoeHybridParallelPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from gemini.parallel.layout import Layout
from gemini.parallel.mesh import Mesh
from gemini.parallel.partition import Partition
from gemini.parallel.plan import ParallelPlan, fingerprint
from gemini.parallel.sequence import parallelize_sequence
from gemini.parallel.tensor import parallelize
from gemini.parallel.zero import LowLevelZeroOptimizer

__all__ = [
    "Booster",
    "GeminiPlugin",
    "HybridParallelPlugin",
    "Layout",
    "LowLevelZeroOptimizer",
    "LowLevelZeroPlugin",
    "Mesh",
    "MoeHybridParallelPlugin",
    "ParallelPlan",
    "Partition",
    "TorchDDPPlugin",
    "TorchFSDPPlugin",
    "fingerprint",
    "join_ranks",
    "parallelize",
    "parallelize_sequence",
]
