"""Weights that several stages have: one gradient, the sum of what each has made, and one owner."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from gemini.model.managed_model import ManagedModel
from gemini.parallel.mesh import Axis
from gemini.parallel.pipeline.split import StagedModel
from gemini.parallel.zero import LowLevelZeroOptimizer
from gemini.runtime.storage.model_storage import slot_of


class TiedWeights:
    """The weights of a staged model that other ranks along ``axis`` have, too.

    All ranks of the axis make one. Each rank trains its own copy: they begin alike, get the same gradients,
    bit for bit, and stay so.
    """

    def __init__(self, staged: StagedModel, axis: Axis | None, rank_of: Sequence[int]) -> None:
        self._weights: list[tuple[nn.Parameter, Axis]] = []
        self._kept: list[nn.Parameter] = []  # of several stages, on this rank or not
        self.owned_elsewhere: list[nn.Parameter] = []
        self._seen: object = None
        if axis is None:
            return
        names = {name: param for name, param in staged.module.named_parameters(remove_duplicate=False)}
        aliases = staged.aliases
        for name, stages in staged.shared.items():
            members = tuple(sorted({rank_of[stage] for stage in stages}))
            if axis.rank not in members:
                continue
            param = next(names[alias] for alias in aliases[name] if alias in names)
            self._kept.append(param)
            if len(members) == 1:
                continue
            self._weights.append((param, axis.among(members)))
            if axis.rank != rank_of[stages[0]]:
                self.owned_elsewhere.append(param)

    @torch.no_grad()
    def spread(self) -> None:
        """Take over the values of the first rank that has a weight. Before the model is wrapped."""
        for param, axis in self._weights:
            values = param.data.contiguous()
            axis.broadcast(values)
            param.data.copy_(values)

    def add_up_in(self, optimizer: LowLevelZeroOptimizer) -> None:
        """Have an optimizer whose gradients are whole, or cut alike in all stages, add up those of copies."""
        for param, axis in self._weights:
            if any(param is shard.param for shard in optimizer.sharded.shards):
                optimizer.add_up_copies(param, axis)

    def watch(self, model: ManagedModel) -> None:
        """Have gradients summed once backward passes are over, and not exchanged before: each stage has a
        last backward pass of its own."""
        sharding = model.manager.sharding
        for param in self._kept:
            if sharding is not None and param.requires_grad:
                sharding.keep_gradient(slot_of(param).trainable_grad)
        if self._weights:
            model.add_before_use(partial(self._add_up, model))

    def _add_up(self, model: ManagedModel) -> None:
        """Give every copy the sum of the gradients of all, unless nothing has come to them since."""
        if model.gradient_state() == self._seen:
            return
        for param, axis in self._weights:
            if not param.requires_grad:
                continue
            grad = param.grad
            total = torch.zeros(param.numel() + 1, dtype=torch.float32, device="cpu")
            if grad is not None:
                total[:-1].copy_(grad.detach().reshape(-1))
                total[-1] = 1.0
            axis.all_reduce(total)
            if total[-1] > 0:
                param.grad = total[:-1].view(param.shape).to(param.device, param.dtype)
        self._seen = model.gradient_state()
