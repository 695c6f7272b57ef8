"""What goes past a managed model: its module is called itself, nothing ends its steps, so that it is not
planned, which is said once; or torch has put other tensors in the place of its parameters, of which
nothing tells us."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from gemini.errors import StateError
from gemini.runtime.adopt import second_names
from gemini.runtime.gemini_mgr import GeminiManager
from gemini.runtime.intercept.tensors import ManagedParameter
from gemini.runtime.storage.model_storage import ModelStorage

logger = logging.getLogger(__name__)

_STEPS_UNSEEN = 2  # in a row: gradients of one may have been given up after an error
_ALL_MANAGED = {ManagedParameter}


class Unfollowed:
    """What of a model's use belongs to no step that could be planned."""

    def __init__(self, module: nn.Module, storage: ModelStorage, manager: GeminiManager) -> None:
        self._storage, self._manager = storage, manager
        self.in_pass = False  # of the wrapper
        self._said: set[str] = set()
        self._gradients = 0  # that had arrived when the pass before began
        self._unseen = 0
        _by_module[module] = self
        self._hook = module.register_forward_pre_hook(_note_call)

    def close(self) -> None:
        """Say nothing any more: the module is an ordinary one again."""
        self._hook.remove()

    @contextmanager
    def inside(self, training: bool) -> Iterator[None]:
        """Be in a forward pass of the wrapper for the block."""
        if training and self._manager.step == 0:
            self._look_for_steps()
        outer, self.in_pass = self.in_pass, True
        try:
            yield
        finally:
            self.in_pass = outer

    def note_call(self) -> None:
        """The module was called, perhaps by its wrapper."""
        if not self.in_pass and torch.is_grad_enabled():
            self._say(
                "the managed module is called itself, past its GeminiDDP: operators fetch what they need, "
                "but nothing is recorded, planned or prefetched; call the GeminiDDP"
            )

    def _look_for_steps(self) -> None:
        gradients, before = self._manager.num_gradients, self._gradients
        self._gradients = gradients
        used_up = gradients > before and not any(slot.has_grad for slot in self._storage.slots.values())
        self._unseen = self._unseen + 1 if used_up else 0
        if self._unseen >= _STEPS_UNSEEN:
            self._say(
                "gradients come and go, but no GeminiOptimizer ends a step: nothing is planned, and an "
                "optimizer of torch keeps its states beside the budgets; use "
                "GeminiOptimizer(optimizer, model)"
            )

    def _say(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.warning(what)


# Not in the module itself: its copies are nobody's.
_by_module: WeakKeyDictionary[nn.Module, Unfollowed] = WeakKeyDictionary()


def _note_call(module: nn.Module, _args: Any) -> None:
    unfollowed = _by_module.get(module)
    if unfollowed is not None:
        unfollowed.note_call()


class ManagedParameters:
    """The parameters that were made managed when a model was wrapped."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        named = list(module.named_parameters())
        self._names = [name for name, _ in named]
        self._params = [param for _, param in named]
        self._is_released = False

    def release(self) -> None:
        """They are ordinary parameters again, for good."""
        self._is_released = True

    def refuse_exchanged(self, doing: str) -> None:
        """Raise StateError where one of them is no longer managed: its chunk would keep what nobody uses. Or
        where two parameters of the module are one in its chunk."""
        if self._is_released:
            raise StateError(
                f"{doing}: the model was released: its parameters are ordinary ones; manage it again, or go "
                "on with the module alone"
            )
        if second_names:
            self._refuse_twins(doing)
        if _ALL_MANAGED.issuperset(map(type, self._params)):
            return
        managed = [type(param) is ManagedParameter for param in self._params]
        name = self._names[managed.index(False)]
        raise StateError(
            f"{doing}: parameter {name!r} is no longer managed: torch.utils.swap_tensors, or "
            "load_state_dict() of the module under "
            "torch.__future__.set_swap_module_params_on_conversion(True), put another "
            "tensor in its place. Build the model again, wrap it and load a checkpoint; load weights with "
            "load_state_dict() of the GeminiDDP, which copies them"
        )

    def _refuse_twins(self, doing: str) -> None:
        names: dict[int, str] = {}
        for name, param in self._module.named_parameters():  # each once
            if type(param) is ManagedParameter:
                other = names.setdefault(id(param._slot), name)
                if other != name:
                    raise StateError(
                        f"{doing}: parameters {other!r} and {name!r} share one memory, as of "
                        "nn.Parameter(weight); tie them: layer.weight = other_layer.weight"
                    )
