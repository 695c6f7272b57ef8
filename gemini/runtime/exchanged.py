"""Managed parameters that torch has put other tensors in the place of: nothing tells us when it does."""

from __future__ import annotations

from torch import nn

from gemini.errors import StateError
from gemini.runtime.adopt import second_names
from gemini.runtime.intercept.param import ManagedParameter

_ALL_MANAGED = {ManagedParameter}


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
