"""The state that the layers of one cut model share: the axis, its collectives as autograd functions, the
copies of inputs, and the random generators where masks differ by rank.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from gemini.parallel.mesh import Axis
from gemini.system.device import first_device
from gemini.system.rng import generator_states, seed_generators, set_generator_states

logger = logging.getLogger(__name__)


# Autograd may pass one gradient tensor to several operators, so a sum in place must work on a copy.


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return sum_of(grad, ctx.axis), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        if not x.is_contiguous():
            return sum_of(x, axis)
        ctx.mark_dirty(x)
        axis.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim, ctx.length = axis, dim, x.size(dim)
        return torch.cat(axis.all_gather(x), dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad.narrow(ctx.dim, ctx.axis.rank * ctx.length, ctx.length).contiguous(), None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return x.chunk(axis.size, dim)[axis.rank].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return torch.cat(ctx.axis.all_gather(grad), ctx.dim), None, None


class _GatherAndUse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return torch.cat(axis.all_gather(x), dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.axis.reduce_scatter(list(grad.chunk(ctx.axis.size, ctx.dim))), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis.reduce_scatter(list(x.chunk(axis.size, dim)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return torch.cat(ctx.axis.all_gather(grad), ctx.dim), None, None


def sum_of(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return the sum of ``x`` over the ranks, in its own memory; not an autograd function."""
    total = x.clone(memory_format=torch.contiguous_format)
    axis.all_reduce(total)
    return total


