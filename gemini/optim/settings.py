"""Settings of parameter groups as numbers, and what is refused of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gemini.errors import ConfigError


def numbers_of(group: Mapping[str, Any], *names: str) -> dict[str, float]:
    """Return settings of a group, of which one-element tensors count as numbers. Raises ConfigError for what
    is none."""
    try:
        return {name: float(group[name]) for name in names}
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ConfigError(f"{', '.join(names)} must be numbers: {error}") from None


def betas_of(group: Mapping[str, Any]) -> tuple[float, float]:
    """Return the betas of a group. Raises ConfigError for what are not two numbers."""
    try:
        first, second = (float(beta) for beta in group["betas"])
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise ConfigError(f"betas are {group['betas']!r}; they must be two numbers in [0, 1)") from None
    return first, second


def require_non_negative(**settings: float) -> None:
    """Raise ConfigError for a setting that is below 0, or NaN."""
    for name, value in settings.items():
        if not value >= 0.0:
            raise ConfigError(f"{name} is {value!r}; it must be 0 or more")


def require_betas(betas: tuple[float, float]) -> None:
    """Raise ConfigError for betas that are not two numbers in [0, 1)."""
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ConfigError(f"betas are {betas!r}; they must be two numbers in [0, 1)")
