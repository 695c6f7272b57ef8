"""A managed parameter's place and gradient, as interception knows them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch


class Gradient(Protocol):
    """The gradient of a managed parameter, as ``param.grad`` shows it."""

    def alias(self) -> torch.Tensor | None:
        """Return what ``param.grad`` is."""
        ...

    def assign(self, grad: torch.Tensor | None) -> None:
        """Do what ``param.grad = grad`` says."""

    def held(self) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Yield what there is of the gradient here: the ids to pin, and the values."""
        ...


class Slot(Protocol):
    """A managed parameter's place, as the parameter knows it."""

    @property
    def name(self) -> str: ...

    @property
    def grad(self) -> Gradient | None: ...

    @property
    def has_grad(self) -> bool: ...

    @property
    def trainable_grad(self) -> Gradient: ...

    def free_grad(self) -> None:
        """Give up the gradient's memory."""