def copy(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return ``x``, equal on all ranks, for each rank's part: its gradient is summed over the ranks."""
    found: torch.Tensor = _Copy.apply(x, axis)  # type: ignore[no-untyped-call]
    return found


def reduce(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return the sum of ``x`` over the ranks, for use on all; a contiguous ``x`` is overwritten."""
    found: torch.Tensor = _Reduce.apply(x, axis)  # type: ignore[no-untyped-call]
    return found


def gather(x: torch.Tensor, axis: Axis, dim: int = -1) -> torch.Tensor:
    """Concatenate the ranks' parts, for use on all as a whole; backward takes this rank's part."""
    found: torch.Tensor = _Gather.apply(x, axis, dim)  # type: ignore[no-untyped-call]
    return found


def split(x: torch.Tensor, axis: Axis, dim: int = -1) -> torch.Tensor:
    """Return this rank's part of ``x``, which is equal on all ranks; backward gathers the gradient."""
    found: torch.Tensor = _Split.apply(x, axis, dim)  # type: ignore[no-untyped-call]
    return found


def gather_and_use(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Concatenate the ranks' parts, for use in each rank's part; backward reduce-scatters the gradient."""
    found: torch.Tensor = _GatherAndUse.apply(x, axis, dim)  # type: ignore[no-untyped-call]
    return found


def reduce_scatter(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Return this rank's part, along ``dim``, of the sum of ``x``; backward gathers the gradient."""
    found: torch.Tensor = _ReduceScatter.apply(x, axis, dim)  # type: ignore[no-untyped-call]
    return found


_SEED_BITS = 62
_MIX = 0x9E3779B97F4A7C15  # odd: seeds of neighbouring ranks are far apart


@dataclass
class _Forward:
    """The state of a thread's forward pass. ``under_way``: of the model, not of a recomputed block."""

    under_way: bool = False
    source: torch.Tensor | None = None
    version: int = 0
    copied: torch.Tensor | None = None
    sequence: int | None = None  # the dimension along which the input was gathered, in a sublayer
    outside: tuple[torch.device, list[torch.Tensor]] | None = None  # generators' states, inside a region
    entered: set[int] = field(default_factory=set)  # layers that took an input since the region began
    sublayer: int = -1  # the one in which it began


class Region:
    """The parts of a model's forward pass that each rank computes for itself, between a column and a row
    layer.

    Layers that take the same tensor share one copy of it, so that its gradient is summed once. Outside the
    region dropout draws the same mask on all ranks, inside a different one on each. On entry the generators
    get a seed that was drawn outside. So a recomputed block, which restores the state from before it, draws
    the same masks, and a checkpoint needs one state (docs/notes/tensor-parallel.md).
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._sequence_norms = False  # True: masks differ in all blocks, from the first to the last
        self._has_trained = False
        self._threads = threading.local()

    def alike(self) -> Region:
        """Return a region for a copy of the model that runs beside it."""
        other = Region(self.axis)
        other._sequence_norms, other._has_trained = self._sequence_norms, True  # it shares no generators
        return other

    def cover_norms(self) -> None:
        """Extend the region from the first block to the last: norms work on parts of the sequence."""
        self._sequence_norms = True

    def go_on(self) -> None:
        """Continue over a new axis of the same ranks, after one of them has left the old one. Collective."""
        self.axis = self.axis.again()

    # -- methods for layers ----------------------------------------------------------------------

    def enter(self, x: torch.Tensor, *, training: bool, layer: int = 0, sublayer: int = -1) -> torch.Tensor:
        """Return the input of a layer that computes this rank's part, and enter the region. ``layer``: its
        identity; ``sublayer``: the module that it is in.
        """
        copied = self.copied(x)
        now = self._now()
        is_new = sublayer != now.sublayer or layer in now.entered
        if layer and is_new and not now.under_way:
            # checkpoint() stops recomputing a block, inside a region, when it has all that backward needs.
            now.outside = None
        if now.outside is None:
            now.sublayer = sublayer
            now.entered.clear()
        now.entered.add(layer)
        if training and not self._sequence_norms:
            self.begin_masks(x.device)
        return copied

    def enter_sequence(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Gather the whole sequence from the ranks' parts ``x``, for the layers up to the next row layer."""
        self._now().sequence = dim
        return gather_and_use(x, self.axis, dim)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' ``x``, which is overwritten, and leave the region. In a sublayer that
        gathered the sequence, return this rank's part of the sum.
        """
        now = self._now()
        if now.sequence is not None:
            dim, now.sequence = now.sequence, None
            return reduce_scatter(x, self.axis, dim)
        if not self._sequence_norms:
            self.end_masks()
        return reduce(x, self.axis)

    def copied(self, x: torch.Tensor) -> torch.Tensor:
        """Return the copy of ``x`` that all layers with this input share."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        now = self._now()
        if now.sequence is not None:
            return x
        if now.copied is None or now.source is not x or now.version != x._version:
            now.source, now.version, now.copied = x, x._version, copy(x, self.axis)
        return now.copied

    def forget_input(self) -> None:
        """Let the copy of the last input go, as the end of a forward pass does."""
        now = self._now()
        now.source = now.copied = None

    def gathered(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate the ranks' parts."""
        return gather(x, self.axis, dim)

    def own_part(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return this rank's part of ``x``."""
        return split(x, self.axis, dim)

    # -- masks -----------------------------------------------------------------------------------

    def begin_masks(self, device: torch.device) -> None:
        """From now on random numbers differ between ranks. Does nothing inside a region."""
        now = self._now()
        if now.outside is not None:
            return
        drawn = int(torch.randint(2**_SEED_BITS, (), device="cpu"))
        now.outside = (device, generator_states(device))
        seed_generators(device, (drawn + self.axis.rank * _MIX) % 2**_SEED_BITS)

    def end_masks(self) -> None:
        """From now on random numbers are equal on all ranks. Does nothing outside a region."""
        now = self._now()
        if now.outside is not None:
            (device, states), now.outside = now.outside, None
            set_generator_states(device, states)

    def open(self, model: nn.Module) -> None:
        """Begin a forward pass of ``model``. If Ctrl-C ended the last one without a hook call, the generators
        are still inside, so leave first. A state left by recomputation needs no repair: backward restores it.
        """
        if self._now().under_way:
            self.end_masks()
        self._threads.now = _Forward(under_way=True)
        if model.training and torch.is_grad_enabled() and not self._has_trained:
            self._has_trained = True
            if share_generators(self.axis, first_device(model.parameters())):
                logger.warning(
                    "torch's generators were in different states than on the first rank of %r, so dropout "
                    "would have drawn different masks; they now have its states. Use one seed on these "
                    "ranks (torch.manual_seed)",
                    self.axis.name,
                )

    def close(self) -> None:
        """Forget the forward pass, which is over or has raised."""
        self.end_masks()
        self._threads.now = _Forward()

    def _now(self) -> _Forward:
        now: _Forward | None = getattr(self._threads, "now", None)
        if now is None:
            now = self._threads.now = _Forward()
        return now

    def __deepcopy__(self, _memo: dict[int, Any]) -> Region:
        return self  # ranks cannot be copied; a copy of the model is cut like the model


def share_generators(axis: Axis, device: torch.device) -> bool:
    """Set torch's generators to the states of the first rank, so that all ranks draw the same numbers next.
    Return whether the states differed. Collective.
    """
    own = generator_states(device)
    states = [state.clone() for state in own]
    for state in states:
        axis.broadcast(state)
    set_generator_states(device, states)
    return not all(torch.equal(state, before) for state, before in zip(states, own, strict=True))
