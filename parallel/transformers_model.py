"""Find the transformers model inside a module, for code that decides by the model's class."""

from __future__ import annotations

from typing import Any

from torch import nn


def pretrained_in(model: nn.Module) -> dict[str, Any]:
    """Return the outermost PreTrainedModels in ``model`` (``model`` itself included), by name."""
    found: dict[str, nn.Module] = {}
    inside: set[int] = set()
    for name, module in model.named_modules():
        if id(module) not in inside and is_pretrained(module):
            found[name] = module
            inside |= {id(part) for part in module.modules()}
    return found


def is_pretrained(module: nn.Module) -> bool:
    """Return whether ``module`` is a PreTrainedModel of transformers, without importing transformers."""
    return any(
        base.__name__ == "PreTrainedModel" and base.__module__.startswith("transformers.")
        for base in type(module).__mro__
    )
