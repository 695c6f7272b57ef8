"""WrappedOptimizer: what torch promises of an optimizer, kept by one that drives another."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch

from gemini.errors import ConfigError, StateError

W = TypeVar("W", bound="WrappedOptimizer")

HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def step_of(kind: type[torch.optim.Optimizer]) -> Callable[[torch.optim.Optimizer], object]:
    """Return the ``step`` of an optimizer's class, without what torch wraps around it to run hooks."""
    step = kind.step
    bare: Callable[[torch.optim.Optimizer], object] = getattr(step, "__wrapped__", step)
    return bare if getattr(step, "hooked", False) else step


class WrappedOptimizer(torch.optim.Optimizer):
    """An optimizer that drives another one, whose hooks are its own.

    Hooks of either, and torch's for all optimizers, run around what the wrapper does, once, and are given the
    wrapper. There is one wrapper of a model's parameters: it is neither copied nor pickled.
    """

    _grad_norm: float | None = None
    _num_zeros_in_grad: int | None = None

    def get_grad_norm(self) -> float | None:
        """Return the norm of the last step's gradients, without loss scale, before clipping; None where that
        step did not clip by norm, which measures it. A limit of ``math.inf`` does, and changes nothing."""
        return self._grad_norm

    def get_num_zeros_in_grad(self) -> int | None:
        """Return how many elements of the last step's gradients were 0, over all ranks and parts of the
        model; None without ``log_num_zeros_in_grad``, or where the step was skipped."""
        return self._num_zeros_in_grad

    def share_hooks(self, optim: torch.optim.Optimizer) -> None:
        """Have the hooks of the wrapped optimizer, those registered later included, as its own."""
        for name in HOOKS:
            setattr(self, name, getattr(optim, name))
        self._driven = weakref.ref(optim)  # whose hooks may lead here

    def tell_schedulers(self) -> None:
        """Have those that were made for the wrapped optimizer know that it has stepped: they warn where its
        own ``step`` was not called first."""
        optim = self._driven()
        if optim is not None:
            optim._opt_called = True  # type: ignore[attr-defined]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ConfigError(
            f"a {type(self).__name__} cannot be copied or pickled: it updates the parameters of one model, "
            "where they lie. Save its state_dict(), or load that into an optimizer made for the other model"
        )

    def _hooked_state(self, export: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what ``export`` does, between the hooks of ``state_dict()``."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = export()
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state)
            state = state if changed is None else changed
        return state

    def _before_load(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return what the hooks that run before ``load_state_dict()`` make of a copy of its argument."""
        state = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state)
            state = state if changed is None else changed
        return state

    def _after_load(self) -> None:
        """Run the hooks that follow ``load_state_dict()``."""
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)


def refuse_states_of(optim: torch.optim.Optimizer, wrapper: W, in_charge: Callable[[W], bool]) -> None:
    """Have ``state_dict()`` and ``load_state_dict()`` of ``optim`` raise StateError as long as ``wrapper``
    drives it and is in charge: what they know of the states is none, or a part."""
    this, kind, own = weakref.ref(wrapper), type(optim).__name__, type(wrapper).__name__

    def refuse(call: str, asked: torch.optim.Optimizer) -> None:
        found = this()
        # The hooks are the wrapper's, too, and those of a later one of the same optimizer.
        if found is not None and asked is found._driven() and in_charge(found):
            raise StateError(
                f"{call}() of the {kind} that a {own} drives, which has the states of its parameters; "
                f"call {call}() of the {own}"
            )

    optim.register_state_dict_pre_hook(lambda asked: refuse("state_dict", asked))
    optim.register_load_state_dict_pre_hook(lambda asked, _: refuse("load_state_dict", asked))


@contextmanager
def hooks_set_aside(optim: torch.optim.Optimizer) -> Iterator[None]:
    """Let no hook of ``optim`` run within the block, in which a wrapper uses it for a part of its work."""
    kept = {name: getattr(optim, name) for name in HOOKS}
    try:
        for name in HOOKS:
            setattr(optim, name, OrderedDict())
        yield
    finally:
        for name, hooks in kept.items():
            setattr(optim, name, hooks)


def step_within(optim: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> None:
    """Run the step of ``optim`` as a part of its wrapper's, around which all hooks run; with ``closure``
    where it has one.

    What others have put in place of its ``step`` runs as it is, with torch's hooks for all optimizers where
    it calls the original; that of a scheduler only counts.
    """
    given = () if closure is None else (closure,)
    replaced = vars(optim).get("step")
    if replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"):
        with hooks_set_aside(optim):
            replaced(*given)
        return
    step_of(type(optim))(optim, *given)
