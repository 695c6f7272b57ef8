"""ManagedOptimizer: the protocol through which state dicts, shards and checkpoints use an optimizer of a
managed model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gemini.chunk.chunk import StateSpec
from gemini.model.handle import ManagedModel
from gemini.optim.gradients import LossScale
from gemini.optim.rule import UpdateRule
from gemini.runtime.storage.model_storage import ManagedSlot


class ManagedOptimizer(Protocol):
    """``steps``: the number of steps per parameter. ``small``: its small states. ``state_names``: the states
    that chunks keep, by torch's names. ``file_backed``: tensors of states that are in a file between updates.
    """

    model: ManagedModel
    rule: UpdateRule
    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any]
    steps: dict[ManagedSlot, int]
    small: dict[ManagedSlot, dict[str, Any]]
    file_backed: frozenset[int]
    loss_scale: LossScale | None

    @property
    def state(self) -> Any:
        """The state of each parameter, read-only."""
        ...

    @property
    def state_names(self) -> tuple[str, ...]: ...

    def states_of(self, slot: ManagedSlot) -> tuple[StateSpec, ...]:
        """Return the states that chunks keep for a parameter."""
        ...

    @property
    def slots(self) -> set[ManagedSlot]:
        """The slots of the parameters that it updates."""
        ...

    def refuse_changes(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Raise ConfigError if saved groups say that their parameters were updated in another way
        than here.
        """

    def require_complete(self, doing: str) -> None:
        """Raise StateError if an update or a load failed half-way."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the format of torch's optimizers."""
        ...
