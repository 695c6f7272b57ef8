"""An optimizer of managed parameters, as state dicts, shards and files know it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gemini.chunk.chunk import StateSpec
from gemini.model.handle import ManagedModel
from gemini.optim.gradients import LossScale
from gemini.optim.rule import UpdateRule
from gemini.runtime import ManagedSlot


class ManagedOptimizer(Protocol):
    """``steps``: how many each parameter has made; ``small``: its small states; ``state_names``: what chunks
    keep of parameters, by torch's names; ``stowed``: tensors of states that a file has between updates."""

    model: ManagedModel
    rule: UpdateRule
    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any]
    steps: dict[ManagedSlot, int]
    small: dict[ManagedSlot, dict[str, Any]]
    stowed: frozenset[int]
    loss_scale: LossScale | None

    @property
    def state(self) -> Any:
        """The state of each parameter, to be read."""
        ...

    @property
    def state_names(self) -> tuple[str, ...]: ...

    def states_of(self, slot: ManagedSlot) -> tuple[StateSpec, ...]:
        """Return what is kept of a parameter."""
        ...

    @property
    def slots(self) -> set[ManagedSlot]:
        """The parameters that it updates."""
        ...

    def refuse_changes(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Raise ConfigError where parameters of saved groups were updated in another way than here."""

    def require_complete(self, doing: str) -> None:
        """Raise StateError where an update or a load failed half-way."""

    def state_dict(self) -> dict[str, Any]:
        """Return what torch's optimizers do."""
        ...
