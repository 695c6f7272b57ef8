"""Weights that several stages have: their gradients are summed over the stages, and one stage owns them.
Stages that a program has built each have a copy.
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
    """The weights of a staged model that other ranks along ``axis`` have too. Collective over the axis.

    Each rank trains its own copy. The copies start equal, get the same gradients bit for bit, and stay equal.
    """

    def __init__(self, staged: StagedModel, axis: Axis | None, rank_of: Sequence[int]) -> None:
        self._weights: list[tuple[nn.Parameter, Axis]] = []
        self._kept: list[nn.Parameter] = []  # those of several stages, on this rank or others
        self.owned_elsewhere: list[nn.Parameter] = []
        self._seen: object = None  # the gradient state after the last sum
        self._summed: object = None  # the (step, times gradients were discarded) of the last sum
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
        """Broadcast the values of the first rank with each weight. Call it before the model is wrapped."""
        for param, axis in self._weights:
            values = param.data.contiguous()
            axis.broadcast(values)
            param.data.copy_(values)

    def add_up_in(self, optimizer: LowLevelZeroOptimizer) -> None:
        """Make an optimizer sum gradients of copies; they must be whole, or sharded alike in all stages."""
        for param, axis in self._weights:
            if any(param is shard.param for shard in optimizer.sharded.shards):
                optimizer.add_up_copies(param, axis)

    def watch(self, model: ManagedModel) -> None:
        """Sum gradients after backward passes are over, and do not exchange them before: each stage has its
        own last backward pass.
        """
        sharding = model.manager.sharding
        for param in self._kept:
            if sharding is not None and param.requires_grad:
                sharding.keep_gradient(slot_of(param).trainable_grad)
        if self._weights:
            model.add_before_use(partial(self._add_up, model))

    def _add_up(self, model: ManagedModel) -> None:
        """Give every copy the sum of all copies' gradients, unless no gradient has changed since the last
        sum.

        Raises:
            StateError: gradients were added to an earlier sum, which would be summed again.
        """
        state = model.gradient_state()
        if state == self._seen:
            return
        accumulation = (model.manager.step, model.times_discarded)
        if accumulation == self._summed:
            raise StateError(
                "gradients were read or clipped in the middle of an accumulation, and this summed those of "
                "the weights that several stages share: gradients of later passes would be summed twice; "
                "read and clip gradients after the last batch of a step"
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
    """Synchronizes ``requires_grad`` of weights that several stages have: a program that freezes or unfreezes
    a weight by one of its names does so only on stages with that name.
    """

    def __init__(self, staged: StagedModel) -> None:
        names = dict(staged.module.named_parameters(remove_duplicate=False))
        aliases = [staged.aliases.get(name, (name,)) for name in staged.shared]
        self._params = [next((names[a] for a in own if a in names), None) for own in aliases]
        self._known = [param is not None and param.requires_grad for param in self._params]

    def changes(self) -> list[int]:
        """Return how each weight has changed here since the last call: 1 unfrozen, 0 frozen, -1 unchanged."""
        now = [param is not None and param.requires_grad for param in self._params]
        return [-1 if new == old else int(new) for new, old in zip(now, self._known, strict=True)]

    def apply_changes(self, every: Sequence[Sequence[int]]) -> None:
        """Apply the changes of all ranks. A weight that any rank has frozen is frozen."""
        for index, (param, said) in enumerate(zip(self._params, zip(*every, strict=True), strict=True)):
            changed = [each for each in said if each >= 0]
            if param is not None and changed:
                self._known[index] = bool(min(changed))
                if param.requires_grad != self._known[index]:
                    param.requires_grad_(self._known[index])


# Registered parameters, while they live: their order, and the ranks that share them.
_registered: WeakIdKeyDictionary = WeakIdKeyDictionary()
_order = count()


class SharedParameters:
    """Parameters that some ranks along a pipeline share. They start with the first rank's values, and
    :meth:`add_up` gives all ranks the sum of their gradients, so equal updates keep them equal.

    ``ranks`` are indices along ``axis``; None: one process, with nothing to do. All of these ranks make the
    same calls in the same order; other ranks of the axis only create the object. Stages that
    HybridParallelPlugin cuts need none: it knows tied weights. For :class:`BuiltStages` it uses the weights
    registered here: it sums their gradients itself and counts them once.
    """

    def __init__(self, axis: Axis | None, ranks: Sequence[int]) -> None:
        members = tuple(sorted(set(ranks)))
        size = 1 if axis is None else axis.size
        if not members or members[0] < 0 or members[-1] >= size:
            raise ConfigError(
                f"ranks {list(ranks)} cannot share parameters; a pipeline of {size} has ranks 0 to {size - 1}"
            )
        own = axis is not None and axis.rank in members and len(members) > 1
        self._axis = axis.among(members, "shared") if axis is not None and own else None
        self._members = members
        self._params: list[nn.Parameter] = []

    @torch.no_grad()
    def register_parameter(self, param: nn.Parameter) -> None:
        """Share ``param``: it gets the first rank's values. Collective over ``ranks``."""
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
        """Give every copy the sum of the gradients, if any rank has one. Call it after the last backward
        pass, before ``step()``, or as a hook: ``optimizer.register_step_pre_hook(shared.add_up)``. Collective
        over ``ranks``.
        """
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
    """Return the shared parameters of ``model`` in the order of registration: the ranks that share each, and
    its first name.
    """
    known = [(*_registered[param], name) for name, param in model.named_parameters() if param in _registered]
    return [(members, name) for _, members, name in sorted(known)]
