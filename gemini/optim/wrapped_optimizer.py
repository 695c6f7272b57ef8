"""WrappedOptimizer: base of optimizers that drive another optimizer and keep torch's contract (hooks, state
dicts, schedulers).
"""

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
    """Return the ``step`` of an optimizer class without the wrapper by which torch runs hooks."""
    step = kind.step
    bare: Callable[[torch.optim.Optimizer], object] = getattr(step, "__wrapped__", step)
    return bare if getattr(step, "hooked", False) else step


class WrappedOptimizer(torch.optim.Optimizer):
    """An optimizer that drives another one and shares its hooks.

    Hooks of either optimizer, and torch's global ones, run once, around the wrapper's call, and get the
    wrapper. A wrapper is unique for its model's parameters: it can be neither copied nor pickled.
    """

    _grad_norm: float | None = None
    _num_zeros_in_grad: int | None = None

    def get_grad_norm(self) -> float | None:
        """Return the norm of the last step's gradients, without loss scale, before clipping.

        None if that step did not clip by norm, because only clipping measures it. A limit of ``math.inf``
        measures it and changes nothing.
        """
        return self._grad_norm

    def get_num_zeros_in_grad(self) -> int | None:
        """Return the number of elements of the last step's gradients that were 0, over all ranks and all
        parts of the model. None without ``log_num_zeros_in_grad``, or if the step was skipped.
        """
        return self._num_zeros_in_grad

    def share_hooks(self, optim: torch.optim.Optimizer) -> None:
        """Share the hook dicts of the wrapped optimizer, so that hooks registered later are included."""
        for name in HOOKS:
            setattr(self, name, getattr(optim, name))
        self._driven = weakref.ref(optim)  # weak: its hooks may refer to this wrapper

    def tell_schedulers(self) -> None:
        """Mark the wrapped optimizer as stepped. Its schedulers warn if its own ``step`` was not called
        before theirs.
        """
        optim = self._driven()
        if optim is not None:
            optim._opt_called = True  # type: ignore[attr-defined]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ConfigError(
            f"a {type(self).__name__} cannot be copied or pickled: it updates the parameters of one model, "
            "where they lie. Save its state_dict(), or load that into an optimizer made for the other model"
        )

    def _hooked_state(self, export: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the result of ``export``, with the hooks of ``state_dict()`` run before and after it."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = export()
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state)
            state = state if changed is None else changed
        return state

    def _before_load(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of ``state_dict`` after the pre-hooks of ``load_state_dict()``."""
        state = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state)
            state = state if changed is None else changed
        return state

    def _after_load(self) -> None:
        """Run the post-hooks of ``load_state_dict()``."""
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)


def refuse_states_of(optim: torch.optim.Optimizer, wrapper: W, in_charge: Callable[[W], bool]) -> None:
    """Make ``state_dict()`` and ``load_state_dict()`` of ``optim`` raise StateError while ``wrapper`` drives
    it and ``in_charge(wrapper)`` holds: ``optim`` has no states, or only a part of them.
    """
    this, kind, own = weakref.ref(wrapper), type(optim).__name__, type(wrapper).__name__

    def refuse(call: str, asked: torch.optim.Optimizer) -> None:
        found = this()
        # The wrapper, and later wrappers of the same optimizer, share these hooks: check who is asked.
        if found is not None and asked is found._driven() and in_charge(found):
            raise StateError(
                f"{call}() of the {kind} that a {own} drives, which has the states of its parameters; "
                f"call {call}() of the {own}"
            )

    optim.register_state_dict_pre_hook(lambda asked: refuse("state_dict", asked))
    optim.register_load_state_dict_pre_hook(lambda asked, _: refuse("load_state_dict", asked))


@contextmanager
def hooks_set_aside(optim: torch.optim.Optimizer) -> Iterator[None]:
    """Run the block without the hooks of ``optim``; a wrapper uses ``optim`` in it for a part of its own
    work.
    """
    kept = {name: getattr(optim, name) for name in HOOKS}
    try:
        for name in HOOKS:
            setattr(optim, name, OrderedDict())
        yield
    finally:
        for name, hooks in kept.items():
            setattr(optim, name, hooks)


def step_within(optim: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> None:
    """Run the step of ``optim`` as a part of its wrapper's step, around which all hooks run.

    A ``step`` that user code put on the object is called as it is; torch's global hooks then run if it calls
    the original. A scheduler's wrapper around ``step`` only counts and is skipped. ``closure`` is passed if
    given.
    """
    given = () if closure is None else (closure,)
    replaced = vars(optim).get("step")
    if replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"):
        with hooks_set_aside(optim):
            replaced(*given)
        return
    step_of(type(optim))(optim, *given)
