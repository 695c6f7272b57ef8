"""ManagedGroups: parameter groups of which each parameter is one that the model manages."""

from __future__ import annotations

from typing import Any

import torch

from gemini.ddp import GeminiDDP
from gemini.optim.arguments import check_parameters
from gemini.optim.kernels import AdamHyper
from gemini.runtime import ManagedSlot


class ManagedGroups(torch.optim.Optimizer):
    """An optimizer of parameters of :attr:`model`, which is there before the first group is."""

    model: GeminiDDP

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Update more of the model's parameters, with settings of their own.

        Raises:
            ConfigError: the model does not manage one of them; nothing was changed.
        """
        params = param_group["params"]
        if not isinstance(params, (torch.Tensor, set)):  # torch refuses sets: they have no order
            params = param_group["params"] = list(params)  # in place: the group may be another's, too
        each = [params] if isinstance(params, torch.Tensor) else params
        check_parameters(len(self.param_groups), each, self.model)
        super().add_param_group(param_group)

    @property
    def settings(self) -> str:
        """What an update takes besides tensors, by group, as text."""
        each = (AdamHyper.from_group(group) for group in self.param_groups)
        return ", ".join(f"group {index}: {hyper}" for index, hyper in enumerate(each))

    @property
    def slots(self) -> set[ManagedSlot]:
        """The parameters that this optimizer updates. Raises StateError where one is managed no more."""
        self.model.managed.refuse_exchanged("optimizer")
        return {param._slot for group in self.param_groups for param in group["params"]}
