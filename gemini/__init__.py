"""gemini-runtime: train PyTorch models far larger than the memory they are given."""

from __future__ import annotations

from gemini.errors import (
    CheckpointError,
    ConfigError,
    EvictedAccessError,
    GeminiError,
    IoError,
    OutOfBudgetError,
    StateError,
)
from gemini.model.ddp import GeminiDDP
from gemini.model.in_place import manage
from gemini.model.managed_model import ManagedModel, handle_of
from gemini.optim import CPUAdam, FusedAdam, GeminiAdamOptimizer, GeminiOptimizer, HybridAdam, Lion
from gemini.runtime import init_on
from gemini.wrappers import zero_model_wrapper, zero_optim_wrapper

__version__ = "0.2.0"

__all__ = [
    "CPUAdam",
    "CheckpointError",
    "ConfigError",
    "EvictedAccessError",
    "FusedAdam",
    "GeminiAdamOptimizer",
    "GeminiDDP",
    "GeminiError",
    "GeminiOptimizer",
    "HybridAdam",
    "IoError",
    "Lion",
    "ManagedModel",
    "OutOfBudgetError",
    "StateError",
    "__version__",
    "handle_of",
    "init_on",
    "manage",
    "zero_model_wrapper",
    "zero_optim_wrapper",
]
