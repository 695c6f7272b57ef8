"""Gradients as the gate knows them: their parameters, their loss scale, the other models that have gradients
of the same losses, and how much of them is in no chunk. StatePiece: a part of a parameter
chunk's optimizer state; and which parameters user code has written to since their fp32 masters were made.
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
from gemini.chunk import Chunk, ChunkKind, TensorIds
from gemini.errors import ConfigError

_KEY = "gemini: the scaled losses of the backward pass under way"


class Gradient(Protocol):
    """The gradient of a managed parameter, as ``param.grad`` shows it."""

    def alias(self) -> torch.Tensor | None:
        """Return what ``param.grad`` is."""
        ...

    def assign(self, grad: torch.Tensor | None) -> None:
        """Do what ``param.grad = grad`` says."""

    def held(self) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Yield what there is of the gradient here: the ids to pin, and the values."""
        ...


class RowGradient(Protocol):
    """The gradient of a parameter that is cut, which gets rows of it one by one."""

    def row_use(self, first: int, numel: int) -> Any:
        """Return what counts as a use of the rows with these elements, for as long as it lives."""

    def takes_rows(self, use: Any, grad: torch.Tensor) -> bool:
        """Say whether ``grad``, of the rows of ``use``, may be taken by itself."""
        ...

    def collect_rows(
        self, first: int, shape: Sequence[int], stride: Sequence[int], grad: torch.Tensor
    ) -> None:
        """Add the gradient of a view of the parameter, whose first element is ``first``."""


class Slot(Protocol):
    """A managed parameter's place, as the parameter knows it."""

    @property
    def name(self) -> str: ...

    @property
    def grad(self) -> Gradient | None: ...

    @property
    def has_grad(self) -> bool: ...

    @property
    def trainable_grad(self) -> Gradient: ...

    def free_grad(self) -> None:
        """Give up the gradient's memory."""


def _stash(key: str, value: object) -> None:
    """Put ``value`` where autograd takes it along to its threads. torch 2.8 keeps it without a reference of
    its own, but gives one back."""
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
    """What one optimizer scales from one of its steps to the next, and the models with gradients of it."""

    def __init__(self) -> None:
        self.overflowed: bool | None = None  # None: no step has used a gradient of them
        self.reached: WeakSet[GradientScale] = WeakSet()

    def note_step(self, overflowed: bool) -> None:
        """A step was to use gradients of them, which have ``overflowed`` or not."""
        self.overflowed = overflowed

    @contextmanager
    def backward_pass(self, scale: float) -> Iterator[None]:
        """Run the backward pass of a loss times ``scale`` within the block. Passes may be within others."""
        outer = _pass_under_way()
        # Not an attribute of a model: the pass reaches others. Autograd takes this along to its own threads.
        _stash(_KEY, (self, scale))
        try:
            yield
        finally:
            _stash(_KEY, outer)


