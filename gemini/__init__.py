"""gemini-runtime: train PyTorch models far larger than the memory they are given.

Names are imported when they are first accessed. So the ``gemini`` command can handle Ctrl-C before torch is
imported, and a program does not wait for parts of the package that it does not use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gemini.errors import (
        CheckpointError,
        ConfigError,
        EvictedAccessError,
        GeminiError,
        IoError,
        OutOfBudgetError,
        StateError,
    )
    from gemini.integrations.pretrained import from_pretrained
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
    from gemini.planner.auto import autoparallelize
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

# The module that defines each name; type checkers read the imports above.
_HOMES = {
    "CPUAdam": "gemini.optim",
    "CheckpointError": "gemini.errors",
    "ConfigError": "gemini.errors",
    "EvictedAccessError": "gemini.errors",
    "FusedAdam": "gemini.optim",
    "GeminiAdamOptimizer": "gemini.optim",
    "GeminiDDP": "gemini.model.ddp",
    "GeminiError": "gemini.errors",
    "GeminiOptimizer": "gemini.optim",
    "HybridAdam": "gemini.optim",
    "IoError": "gemini.errors",
    "Lamb": "gemini.optim",
    "Lion": "gemini.optim",
    "ManagedModel": "gemini.model.handle",
    "Muon": "gemini.optim",
    "OutOfBudgetError": "gemini.errors",
    "StateError": "gemini.errors",
    "autoparallelize": "gemini.planner.auto",
    "from_pretrained": "gemini.integrations.pretrained",
    "handle_of": "gemini.model.handle",
    "init_on": "gemini.runtime",
    "manage": "gemini.model.in_place",
    "tiled_cross_entropy": "gemini.losses.tiled_cross_entropy",
    "zero_model_wrapper": "gemini.wrappers",
    "zero_optim_wrapper": "gemini.wrappers",
}


def __getattr__(name: str) -> Any:
    """Import a public name or a submodule when it is first accessed."""
    found = getattr(import_module(_HOMES[name]), name) if name in _HOMES else _part(name)
    globals()[name] = found
    return found


def _part(name: str) -> Any:
    path = f"{__name__}.{name}"
    if not name.startswith("__"):
        try:
            return import_module(path)
        except ModuleNotFoundError as error:
            if error.name != path:
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return all names, including those that are not imported yet."""
    return sorted({*globals(), *__all__})
