"""PartsPlugin: base class of plugins that leave each rank a part of the model. It saves and loads whole
models, and divides experts.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import distributed as dist
from torch import nn

from gemini.parallel.booster.checkpoint.optimizer_files import OptimizerContents
from gemini.parallel.booster.checkpoint.parts import (
    Parts,
    load_parts,
    parts_of,
    save_parts,
    whole_contents,
)
from gemini.parallel.booster.checkpoint.parts_of_optimizer import (
    StoredStates,
    load_own_states,
    load_parts_of_optimizer,
    save_parts_of_optimizer,
    states_of_part,
    whole_states,
)
from gemini.parallel.booster.checkpoint.sources import ModelContents, Names, parameter_names
from gemini.parallel.booster.checkpoint.writing import FileLayout
from gemini.parallel.booster.plugin.base import Path, Plugin
from gemini.parallel.booster.ranks import Ranks
from gemini.parallel.expert_ranks import checked_ep_size
from gemini.parallel.mesh import Axis
from gemini.parallel.moe.divide import expert_ranks_of


class PartsPlugin(Plugin):
    """A plugin that writes and reads whole tensors under the names of the whole model."""

    def __init__(self) -> None:
        self.parts: WeakKeyDictionary[nn.Module, Parts] = WeakKeyDictionary()
        self._parts_of: WeakKeyDictionary[torch.optim.Optimizer, Parts] = WeakKeyDictionary()
        self._expert_data: Axis | None = None  # all ranks, if some of them divide experts

    def note_parts(self, parts: Parts, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Record the parts of a boosted ``model`` and its ``optimizer``."""
        self.parts[model] = parts
        if optimizer is not None:
            self._parts_of[optimizer] = parts

    def divide_experts(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, ep_size: int
    ) -> Parts | None:
        """Keep only this rank's experts in the whole ``model``, divided among ``ep_size`` of :attr:`ranks`;
        return None if each rank keeps all. Raises ConfigError if they cannot be divided; nothing was changed.
        """
        if checked_ep_size(ep_size) == 1:
            return None
        if self._expert_data is None and self.ranks.size > 1:
            group = self.process_group or dist.group.WORLD
            assert group is not None
            self._expert_data = Axis("dp", group)
        if (ranks := expert_ranks_of(model, self._expert_data, ep_size)) is None:
            return None
        parts = Parts.undivided(model, optimizer)
        parts.divide_experts(ranks)
        if optimizer is not None:
            parts.partition.cut_states(optimizer)
        return parts

    def save_model(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        checkpoint: Path,
        layout: FileLayout,
    ) -> None:
        """See :class:`Plugin`: whole tensors, under the names of the whole model."""
        parts = self.parts.get(model) or parts_of(model)
        if parts is None:
            super().save_model(model, optimizer, checkpoint, layout)
            return
        save_parts(model, optimizer, parts, checkpoint, layout, self.ranks)

    def whole_contents(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> ModelContents:
        """Return the contents that :meth:`save_model` writes for a boosted model, as streams. Collective. All
        ranks must also run all streams in order; on the first rank they pass on whole tensors.
        """
        return whole_contents(model, optimizer, self.parts[model], self.ranks)

    def whole_states(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerContents:
        """Return what :meth:`save_optimizer` writes of the ``optimizer`` that was boosted with ``model``, as
        :meth:`whole_contents` does."""
        states = states_of_part(optimizer, parameter_names(model))
        return whole_states(states, self.parts[model], self.ranks)

    def load_states(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        opened: Callable[[], StoredStates],
        checkpoint: Path,
    ) -> None:
        """Have ``optimizer``, boosted with ``model``, take over this rank's part of what ``opened`` returns.
        All ranks call this. Raises CheckpointError where it was made for another model."""
        states = states_of_part(optimizer, parameter_names(model))
        load_own_states(states, self.parts[model], opened, checkpoint, self.ranks)

    def load_model(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        checkpoint: Path,
        ranks: Ranks | None,
        *,
        strict: bool,
    ) -> None:
        """See :class:`Plugin`: each rank reads its own part of whole tensors."""
        parts = self.parts.get(model) or parts_of(model)
        if parts is None:
            super().load_model(model, optimizer, checkpoint, ranks, strict=strict)
            return
        load_parts(model, optimizer, parts, checkpoint, self.ranks, strict=strict)

    def save_optimizer(
        self, optimizer: torch.optim.Optimizer, names: Names, checkpoint: Path, layout: FileLayout
    ) -> None:
        """See :class:`Plugin`: whole tensors, under the names of the whole model."""
        if (parts := self._parts_of.get(optimizer)) is None or parts.is_whole:
            super().save_optimizer(optimizer, names, checkpoint, layout)
            return
        states = states_of_part(optimizer, names)
        save_parts_of_optimizer(states, parts, checkpoint, layout, self.ranks)

    def load_optimizer(self, optimizer: torch.optim.Optimizer, names: Names, checkpoint: Path) -> None:
        """See :class:`Plugin`: each rank reads its own part of whole tensors."""
        if (parts := self._parts_of.get(optimizer)) is None or parts.is_whole:
            super().load_optimizer(optimizer, names, checkpoint)
            return
        states = states_of_part(optimizer, names)
        load_parts_of_optimizer(states, parts, checkpoint, self.ranks)
