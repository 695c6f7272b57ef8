"""The states of an optimizer that has a rank's part of a model, by the names of its parameters there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from gemini.checkpoint import contents
from gemini.errors import CheckpointError, ConfigError, in_words
from gemini.optim.gemini_optimizer import GeminiOptimizer
from gemini.optim.kernels import SCALES
from gemini.optim.state_exchange import checked_state, counted_steps
from gemini.parallel.booster.checkpoint.optimizer_files import (
    begin_managed,
    managed_settings,
    managed_sources,
    settings_of_sharded,
)
from gemini.parallel.booster.checkpoint.sources import Names
from gemini.parallel.booster.checkpoint.tensor_source import TensorSource
from gemini.parallel.booster.checkpoint.zero import state_sources
from gemini.parallel.zero import LowLevelZeroOptimizer

Settings = tuple[list[dict[str, Any]], dict[str, Any]]


class StatesOfPart(Protocol):
    """What files need to know of an optimizer."""

    optimizer: torch.optim.Optimizer

    @property
    def groups(self) -> list[list[str]]:
        """The names of the parameters in each group."""
        ...

    @property
    def present(self) -> set[str]:
        """The names of all parameters of this rank, those that are in no group included."""
        ...

    def require_readable(self) -> None:
        """Raise where states cannot be loaded now, and nothing has changed."""
        ...

    def contents(self) -> dict[str, tuple[list[TensorSource], Mapping[str, Any]]]:
        """Return, of each parameter that has a state, its tensors as sources named ``<name>/<state>``, and
        what is no tensor. The ranks that have the same part call it together, and run the sources."""
        ...

    def settings(self) -> Settings:
        """Return the settings of the groups, and what is next to them in a state dict."""
        ...

    def wanted(self, name: str, found: Sequence[str], *, is_cut: bool) -> list[str]:
        """Return which of the states that were ``found`` of a parameter are to be loaded."""
        ...

    def check(self, outline: dict[str, Any], checkpoint: object) -> None:
        """Raise CheckpointError for a state dict, its tensors on ``meta``, that cannot be loaded."""
        ...

    def load(self, state: dict[str, Any]) -> None:
        """Take over a state dict of the groups; ranks that have the same part together."""
        ...


def states_of_part(optimizer: torch.optim.Optimizer, names: Names) -> StatesOfPart:
    """Return the states of a boosted ``optimizer``; ``names``: of the parameters of its model, here."""
    if isinstance(optimizer, GeminiOptimizer):
        return _InChunks(optimizer)
    assert isinstance(optimizer, LowLevelZeroOptimizer)
    return _OfReplicas(optimizer, names)


class _InChunks:
    """States in chunks."""

    def __init__(self, optimizer: GeminiOptimizer) -> None:
        self.optimizer: torch.optim.Optimizer = optimizer
        self._optimizer = optimizer
        self._slots = {
            param._slot.name: param._slot for group in optimizer.param_groups for param in group["params"]
        }

    @property
    def groups(self) -> list[list[str]]:
        return [[param._slot.name for param in group["params"]] for group in self._optimizer.param_groups]

    @property
    def present(self) -> set[str]:
        return set(self._optimizer.model.storage.slots)

    def require_readable(self) -> None:
        contents.require_own_names(self._optimizer.model)

    def contents(self) -> dict[str, tuple[list[TensorSource], Mapping[str, Any]]]:
        begin_managed(self._optimizer)
        return {
            name: (managed_sources(self._optimizer, slot), counted_steps(self._optimizer, slot))
            for name, slot in self._slots.items()
            if slot in self._optimizer.steps
        }

    def settings(self) -> Settings:
        return managed_settings(self._optimizer)

    def wanted(self, name: str, found: Sequence[str], *, is_cut: bool) -> list[str]:
        states = self._optimizer.states_of(self._slots[name].group)
        return [state.name for state in states if state.name in found and not (is_cut and state.per_block)]

    def check(self, outline: dict[str, Any], checkpoint: object) -> None:
        try:
            checked_state(self._optimizer, outline)
        except (ConfigError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{checkpoint} does not fit GeminiOptimizer: {in_words(error)}") from error

    def load(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state)


class _OfReplicas:
    """States that low-level ZeRO has cut, or has whole on every rank."""

    def __init__(self, optimizer: LowLevelZeroOptimizer, names: Names) -> None:
        self.optimizer: torch.optim.Optimizer = optimizer
        self._optimizer, self._names = optimizer, names

    @property
    def groups(self) -> list[list[str]]:
        return [[self._names[shard.param] for shard in group] for group in self._optimizer.sharded.groups]

    @property
    def present(self) -> set[str]:
        return set(self._names.values())

    def require_readable(self) -> None:
        pass

    def contents(self) -> dict[str, tuple[list[TensorSource], Mapping[str, Any]]]:
        sources, values = state_sources(self._optimizer, self._names)
        found: dict[str, tuple[list[TensorSource], Mapping[str, Any]]] = {
            name: ([], value) for name, value in values.items()
        }
        for source in sources:
            found.setdefault(source.spec.name.rpartition("/")[0], ([], {}))[0].append(source)
        return found

    def settings(self) -> Settings:
        return settings_of_sharded(self._optimizer)

    def wanted(self, name: str, found: Sequence[str], *, is_cut: bool) -> list[str]:
        return [key for key in found if key not in SCALES]

    def check(self, outline: dict[str, Any], checkpoint: object) -> None:
        pass  # shapes and groups have been compared with those of the whole model

    def load(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state)
