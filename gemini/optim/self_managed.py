"""SelfManaged: base of our optimizers, which make their own GeminiOptimizer if their parameters
are managed.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import torch

from gemini.errors import ConfigError
from gemini.model.handle import ManagedModel, handle_of_parameter
from gemini.optim.wrapped_optimizer import step_of
from gemini.runtime import ManagedParameter

Hyper = TypeVar("Hyper")

# The public methods of GeminiOptimizer that torch's optimizers lack; they are forwarded to the driver.
_SHOWN = frozenset(
    ("backward", "clip_grad_by_norm", "clip_grad_by_value", "get_grad_norm", "get_param_grad", "loss_scale")
)


class SelfManaged(torch.optim.Optimizer):
    """An optimizer that works over plain and over managed parameters.

    Over managed parameters it delegates to a GeminiOptimizer: one that the user made for it or, at its first
    use, one that it makes with default options. ``driver_type`` is GeminiOptimizer, set by
    :meth:`be_driven_by` because that module imports this one.
    """

    driver_type: ClassVar[Callable[[torch.optim.Optimizer, ManagedModel], Any]]

    _own: Any = None  # the GeminiOptimizer that it made
    makes_driver = False  # True while it is making one
    _given_to: Callable[[], Any] = staticmethod(lambda: None)  # returns the one that the user made

    @classmethod
    def be_driven_by(cls, driver_type: Callable[[torch.optim.Optimizer, ManagedModel], Any]) -> None:
        """Set the class that these optimizers make for managed parameters."""
        cls.driver_type = driver_type

    def driver(self) -> Any:
        """Return the GeminiOptimizer that this optimizer made for its parameters; makes it at the first call.

        None if the parameters are plain or if another object drives it. Raises like
        :class:`gemini.GeminiOptimizer`.
        """
        if self._own is not None:
            return self._own
        params = next((group["params"] for group in self.param_groups if group["params"]), ())
        if not params or type(params[0]) is not ManagedParameter or self._given_to() is not None:
            return None
        self.makes_driver = True
        try:
            own = type(self).driver_type(self, handle_of_parameter(params[0]))
        finally:
            del self.makes_driver
        self._given_to = lambda: None
        self._own = own
        self.state = own.state
        return own

    def require_free(self) -> None:
        """Raise ConfigError if this optimizer has already updated a managed model: its own driver has the
        states.
        """
        if self._own is not None and self._own.steps:
            raise ConfigError(
                f"this {type(self).__name__} has already updated the managed model without a "
                "GeminiOptimizer; continue to use it directly (it has backward() and "
                "clip_grad_by_norm()), or create the GeminiOptimizer before its first step"
            )

    def give_to(self, wrapper: torch.optim.Optimizer) -> None:
        """Let ``wrapper`` drive this optimizer from now on."""
        if self._own is not None:
            self._own, self.state = None, defaultdict(dict)
        self._given_to = weakref.ref(wrapper)

    def step_managed(self, closure: Callable[[], Any] | None) -> Any:
        """Run the step of :meth:`driver`, without hooks: they run around the calling step."""
        step: Callable[..., Any] = step_of(type(self._own))
        return step(self._own, closure)

    def step_plain(
        self,
        closure: Callable[[], Any] | None,
        hyper_of: Callable[[Any], Hyper],
        update: Callable[[torch.Tensor, dict[str, Any], Hyper], None],
    ) -> Any:
        """Call ``update(param, state, hyper)`` for every plain parameter that has a gradient; return the loss
        of ``closure``.

        ``state`` is empty at first; ``hyper_of`` reads the settings of a group. Raises ConfigError for a
        sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            hyper = hyper_of(group)
            for param in group["params"]:
                if param.grad is None:
                    continue
                if param.grad.is_sparse:
                    raise ConfigError(
                        f"{type(self).__name__} supports only dense gradients; use SparseAdam for "
                        "sparse layers"
                    )
                update(param, self.state[param], hyper)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients, or zero them. Collective for managed parameters: every rank must call it."""
        own = self.driver()
        if own is not None:
            own.zero_grad(set_to_none)
        else:
            super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the format of torch's optimizers."""
        own = self.driver()
        return own.state_dict() if own is not None else super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state in the format of torch's optimizers."""
        own = self.driver()
        if own is not None:
            own.load_state_dict(state_dict)
            return
        loaded = state_dict.get("param_groups", ())
        for index, (group, saved) in enumerate(zip(self.param_groups, loaded, strict=False)):
            self.refuse_change(index, group, saved)
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, or the groups that :meth:`split_group` makes of it. After an error none is added."""
        count = len(self.param_groups)
        if self._own is not None:
            self._own.add_param_group(param_group)
            self.param_groups += self._own.param_groups[count:]
            self._own.record_driven_groups(self)
            return
        try:
            for group in self.split_group(param_group):
                super().add_param_group(group)
        except BaseException:
            del self.param_groups[count:]
            raise

    def split_group(self, param_group: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the groups to add for ``param_group``. A GeminiOptimizer that drives this optimizer calls it
        too.
        """
        return [param_group]

    def refuse_change(self, index: int, group: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        """Raise ConfigError if the saved group ``saved`` updated its parameters in another way than group
        ``index``, ``group``, does here. A GeminiOptimizer that drives this optimizer calls it too.
        """

    def __getstate__(self) -> dict[str, Any]:
        if self._own is not None:
            self._own.__reduce_ex__(2)  # raises: states are in the model's chunks
        return super().__getstate__()

    def __getattr__(self, name: str) -> Any:
        own = self.driver() if name in _SHOWN else None
        if own is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(own, name)


def driver_of(optimizer: Any) -> Any:
    """Return the GeminiOptimizer that a self-managed optimizer made; other optimizers unchanged."""
    own = optimizer.driver() if isinstance(optimizer, SelfManaged) else None
    return optimizer if own is None else own
