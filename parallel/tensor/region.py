"""What the layers of one cut model share: the axis, its collectives as operators that autograd knows, the
copy of an input, and where masks differ by rank.
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
from gemini.system.rng import generator_states, seed_generators, set_generator_states

logger = logging.getLogger(__name__)


# Autograd gives a gradient to several operators at once: what sums in place sums a copy.


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
    """Return the sum of ``x`` over the ranks, in memory of its own; no operator of autograd."""
    total = x.clone(memory_format=torch.contiguous_format)
    axis.all_reduce(total)
    return total


def copy(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return ``x``, which is the same on all ranks and which each uses for its part: gradients are summed."""
    found: torch.Tensor = _Copy.apply(x, axis)  # type: ignore[no-untyped-call]
    return found


def reduce(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return the sum of ``x`` over the ranks, which all go on with; ``x`` is used up."""
    found: torch.Tensor = _Reduce.apply(x, axis)  # type: ignore[no-untyped-call]
    return found


def gather(x: torch.Tensor, axis: Axis, dim: int = -1) -> torch.Tensor:
    """Return the parts of all ranks side by side, which all go on with: each part gets its gradient."""
    found: torch.Tensor = _Gather.apply(x, axis, dim)  # type: ignore[no-untyped-call]
    return found


def split(x: torch.Tensor, axis: Axis, dim: int = -1) -> torch.Tensor:
    """Return this rank's part of ``x``, which is the same on all ranks: its gradient is put together."""
    found: torch.Tensor = _Split.apply(x, axis, dim)  # type: ignore[no-untyped-call]
    return found


def gather_and_use(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Return the parts of all ranks side by side, which each uses for its part: gradients are summed, and
    each part gets its own."""
    found: torch.Tensor = _GatherAndUse.apply(x, axis, dim)  # type: ignore[no-untyped-call]
    return found


def reduce_scatter(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Return this rank's part, along ``dim``, of the sum of ``x`` over the ranks."""
    found: torch.Tensor = _ReduceScatter.apply(x, axis, dim)  # type: ignore[no-untyped-call]
    return found


_SEED_BITS = 62
_MIX = 0x9E3779B97F4A7C15  # odd: neighbouring ranks get seeds far apart


@dataclass
class _Forward:
    """What a thread remembers of the forward pass it is in; ``under_way``: of the model, not of a block that
    is recomputed."""

    under_way: bool = False
    source: torch.Tensor | None = None
    version: int = 0
    copied: torch.Tensor | None = None
    sequence: int | None = None  # the dimension along which the input was put together, in a sublayer
    outside: tuple[torch.device, list[torch.Tensor]] | None = None  # generators' states, inside a region
    entered: set[int] = field(default_factory=set)  # layers that took an input since the region began
    sublayer: int = -1  # the one in which it began


class Region:
    """The part of a model's forward pass that each rank does for itself, between a column and a row layer.

    Layers that take the same tensor share one copy of it, so that its gradient is summed once. Dropout draws
    one mask for all ranks outside, and another on each rank inside: there the generators begin with a seed
    that is drawn outside, so that recomputing a block, which restores the state from before it, draws the
    same masks again, and a checkpoint needs one state (docs/notes/tensor-parallel.md).
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._sequence_norms = False  # True: masks differ in all blocks, from the first to the last
        self._has_trained = False
        self._threads = threading.local()

    def alike(self) -> Region:
        """Return one for a copy of the model, which is run beside it."""
        other = Region(self.axis)
        other._sequence_norms, other._has_trained = self._sequence_norms, True  # it shares no generators
        return other

    def cover_norms(self) -> None:
        """Reach from the first block to the last: norms between sublayers are on parts of the sequence."""
        self._sequence_norms = True

    def go_on(self) -> None:
        """Compute over a new axis of the same ranks, after one of them has left the old one; all of them call
        this together."""
        self.axis = self.axis.again()

    # -- what layers call ------------------------------------------------------------------------

    def enter(self, x: torch.Tensor, *, training: bool, layer: int = 0, sublayer: int = -1) -> torch.Tensor:
        """Return the input of a layer whose output is this rank's part, and be inside from now on. ``layer``:
        its identity; ``sublayer``: which module it is in."""
        copied = self.copied(x)
        now = self._now()
        is_new = sublayer != now.sublayer or layer in now.entered
        if layer and is_new and not now.under_way:
            # checkpoint() stops computing a block again where it needs no more of it, inside of a region.
            now.outside = None
        if now.outside is None:
            now.sublayer = sublayer
            now.entered.clear()
        now.entered.add(layer)
        if training and not self._sequence_norms:
            self.begin_masks(x.device)
        return copied

    def enter_sequence(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the whole sequence, of which this rank has ``x``, for the layers up to the next row."""
        self._now().sequence = dim
        return gather_and_use(x, self.axis, dim)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' ``x``, which is used up, and be outside; in a sublayer that took the
        whole sequence, this rank's part of it."""
        now = self._now()
        if now.sequence is not None:
            dim, now.sequence = now.sequence, None
            return reduce_scatter(x, self.axis, dim)
        if not self._sequence_norms:
            self.end_masks()
        return reduce(x, self.axis)

    def copied(self, x: torch.Tensor) -> torch.Tensor:
        """Return the copy of ``x`` that all layers share which take it."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        now = self._now()
        if now.sequence is not None:
            return x
        if now.copied is None or now.source is not x or now.version != x._version:
            now.source, now.version, now.copied = x, x._version, copy(x, self.axis)
        return now.copied

    def gathered(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return the ranks' parts side by side."""
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
        """From now on random numbers are the same on all ranks. Does nothing outside."""
        now = self._now()
        if now.outside is not None:
            (device, states), now.outside = now.outside, None
            set_generator_states(device, states)

    def open(self, model: nn.Module) -> None:
        """Begin a forward pass of ``model``. One that Ctrl-C ended, of which nobody was told, has left the
        generators inside; what recomputing in backward has left is void, since that restores them."""
        if self._now().under_way:
            self.end_masks()
        self._threads.now = _Forward(under_way=True)
        if model.training and torch.is_grad_enabled() and not self._has_trained:
            self._has_trained = True
            if share_generators(self.axis, device_of(model)):
                logger.warning(
                    "torch's generators were in other states here than on the first rank of %r, and would "
                    "have drawn other masks of dropout: they go on from its states. Give these ranks one "
                    "seed (torch.manual_seed)",
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
        return self  # ranks cannot be copied; a copy of the model is cut as the model


def device_of(model: nn.Module) -> torch.device:
    """Return where the first parameter of ``model`` is; the CPU where it has none."""
    return next((param.device for param in model.parameters()), torch.device("cpu"))


def share_generators(axis: Axis, device: torch.device) -> bool:
    """Give torch's generators the states that those of the first rank have: what is drawn next is the same on
    all ranks, which call this together. Return whether they were other states."""
    own = generator_states(device)
    states = [state.clone() for state in own]
    for state in states:
        axis.broadcast(state)
    set_generator_states(device, states)
    return not all(torch.equal(state, before) for state, before in zip(states, own, strict=True))
