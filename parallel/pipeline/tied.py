"""Weights that several stages have: one gradient, the sum of what each has made, and one owner; in stages
that were built by hand each has a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import count

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from gemini.errors import ConfigError, StateError
from gemini.model.handle import ManagedModel
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
        self._seen: object = None  # the state in which gradients were left
        self._summed: object = None  # by updates and gradients given up: for what they were summed
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
        """Give every copy the sum of the gradients of all, unless nothing has come to them since.

        Raises:
            StateError: something has, and the sum of before, which it was added to, would be summed again.
        """
        state = model.gradient_state()
        if state == self._seen:
            return
        accumulation = (model.manager.step, model.times_given_up)
        if accumulation == self._summed:
            raise StateError(
                "gradients were read or clipped in the middle of an accumulation, which summed those of the "
                "weights that several stages have: what passes since have added would be summed twice; read "
                "and clip gradients behind the last batch of a step"
            )
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
        self._seen, self._summed = model.gradient_state(), accumulation


class SharedTrainability:
    """Whether weights that several stages have need a gradient: a program that freezes one, or unfreezes it,
    by one of its names does so on the stages that have that name."""

    def __init__(self, staged: StagedModel) -> None:
        names = dict(staged.module.named_parameters(remove_duplicate=False))
        aliases = [staged.aliases.get(name, (name,)) for name in staged.shared]
        self._params = [next((names[a] for a in own if a in names), None) for own in aliases]
        self._known = [param is not None and param.requires_grad for param in self._params]

    def changes(self) -> list[int]:
        """Return of each weight what has changed here since the last time: 1: it trains, 0: it is frozen; -1:
        nothing."""
        now = [param is not None and param.requires_grad for param in self._params]
        return [-1 if new == old else int(new) for new, old in zip(now, self._known, strict=True)]

    def take_over(self, every: Sequence[Sequence[int]]) -> None:
        """Change the weights here as any rank has. One that is frozen somewhere is frozen."""
        for index, (param, said) in enumerate(zip(self._params, zip(*every, strict=True), strict=True)):
            changed = [each for each in said if each >= 0]
            if param is not None and changed:
                self._known[index] = bool(min(changed))
                if param.requires_grad != self._known[index]:
                    param.requires_grad_(self._known[index])


# What was registered, while it lives: the order in which, and the ranks that share it.
_registered: WeakIdKeyDictionary = WeakIdKeyDictionary()
_order = count()


class SharedParameters:
    """Parameters that some ranks along a pipeline share: they begin with the first one's values, and
    :meth:`add_up` gives all of them the sum of their gradients, so that equal updates keep them alike.

    ``ranks`` are places along ``axis``; None: one process alone, where there is nothing to do. All of them
    make the same calls in the same order; other ranks of the axis only make the object. Stages that
    HybridParallelPlugin cuts need none: it knows tied weights. Of :class:`BuiltStages` it knows those that
    are registered here, adds up their gradients itself and counts them once.
    """

    def __init__(self, axis: Axis | None, ranks: Sequence[int]) -> None:
        members = tuple(sorted(set(ranks)))
        size = 1 if axis is None else axis.size
        if not members or members[0] < 0 or members[-1] >= size:
            raise ConfigError(f"ranks {list(ranks)} share; a pipeline of {size} has ranks 0 to {size - 1}")
        own = axis is not None and axis.rank in members and len(members) > 1
        self._axis = axis.among(members, "shared") if axis is not None and own else None
        self._members = members
        self._params: list[nn.Parameter] = []

    @torch.no_grad()
    def register_parameter(self, param: nn.Parameter) -> None:
        """Share ``param``: it gets the first rank's values."""
        self._params.append(param)
        if self._axis is not None:
            values = param.detach().clone(memory_format=torch.contiguous_format)
            self._axis.broadcast_from(values, 0)
            param.copy_(values)
            _registered[param] = (next(_order), self._members)

    def register_module(self, module: nn.Module) -> None:
        """Share all parameters of ``module``."""
        for param in module.parameters():
            self.register_parameter(param)

    @torch.no_grad()
    def add_up(self, *_: object) -> None:
        """Give every copy the sum of the gradients, if there is one; after the last backward pass, before
        ``step()``. As a hook: ``optimizer.register_step_pre_hook(shared.add_up)``."""
        if self._axis is None:
            return
        for param in self._params:
            if not param.requires_grad:
                continue
            total = torch.zeros(param.numel() + 1, dtype=param.dtype, device=param.device)
            if param.grad is not None:
                total[:-1].copy_(param.grad.reshape(-1))
                total[-1] = 1
            self._axis.all_reduce(total)
            if total[-1] > 0:
                param.grad = total[:-1].view(param.shape)


def shared_in(model: nn.Module) -> list[tuple[tuple[int, ...], str]]:
    """Return the parameters of ``model`` that ranks along a pipeline share, in the order in which they were
    registered: which ranks, and the first of its names."""
    known = [(*_registered[param], name) for name, param in model.named_parameters() if param in _registered]
    return [(members, name) for _, members, name in sorted(known)]
