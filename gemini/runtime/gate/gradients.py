"""Gradients as the gate sees them: the loss scale of gradients, also across models; bytes of gradients
outside chunks.

StatePiece: a part of a parameter chunk's optimizer state. WrittenTensors: the parameters that user code wrote
to since their fp32 masters were made.
"""

from __future__ import annotations

import ctypes
import operator
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import torch

from gemini import _C
from gemini.chunk import Chunk
from gemini.chunk.chunk import ChunkKind, TensorIds
from gemini.errors import ConfigError

_KEY = "gemini: the scaled losses of the backward pass under way"


class Gradient(Protocol):
    """The gradient of a managed parameter, as ``param.grad`` shows it."""

    def alias(self) -> torch.Tensor | None:
        """Return the value of ``param.grad``."""
        ...

    def assign(self, grad: torch.Tensor | None) -> None:
        """Implement ``param.grad = grad``."""

    def held(self) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Yield the existing parts of the gradient on this rank: the ids to pin, and the values."""
        ...


class RowGradient(Protocol):
    """The gradient of a cut parameter, which receives gradients of single rows."""

    def row_use(self, first: int, numel: int) -> Any:
        """Return an object that counts as a use of the rows with these elements while it lives."""

    def takes_rows(self, use: Any, grad: torch.Tensor) -> bool:
        """Say whether ``grad``, of the rows of ``use``, may be added directly."""
        ...

    def collect_rows(
        self, first: int, shape: Sequence[int], stride: Sequence[int], grad: torch.Tensor
    ) -> None:
        """Add the gradient of a view of the parameter; ``first`` is the view's first element."""


class Slot(Protocol):
    """A managed parameter's place, as the parameter sees it."""

    @property
    def name(self) -> str: ...

    @property
    def grad(self) -> Gradient | None: ...

    @property
    def has_grad(self) -> bool: ...

    @property
    def trainable_grad(self) -> Gradient: ...

    def free_grad(self) -> None:
        """Discard the gradient and free its memory."""


def _stash(key: str, value: object) -> None:
    """Put ``value`` into the thread-local state that autograd propagates to its threads. torch 2.8 stores it
    without taking a reference but releases one, so take one here."""
    if _takes_references():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(key, value)


@cache
def _takes_references() -> bool:
    probe = object()
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls("gemini: probe of references", probe)
    takes = sys.getrefcount(probe) == before
    if takes:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    return takes


class ScaledLosses:
    """The losses that one optimizer scales between two of its steps, and the models with gradients of
    them."""

    def __init__(self) -> None:
        self.overflowed: bool | None = None  # None: no step has used their gradients yet
        self.reached: WeakSet[GradientScale] = WeakSet()

    def note_step(self, overflowed: bool) -> None:
        """Note that a step was to use gradients of these losses, and whether they have ``overflowed``."""
        self.overflowed = overflowed

    @contextmanager
    def backward_pass(self, scale: float) -> Iterator[None]:
        """Context of the backward pass of a loss times ``scale``. Passes may be nested."""
        outer = _running_pass()
        # Not an attribute of a model, because the pass reaches other models. Autograd propagates this to its
        # own threads.
        _stash(_KEY, (self, scale))
        try:
            yield
        finally:
            _stash(_KEY, outer)


class GradientScale:
    """The loss scale of one model's gradients: the scale of the first loss that reached the model. Gradients
    of a loss with another scale are converted to this one."""

    def __init__(
        self,
        operator: Callable[[tuple[int, ...]], AbstractContextManager[None]],
        slots: Collection[Slot] = (),
        *,
        is_needed: bool = False,
    ) -> None:
        """``operator``: pins tensors of the model for a block. ``is_needed``: gradients are fp16, where
        gradients of an unscaled loss underflow."""
        self.operator = operator
        self.slots = slots
        self.value: float | None = None  # None: no gradient of a scaled loss exists
        self.losses: list[ScaledLosses] = []  # losses with gradients in this model
        self._is_needed = is_needed

    @property
    def is_in_use(self) -> bool:
        """Whether gradients have a scale, or will have one."""
        return self._is_needed or self.value is not None

    def admit(self, grad: torch.Tensor) -> torch.Tensor:
        """Convert ``grad``, which a backward pass made, to the scale of the existing gradients.

        Raises:
            ConfigError: its loss was not scaled, and had to be.
        """
        found = _running_pass()
        if found is None and self._is_needed:
            raise ConfigError(
                "under mixed_precision='fp16' the gradients of an unscaled loss underflow; call "
                "optimizer.backward(loss) of this model's optimizer instead of loss.backward(); if "
                "the loss depends on several managed models, use the optimizer of one of them"
            )
        if found is None and self.value is None:
            return grad
        losses, scale = found if found is not None else (None, 1.0)
        if self.value != scale and self._begins():
            self.forget()
            self.value = scale if losses is not None else None
        if losses is not None and losses not in self.losses:
            self.losses.append(losses)
            losses.reached.add(self)
        here = 1.0 if self.value is None else self.value
        return grad if here == scale else grad * (here / scale)

    def _begins(self) -> bool:
        """Say whether no existing gradient has a scale. A gradient that was assigned under fp16 adopts the
        new scale."""
        is_assigned = self.value is None and self._is_needed
        return is_assigned or not any(slot.has_grad for slot in self.slots)

    def agree(self, value: float | None) -> None:
        """Set the scale that the gradients have on all ranks."""
        self.value = value

    def linked(self) -> list[GradientScale]:
        """Return the scales of other models that share a loss with this one, directly or through further
        models."""
        found, losses = [self], list(self.losses)
        while losses:
            for reached in losses.pop().reached:
                if reached not in found:
                    found.append(reached)
                    losses += reached.losses
        return found[1:]

    def forget(self) -> None:
        """Reset after the gradients were discarded."""
        for losses in self.losses:
            losses.reached.discard(self)
        self.losses, self.value = [], None


