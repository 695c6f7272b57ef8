"""The model of transformers that a module is, or has inside: what decides by its class asks that one."""

from __future__ import annotations

from typing import Any

from torch import nn

from gemini.errors import ConfigError


def pretrained_in(model: nn.Module) -> dict[str, Any]:
    """Return the PreTrainedModels in ``model``, itself included, that no other one is around, by their
    names."""
    found: dict[str, nn.Module] = {}
    inside: set[int] = set()
    for name, module in model.named_modules():
        if id(module) not in inside and _is_pretrained(module):
            found[name] = module
            inside |= {id(part) for part in module.modules()}
    return found


def find_pretrained(model: nn.Module) -> Any:
    """Return the one of :func:`pretrained_in`; None: there is none.

    Raises:
        ConfigError: there are several.
    """
    found = pretrained_in(model)
    if len(found) > 1:
        raise ConfigError(
            f"{type(model).__name__} has {len(found)} models of transformers ({', '.join(found)}), and parts "
            "of sequences are for one; leave sp_size at 1"
        )
    return next(iter(found.values()), None)


def _is_pretrained(module: nn.Module) -> bool:
    return any(
        base.__name__ == "PreTrainedModel" and base.__module__.startswith("transformers.")
        for base in type(module).__mro__
    )
