"""Maps functions over the tensors in the containers that models take and return."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, MutableMapping
from typing import Any

import torch


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return ``value`` with every tensor in it replaced by ``change(tensor)``.

    Looks into lists, tuples (named ones too), mutable mappings and dataclasses; other objects are returned as
    they are. Containers are rebuilt, never changed in place.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, change) for item in value)
    if type(value) is dict:
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, MutableMapping):
        mapped = copy.copy(value)
        for key, item in value.items():
            mapped[key] = map_tensors(item, change)
        return mapped
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # Not dataclasses.replace(): it would run __post_init__ again and refuses fields that are not
        # arguments.
        changed = copy.copy(value)
        for item in dataclasses.fields(value):
            if hasattr(value, item.name):
                object.__setattr__(changed, item.name, map_tensors(getattr(value, item.name), change))
        return changed
    return value


def exchange_tensors(
    value: Any, change: Callable[[torch.Tensor], torch.Tensor], around: tuple[int, ...] = ()
) -> Any:
    """Return ``value`` with every tensor in it replaced by ``change(tensor)``, if that is another tensor.

    Looks where :func:`map_tensors` does, but changes lists, mappings and dataclasses in place, for everyone
    who holds them. ``around``: ids of the containers around ``value``; a container inside itself is visited
    once.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if id(value) in around:
        return value
    around = (*around, id(value))
    if isinstance(value, tuple):
        items = [exchange_tensors(item, change, around) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    for key, item in _items(value):
        new = exchange_tensors(item, change, around)
        if new is not item:
            _set_item(value, key, new)
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in ``value``, looking where :func:`exchange_tensors` does."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    exchange_tensors(value, note)
    return found


def _items(container: Any) -> list[tuple[Any, Any]]:
    """Return keys and values of a list, a mapping or a dataclass; nothing for other objects."""
    if isinstance(container, list):
        return list(enumerate(container))
    if isinstance(container, MutableMapping):
        return list(container.items())
    if dataclasses.is_dataclass(container) and not isinstance(container, type):
        names = (item.name for item in dataclasses.fields(container))
        return [(name, getattr(container, name)) for name in names if hasattr(container, name)]
    return []


def _set_item(container: Any, key: Any, value: Any) -> None:
    if isinstance(container, (list, MutableMapping)):
        container[key] = value
    else:
        object.__setattr__(container, key, value)


def cast_floating(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a floating-point tensor as ``dtype``, any other as it is."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
