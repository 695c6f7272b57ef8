"""SharedParameters: weights of which stages that were built by hand have a copy each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from gemini.errors import ConfigError
from gemini.parallel.mesh import Axis

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
