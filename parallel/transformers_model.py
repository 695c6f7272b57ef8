"""Find the transformers model inside a module, for code that decides by the model's class."""

from __future__ import annotations

from typing import Any

from torch import nn

from gemini.errors import ConfigError


def pretrained_in(model: nn.Module) -> dict[str, Any]:
    """Return the outermost PreTrainedModels in ``model`` (``model`` itself included), by name."""
    found: dict[str, nn.Module] = {}
    inside: set[int] = set()
    for name, module in model.named_modules():
        if id(module) not in inside and is_pretrained(module):
            found[name] = module
            inside |= {id(part) for part in module.modules()}
    return found


def find_pretrained(model: nn.Module) -> Any:
    """Return the only model that :func:`pretrained_in` finds; None if it finds none.

    Raises:
        ConfigError: there are several.
    """
    found = pretrained_in(model)
    if len(found) > 1:
        raise ConfigError(
            f"{type(model).__name__} has {len(found)} models of transformers ({', '.join(found)}), but a "
            "batch can be cut for one model only; give whole batches to all ranks and cut the sequence at "
            "the blocks (cut='blocks'), or set sp_size=1"
        )
    return next(iter(found.values()), None)


def is_pretrained(module: nn.Module) -> bool:
    """Return whether ``module`` is a PreTrainedModel of transformers, without importing transformers."""
    return any(
        base.__name__ == "PreTrainedModel" and base.__module__.startswith("transformers.")
        for base in type(module).__mro__
    )
