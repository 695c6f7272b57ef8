"""gemini-runtime: train PyTorch models far larger than the memory they are given."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gemini.errors import (
    CheckpointError,
    ConfigError,
    EvictedAccessError,
    GeminiError,
    IoError,
    OutOfBudgetError,
    StateError,
)
from gemini.losses.tiled_cross_entropy import tiled_cross_entropy
from gemini.model.ddp import GeminiDDP
from gemini.model.handle import ManagedModel, handle_of
from gemini.model.in_place import manage
from gemini.optim import (
    CPUAdam,
    FusedAdam,
    GeminiAdamOptimizer,
    GeminiOptimizer,
    HybridAdam,
    Lamb,
    Lion,
    Muon,
)
from gemini.runtime import init_on
from gemini.wrappers import zero_model_wrapper, zero_optim_wrapper

if TYPE_CHECKING:
    from gemini.integrations.pretrained import from_pretrained
    from gemini.planner.auto import autoparallelize

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
    "Lamb",
    "Lion",
    "ManagedModel",
    "Muon",
    "OutOfBudgetError",
    "StateError",
    "__version__",
    "autoparallelize",
    "from_pretrained",
    "handle_of",
    "init_on",
    "manage",
    "tiled_cross_entropy",
    "zero_model_wrapper",
    "zero_optim_wrapper",
]


_LATE = {
    "autoparallelize": "gemini.planner.auto",
    "from_pretrained": "gemini.integrations.pretrained",
}


def __getattr__(name: str) -> Any:
    """Import a rarely used name when it is first accessed."""
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATE[name]), name)