def _running_pass() -> tuple[ScaledLosses, float] | None:
    """Return the losses and their scale if their backward pass runs on this thread; None otherwise."""
    if not torch._C._is_key_in_tls(_KEY):
        return None
    found: tuple[ScaledLosses, float] | None = torch._C._get_obj_in_tls(_KEY)
    return found


class LooseBytes:
    """Counts gradient bytes outside chunks, and the peak of these plus chunks on DEVICE."""

    def __init__(self, table: _C.ChunkTable) -> None:
        self._table = table
        self.now = 0
        self.peak_device = 0

    def add(self, nbytes: int) -> None:
        """Add ``nbytes``, which may be negative."""
        self.now += nbytes
        self.peak_device = max(self.peak_device, self._table.usage(_C.Tier.DEVICE) + self.now)


MASTER = ChunkKind.MASTER.value  # the name of fp32 masters among the states of a piece


class Place(NamedTuple):
    """The memory of a parameter in a piece: its elements ``[first, stop)``. ``values``: the fp32 master, or
    the parameter itself. ``half_out``: the destination of a master's 16-bit copy. ``states``: by name.
    ``kept``: values that a rule keeps for it."""

    values: torch.Tensor
    half_out: torch.Tensor | None
    states: Mapping[str, torch.Tensor]
    first: int
    stop: int
    kept: dict[str, Any]


class Places:
    """Cache of the parameters' places in a piece, valid from step to step as long as its states and their
    memory are the same."""

    def __init__(self) -> None:
        self.by_slot: dict[Slot, Place] = {}
        self._states: object = None
        self._memory: Sequence[torch.Tensor] = ()

    def is_of(self, states: object, memory: Sequence[torch.Tensor]) -> bool:
        """Say whether the cache is valid for these ``states`` and these tensors."""
        is_like = self._states == states and len(memory) == len(self._memory)
        return is_like and all(map(operator.is_, memory, self._memory))

    def begin(self, states: object, memory: Sequence[torch.Tensor]) -> None:
        """Clear the cache; it will be for these ``states`` and tensors."""
        self.by_slot.clear()
        self._states, self._memory = states, memory


@dataclass
class StatePiece:
    """Elements ``[start, stop)`` of a parameter chunk: the part of its optimizer state that is updated at
    once.

    ``chunks`` and ``tensors`` have the keys of the states: :data:`MASTER`, if there are fp32 masters, and the
    states of optimizers. ``first_block``: the index of its first block among the blocks of all parameters of
    the chunk.
    """

    start: int
    stop: int
    first_block: int
    chunks: dict[str, Chunk] = field(default_factory=dict)
    tensors: dict[str, int] = field(default_factory=dict)
    places: Places = field(default_factory=Places, repr=False, compare=False)

    def master(self, start: int, stop: int) -> torch.Tensor:
        """Return the masters of elements ``[start, stop)`` of the parameter chunk."""
        return self.chunks[MASTER].tensor[start - self.start : stop - self.start]

    @property
    def has_master(self) -> bool:
        """Whether there are fp32 masters."""
        return MASTER in self.chunks


class WrittenTensors:
    """The tensors of the chunk table that user code has written to."""

    def __init__(self) -> None:
        self._tensors: set[int] = set()
        self._times: Counter[int] = Counter()

    def note(self, tensors: TensorIds) -> None:
        """Note that user code wrote to ``tensors``."""
        self._times.update(tensors)
        self._tensors.update(tensors)

    def times(self, tensors: Iterable[int] | None = None) -> int:
        """Return how often ``tensors`` (None: all) have been written to."""
        return self._times.total() if tensors is None else sum(self._times[tensor] for tensor in tensors)

    def take(self, tensors: TensorIds) -> frozenset[int]:
        """Return those of ``tensors`` that user code wrote to since the last call for them."""
        written = self._tensors.intersection(tensors)
        self._tensors -= written
        return frozenset(written)
