"""Shells: objects of an optimizer's class that step over other tensors than its parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class GroupSettings:
    """The settings of a parameter group as they were; tensors are copies. ``place``: which group it was."""

    values: Mapping[str, Any]
    text: str
    place: int

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> GroupSettings:
        named = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        text = ", ".join(f"{name}={_shown(value)}" for name, value in named.items())
        return cls({name: copied(value) for name, value in named.items()}, text, id(group))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GroupSettings) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return self.text

    def as_numbers(self) -> dict[str, Any]:
        """Return the settings that are numbers, words or some of them."""
        return {name: value for name, value in self.values.items() if _is_plain(value)}

    @property
    def switches(self) -> str:
        """The settings that decide what is kept: names, and which numbers are 0."""
        return repr(
            [(name, bool(value) if _is_number(value) else value) for name, value in self.values.items()]
        )


def step_of(kind: type[torch.optim.Optimizer]) -> Callable[[torch.optim.Optimizer], object]:
    """Return the ``step`` of an optimizer's class, without what torch wraps around it to run hooks."""
    step = kind.step
    bare: Callable[[torch.optim.Optimizer], object] = getattr(step, "__wrapped__", step)
    return bare if getattr(step, "hooked", False) else step


def shell_of(optim: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer like ``optim``, for parameters of one step."""
    shell: torch.optim.Optimizer = object.__new__(type(optim))
    vars(shell).update(vars(optim))
    vars(shell).pop("_own", None)  # of one that drives itself: its shells step over plain tensors
    shell.state = defaultdict(dict)
    return shell


def copied(value: Any) -> Any:
    """Return a copy of a tensor; everything else as it is."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def equal(one: Any, other: Any) -> bool:
    """Say whether two values of states or settings are equal; NaN is equal to NaN."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return bool(((one == other) | (one.isnan() & other.isnan())).all())
    return bool(one == other) or (one != one and other != other)


def _shown(value: Any) -> str:
    """Return text that differs where values do; repr rounds those of tensors."""
    return f"tensor({value.tolist()})" if isinstance(value, torch.Tensor) else repr(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str) or _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)
