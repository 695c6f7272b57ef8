"""What GeminiOptimizer refuses to be made with."""

from __future__ import annotations

import torch

from gemini.ddp import GeminiDDP
from gemini.errors import ConfigError
from gemini.runtime import ManagedParameter


def checked_max_norm(max_norm: float) -> float:
    """Return the norm to clip to in every step. Raise ConfigError for one that means nothing."""
    if not max_norm >= 0:
        raise ConfigError(f"max_norm is {max_norm}; give a positive number, or 0 to clip nothing")
    return max_norm


def check_parameters(optim: torch.optim.Optimizer, model: GeminiDDP) -> None:
    """Raise ConfigError where ``model`` is none that is managed, or does not manage a parameter of
    ``optim``."""
    if not isinstance(model, GeminiDDP):
        raise ConfigError(f"GeminiOptimizer updates a GeminiDDP, not {type(model).__name__}; wrap the model")
    for index, group in enumerate(optim.param_groups):
        for param in group["params"]:
            if type(param) is not ManagedParameter or param._slot not in model.storage.slots.values():
                raise ConfigError(
                    f"group {index} of the optimizer holds a parameter of shape {tuple(param.shape)} that "
                    f"the model does not manage; "
                    "build the optimizer from the wrapped model's parameters"
                )
