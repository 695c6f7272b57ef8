"""ManagedGroups: parameter groups of which each parameter is one that the model manages."""

from __future__ import annotations

from typing import Any

import torch

from gemini.ddp import GeminiDDP
from gemini.optim.arguments import check_parameters
from gemini.optim.cpu_adam import CPUAdam
from gemini.optim.state_share import stow_share
from gemini.runtime import ManagedSlot


class ManagedGroups(torch.optim.Optimizer):
    """An optimizer of parameters of :attr:`model`, which is there before the first group is."""

    model: GeminiDDP
    stowed: frozenset[int] = frozenset()  # tensors of states that a file has between updates
    _adam: CPUAdam | None = None

    def stow_states(self, adam: CPUAdam) -> None:
        """Stow the share of the states that ``adam`` asks for, also of groups that come later. Raises as
        :func:`stow_share`."""
        self.stowed = stow_share(self, adam)
        self._adam = adam

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Update more of the model's parameters, with settings of their own.

        Raises:
            ConfigError: the model does not manage one of them; IoError: the file for their states cannot be
                made. Nothing was changed.
        """
        params = param_group["params"]
        if not isinstance(params, (torch.Tensor, set)):  # torch refuses sets: they have no order
            params = param_group["params"] = list(params)  # in place: the group may be another's, too
        each = [params] if isinstance(params, torch.Tensor) else params
        check_parameters(len(self.param_groups), each, self.model)
        super().add_param_group(param_group)
        try:
            if self._adam is not None:
                self.stow_states(self._adam)
        except BaseException:
            self.param_groups.pop()
            raise

    @property
    def slots(self) -> set[ManagedSlot]:
        """The parameters that this optimizer updates. Raises StateError where one is managed no more."""
        self.model.managed.refuse_exchanged("optimizer")
        return {param._slot for group in self.param_groups for param in group["params"]}