class GradientScale:
    """The scale of the gradients that one model has: that of the first loss that has reached it. Gradients of
    a loss with another scale are brought to this one."""

    def __init__(
        self,
        operator: Callable[[tuple[int, ...]], AbstractContextManager[None]],
        slots: Collection[Slot] = (),
        *,
        is_needed: bool = False,
    ) -> None:
        """``operator`` pins tensors of the model for a block; ``is_needed``: gradients are fp16, which those
        of an unscaled loss underflow."""
        self.operator = operator
        self.slots = slots
        self.value: float | None = None  # None: there is no gradient of a scaled loss
        self.losses: list[ScaledLosses] = []  # those that have gradients here
        self._is_needed = is_needed

    @property
    def is_in_use(self) -> bool:
        """Whether gradients have a scale, or are to have one."""
        return self._is_needed or self.value is not None

    def admit(self, grad: torch.Tensor) -> torch.Tensor:
        """Return what to add to the gradients that are there for ``grad``, which a backward pass has made.

        Raises:
            ConfigError: its loss was not scaled, and had to be.
        """
        found = _pass_under_way()
        if found is None and self._is_needed:
            raise ConfigError(
                "under mixed_precision='fp16' the gradients of an unscaled loss underflow; call "
                "optimizer.backward(loss) instead of loss.backward(): of this model's optimizer or, where "
                "the loss goes through several managed models, of one of theirs"
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
        """Say whether no gradient is there that has a scale; one that was assigned under fp16 has that which
        comes."""
        is_assigned = self.value is None and self._is_needed
        return is_assigned or not any(slot.has_grad for slot in self.slots)

    def agree(self, value: float | None) -> None:
        """Take the scale that the gradients have on all ranks."""
        self.value = value

    def linked(self) -> list[GradientScale]:
        """Return those of other models with gradients of the same losses, or of losses that share a model."""
        found, losses = [self], list(self.losses)
        while losses:
            for reached in losses.pop().reached:
                if reached not in found:
                    found.append(reached)
                    losses += reached.losses
        return found[1:]

    def forget(self) -> None:
        """The gradients were given up."""
        for losses in self.losses:
            losses.reached.discard(self)
        self.losses, self.value = [], None


def _pass_under_way() -> tuple[ScaledLosses, float] | None:
    """Return whose scaled loss is in its backward pass on this thread, and the scale."""
    if not torch._C._is_key_in_tls(_KEY):
        return None
    found: tuple[ScaledLosses, float] | None = torch._C._get_obj_in_tls(_KEY)
    return found


class LooseBytes:
    """How much there is now, and the most that there was on DEVICE together with chunks."""

    def __init__(self, table: _C.ChunkTable) -> None:
        self._table = table
        self.now = 0
        self.peak_device = 0

    def add(self, nbytes: int) -> None:
        """Count ``nbytes`` more, or less."""
        self.now += nbytes
        self.peak_device = max(self.peak_device, self._table.usage(_C.Tier.DEVICE) + self.now)


MASTER = ChunkKind.MASTER.value  # the name of fp32 masters among the states of a piece


class Place(NamedTuple):
    """The memory of a parameter in a piece: elements ``[first, stop)`` of it. ``values``: the fp32 master or
    the parameter itself; ``half_out``: where the 16-bit copy of a master goes; ``states`` by name; ``kept``:
    what a rule keeps of it."""

    values: torch.Tensor
    half_out: torch.Tensor | None
    states: Mapping[str, torch.Tensor]
    first: int
    stop: int
    kept: dict[str, Any]


class Places:
    """The places of parameters in a piece, which updates keep from step to step, as long as its states and
    their memory are the same."""

    def __init__(self) -> None:
        self.by_slot: dict[Slot, Place] = {}
        self._states: object = None
        self._memory: Sequence[torch.Tensor] = ()

    def is_of(self, states: object, memory: Sequence[torch.Tensor]) -> bool:
        """Say whether they are of these ``states`` and these tensors."""
        is_like = self._states == states and len(memory) == len(self._memory)
        return is_like and all(map(operator.is_, memory, self._memory))

    def begin(self, states: object, memory: Sequence[torch.Tensor]) -> None:
        """Know no place yet, of these."""
        self.by_slot.clear()
        self._states, self._memory = states, memory


@dataclass
class StatePiece:
    """Elements ``[start, stop)`` of a parameter chunk: the part of its optimizer state that moves as one.

    By key: :data:`MASTER`, where there are fp32 masters, and what optimizers keep. ``first_block``: the first
    block of it, of those of all parameters of the chunk.
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
    """A set of tensors of the chunk table."""

    def __init__(self) -> None:
        self._tensors: set[int] = set()
        self._times: Counter[int] = Counter()

    def note(self, tensors: TensorIds) -> None:
        """Remember that user code wrote to ``tensors``."""
        self._times.update(tensors)
        self._tensors.update(tensors)

    def times(self, tensors: Iterable[int] | None = None) -> int:
        """Return how often ``tensors``, or any, have been written to."""
        return self._times.total() if tensors is None else sum(self._times[tensor] for tensor in tensors)

    def take(self, tensors: TensorIds) -> frozenset[int]:
        """Return those of ``tensors`` that user code wrote to since the last call for them."""
        written = self._tensors.intersection(tensors)
        self._tensors -= written
        return frozenset(written)
