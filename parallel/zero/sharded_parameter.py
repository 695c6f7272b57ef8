"""Parameters whose gradients are with their optimizer: reading one says so, instead of None."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from gemini.errors import StateError

_GRAD: Any = torch.Tensor.grad  # the descriptor


class ShardedGradient:
    """Of a parameter's class: ``grad``, which raises while the optimizer has the gradient.

    Nothing else differs: copies and pickles are of the class that the parameter had.
    """

    _had_class: type[torch.Tensor]
    _is_held: Callable[[], str]

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient as autograd has it; between backward and the optimizer's step that is none.

        Raises:
            StateError: the optimizer has it; a reader would take it for missing.
        """
        grad = raw_grad(self)
        if grad is None and (label := self._is_held()):
            raise StateError(
                f"the gradient of {label} is with its LowLevelZeroOptimizer, a part of it on each rank, not "
                "in param.grad: clip by optimizer.clip_grad_by_norm(max_norm) or clip_grad_by_value(), read "
                "optimizer.get_param_grad(param) or get_grad_norm(), and give gradients up by "
                "optimizer.zero_grad()"
            )
        return grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        set_raw_grad(self, value)

    @grad.deleter
    def grad(self) -> None:
        set_raw_grad(self, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            with _AsBefore(self):
                return self.__deepcopy__(memo)
        copied: torch.Tensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _AsBefore(self):
            return self.__reduce_ex__(protocol)


class _AsBefore:
    """Have a parameter as it was before it was watched, for the block."""

    def __init__(self, param: Any) -> None:
        self._param = param

    def __enter__(self) -> None:
        self._is_held = self._param._is_held
        unwatch(self._param)

    def __exit__(self, *_exception: object) -> None:
        self._param.__dict__ = dict(self._param.__dict__)  # the other one may be in what is pickled next
        watch(self._param, self._is_held)


def watch(param: torch.Tensor, is_held: Callable[[], str]) -> None:
    """Have ``param.grad`` raise while ``is_held()`` says, by a name for the parameter, that it is held."""
    unwatch(param)
    watched: Any = param
    watched._had_class, watched._is_held = type(param), is_held
    watched.__class__ = _watched(type(param))


def unwatch(param: torch.Tensor) -> None:
    """Undo :func:`watch`. Idempotent."""
    if isinstance(param, ShardedGradient):
        watched: Any = param
        watched.__class__ = watched._had_class
        del watched._had_class, watched._is_held


def raw_grad(param: Any) -> torch.Tensor | None:
    """Return what autograd has put into ``param.grad``."""
    grad: torch.Tensor | None = _GRAD.__get__(param)
    return grad


def set_raw_grad(param: Any, grad: torch.Tensor | None) -> None:
    """Set what autograd adds to."""
    _GRAD.__set__(param, grad)


@cache
def _watched(had: type[torch.Tensor]) -> type[torch.Tensor]:
    members = {"__torch_function__": torch._C._disabled_torch_function_impl} if had is torch.Tensor else {}
    watched: type[torch.Tensor] = type(had.__name__, (ShardedGradient, had), members)
    return watched
