"""Gate: every use of managed memory passes it, one operator after another.

Snapshots are asked before data changes; a RefusingGate replaces a gate and raises. All three are one
protocol, which every operator uses, so they are one file. StatefulTensorMgr implements the three operations
of ColossalAI's documents over the chunk table. The module also keeps a registry of the process's gates: it
finds the parameter at an address, disables all gates in a forked child, and restores patched classes after
the last gate.
"""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from threading import get_ident
from typing import Any, NoReturn, Protocol

import torch

from gemini import _C
from gemini.chunk import ChunkManager
from gemini.chunk.chunk import TensorIds
from gemini.errors import StateError
from gemini.memstats.trace import FORWARD, OPTIMIZER
from gemini.runtime.gate import guards
from gemini.runtime.gate.gradients import (
    GradientScale,
    LooseBytes,
    RowGradient,
    Slot,
    StatePiece,
    WrittenTensors,
)
from gemini.runtime.gate.guards import OneThread, ParametersByAddress, Strays, TensorLock
from gemini.runtime.gate.pending_work import (
    PendingUpdate,
    PendingUpdates,
    StepObserver,
)

TensorState = _C.TensorState
_UPDATES_AHEAD = 2  # updates with chunks that are fetched while one runs


class StatefulTensorMgr:
    """Query memory usage, transition tensor state, adjust tensor position."""

    def __init__(self, chunks: ChunkManager) -> None:
        self._chunks = chunks

    def query(self) -> dict[str, int]:
        """Return the bytes of model data on each tier."""
        device, host, disk = self._chunks.usages()
        return {"device": device, "host": host, "disk": disk}

    def state(self, tensor: int) -> TensorState:
        """Return a tensor's state."""
        return self._chunks.table.tensor_state(tensor)

    def transition(self, tensors: TensorIds, state: TensorState) -> None:
        """Bring tensors to ``state``: COMPUTE before an operator, HOLD after it, FREE when no longer used.

        COMPUTE also adjusts the position: the tensors are on DEVICE when it returns.

        Raises:
            StateError: for a transition that is not legal, such as COMPUTE to FREE.
            OutOfBudgetError, IoError: COMPUTE could not be reached; the state is as before.
        """
        if state == TensorState.COMPUTE:
            self.adjust(tensors)
        elif state == TensorState.FREE:
            self._chunks.free(tensors)
        else:
            not_in_use = [t for t in tensors if self.state(t) != TensorState.COMPUTE]
            if not_in_use:
                raise StateError(f"tensors {not_in_use} cannot become HOLD: they are not in state COMPUTE")
            self._chunks.release(tensors, dirty=True)

    def adjust(self, tensors: TensorIds) -> None:
        """Pin the tensors on DEVICE, evicting HOLD tensors if space is short."""
        self._chunks.acquire(tensors, traced=False)


NodeHooks = tuple[Callable[..., None], Callable[..., None]]


class TensorRef:
    """A reference from a tensor to the managed memory that it views: its gate, and its ids in the chunk table
    (one unless it is cut)."""

    __slots__ = ("manager", "tensors")

    def __init__(self, manager: Gate, *tensors: int) -> None:
        self.manager = manager
        self.tensors = tensors

    def lead_to(self, manager: Gate) -> None:
        """Replace the gate that uses of the tensor pass."""
        self.manager = manager

    def again(self) -> TensorRef:
        """Return another reference to the same memory."""
        return TensorRef(self.manager, *self.tensors)


class CutRef(TensorRef):
    """A reference to the memory of a cut tensor. ``tensors``: the ids of its parts, each of ``part_bytes``,
    beginning at the address ``begin``. ``row_gradient``: collects gradients of its rows, if it trains."""

    __slots__ = ("begin", "part_bytes", "row_gradient")

    def __init__(
        self,
        manager: Gate,
        tensors: Sequence[int],
        begin: int,
        part_bytes: int,
        row_gradient: RowGradient | None = None,
    ) -> None:
        super().__init__(manager, *tensors)
        self.begin, self.part_bytes, self.row_gradient = begin, part_bytes, row_gradient

    def again(self) -> TensorRef:
        """Return another reference to the same memory."""
        return CutRef(self.manager, self.tensors, self.begin, self.part_bytes)

    def train_rows(self, gradient: RowGradient) -> None:
        """Collect the gradients of rows in ``gradient``."""
        self.row_gradient = gradient

    def covering(self, address: int, nbytes: int) -> tuple[int, ...]:
        """Return the tensors that contain the ``nbytes`` from ``address`` on; () if they lie outside."""
        first = (address - self.begin) // self.part_bytes
        last = (address + max(nbytes, 1) - 1 - self.begin) // self.part_bytes
        return self.tensors[first : last + 1] if first >= 0 and last < len(self.tensors) else ()

    def of(self, address: int, nbytes: int) -> TensorRef | None:
        """Return a reference for a view of these bytes; None if they lie outside."""
        tensors = self.covering(address, nbytes)
        if len(tensors) < 2:
            return TensorRef(self.manager, *tensors) if tensors else None
        skipped = (address - self.begin) // self.part_bytes
        begin = self.begin + skipped * self.part_bytes
        return CutRef(self.manager, tensors, begin, self.part_bytes, self.row_gradient)


class Moments(Protocol):
    """An order of use that operators are moments of: the order of steps, or of evaluations."""

    def pre_op(self, tensors: TensorIds, phase: str, *, on_host: bool) -> bool:
        """Pin ``tensors`` as the next moment. Returns True once the iteration has more moments than any real
        one."""
        ...

    def beside(self, tensors: TensorIds) -> None:
        """Pin ``tensors`` within the current moment."""


class NodePins(Protocol):
    """The pins of autograd nodes."""

    held: tuple[int, ...] | None

    def hooks(self, tensors: tuple[int, ...]) -> NodeHooks:
        """Return the hooks that run before and after an autograd node that reads ``tensors``."""
        ...

    def settle(self) -> None:
        """Unpin the tensors of the node that ran last."""

    def forget(self) -> None:
        """Drop the record of every pin; the caller unpins."""


class RawMemory(Protocol):
    """Managed memory that user code uses by its address."""

    def plain(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a plain tensor with the content of ``tensor``, valid until the next operator. Raises as a
        PreOp."""
        ...

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the copy with the address that was handed out for ``tensor`` since the last operator; None
        if there is none."""
        ...

    def settle(self) -> None:
        """End all raw uses. Raises as a PreOp."""


class Grows(Protocol):
    """Adds chunks after a model was wrapped."""

    def provide(self, owner: Any) -> None:
        """Create the state chunks for the parameters of the optimizer ``owner``."""

    def unfreeze(self, param: Any) -> None:
        """Create the gradient of ``param``, which never trained before."""

    def add_parameters(self, specs: Any, operator: tuple[int, str], *, raises_disk: bool) -> Any:
        """Create the chunks of parameters that were added to the module."""


class Snapshot(Protocol):
    """Preserves the model data of one moment until it has copied all of it.

    Called on the thread that trains.
    """

    def wants(self, piece: StatePiece) -> bool:
        """Whether :meth:`before_update` of this piece would copy anything."""
        ...

    def before_update(self, piece: StatePiece) -> None:
        """Called before an optimizer changes ``piece`` and its parameters, which are pinned on DEVICE."""

    def before_write(self) -> None:
        """Called before weights or states are replaced. May fetch chunks, and raise as a fetch does."""

    def unsaved(self, tensors: TensorIds) -> frozenset[int]:
        """Return those of ``tensors`` that :meth:`before_change` would copy."""
        ...

    def before_change(self, tensors: TensorIds) -> None:
        """Called before ``tensors`` are written to. May fetch chunks, and raise as a fetch does."""

    def spoil(self, tensors: Iterable[int]) -> None:
        """Called after user code has written to ``tensors`` before they were copied, unforeseen."""

    def residence(self, resident: bool) -> bool:
        """Called when chunks begin to stay on DEVICE (``resident``) or may leave it. Returns ``resident``."""
        ...

    def step_ended(self) -> None:
        """Called after the optimizer has ended a step."""

    def close(self, *, finish: bool) -> None:
        """Finish the copy and raise its errors, or discard it without ``finish``. Idempotent."""


_NOTHING: frozenset[int] = frozenset()


class NoSnapshot:
    """The default while no snapshot is under way."""

    def wants(self, piece: StatePiece) -> bool:
        """Return False."""
        return False

    def before_update(self, piece: StatePiece) -> None:
        """Do nothing."""

    def before_write(self) -> None:
        """Do nothing."""

    def unsaved(self, tensors: TensorIds) -> frozenset[int]:
        """Return nothing."""
        return _NOTHING

    def before_change(self, tensors: TensorIds) -> None:
        """Do nothing."""

    def spoil(self, tensors: Iterable[int]) -> None:
        """Do nothing."""

    def residence(self, resident: bool) -> bool:
        """Return ``resident``."""
        return resident

    def step_ended(self) -> None:
        """Do nothing."""

    def close(self, *, finish: bool) -> None:
        """Do nothing."""


NO_SNAPSHOT = NoSnapshot()


_numbers = count()


class Gate(ABC):
    """Brackets the operators of one model with ``pre_op`` and ``post_op``. For one thread at a time.

    Work that must happen before an operator is registered once, with :meth:`settle_before`. Subclasses
    implement steps, plans and updates.
    """

    backward_pins: NodePins
    raw: RawMemory

    def __init__(self, chunks: ChunkManager) -> None:
        self.number = next(_numbers)  # in order of creation, the same on all ranks
        self.chunks = chunks
        self.tensors = StatefulTensorMgr(chunks)
        self.parameters = ParametersByAddress()
        self.phase = FORWARD
        self.step = 0  # finished steps
        self.resident = False  # True: every chunk is on DEVICE permanently, operators need no PreOp
        self._on_residence_end: Callable[[], None] | None = None
        self.cuts_tensors = False  # whether any tensor lies in several chunks
        self.mixes_dtypes = False  # True: operators may get fp32 beside parameters in 16 bits
        self.gradient_scale = GradientScale(self.operator)
        self.gradients_are_lent = False  # torch.compile reuses gradients' memory in its next graph
        self.num_gradients = 0  # gradients that arrived since the model was wrapped
        self.loose = LooseBytes(chunks.table)
        self.growth: Grows | None = None
        self.threads = OneThread()
        self.strays = Strays(chunks)
        self.lock = TensorLock()
        self.written = WrittenTensors()
        self.pending = PendingUpdates()
        self.observer: StepObserver | None = None
        self.snapshot: Snapshot = NO_SNAPSHOT
        self.raw_uses: list[Any] = []  # current uses of ``raw``; always the same list, checked in each PreOp
        self.windows = range(*chunks.address_range())  # the addresses of model data
        self._is_over = False
        self._following: Moments | None = None  # the order that the next PreOp is a moment of
        self._before: list[tuple[Collection[object], Callable[[], None]]] = []
        # After everything was unpinned, pin again what is still in use.
        self.repins: list[Callable[[], None]] = []
        self._gather: Callable[[TensorIds], None] | None = None
        self._note_written: Callable[[TensorIds], None] | None = None
        self._locked = self.lock.tensors
        self._due = self.pending.by_tensor  # checked in each PreOp

    def set_precision(self, precision: torch.dtype | None, slots: Collection[Slot]) -> None:
        """Set the ``precision`` in which operators use the parameters of ``slots``, a live collection; None:
        each in its own dtype."""
        self.mixes_dtypes = precision is not None
        self.gradient_scale = GradientScale(self.operator, slots, is_needed=precision == torch.float16)

    def expect_cut(self) -> None:
        """Note that there are tensors that lie in several chunks."""
        self.cuts_tensors = True

    def set_growth(self, growth: Grows) -> None:
        """Set the object that adds chunks after wrapping."""
        self.growth = growth

    def enter(self, phase: str) -> None:
        """Set the phase of the following operators."""
        self.phase = phase

    def set_finished_steps(self, step: int) -> None:
        """Set the number of finished steps, for a resumed run."""
        self.step = step

    def count_gradient(self) -> None:
        """Count a gradient that arrived."""
        self.num_gradients += 1

    def keep_for(self, snapshot: Snapshot) -> None:
        """Ask ``snapshot`` before model data that it still wants is changed, until it is over."""
        self.snapshot = snapshot

    def release_snapshot(self, snapshot: Snapshot) -> None:
        """Stop asking ``snapshot``; no effect if another one is set."""
        if self.snapshot is snapshot:
            self.snapshot = NO_SNAPSHOT

    # -- work before an operator ---------------------------------------------------------------------

    def settle_before(self, waiting: Collection[object], settle: Callable[[], None]) -> None:
        """Call ``settle`` before every operator while ``waiting``, always the same collection, is not empty.
        ``settle`` unpins, and raises nothing."""
        self._before.append((waiting, settle))

    def settle(self) -> None:
        """Unpin everything that the next operator would unpin: the last node's tensors, and tensors that
        nobody holds any longer."""
        if self.backward_pins.held is not None:
            self.backward_pins.settle()
        for waiting, settle in self._before:
            if waiting:
                settle()

    def gather_before(
        self, gather: Callable[[TensorIds], None], note_written: Callable[[TensorIds], None]
    ) -> None:
        """Over ranks: call ``gather`` before each operator, to make its tensors whole, and ``note_written``
        with the tensors that it has written."""
        self._gather, self._note_written = gather, note_written

    @property
    def gathers(self) -> bool:
        """Whether a use of managed memory is a collective call."""
        return self._gather is not None

    @property
    def is_followed(self) -> bool:
        """Whether the current operators belong to the order of steps or of evaluations."""
        return self._following is not None

    def lend_gradients(self, lent: bool) -> None:
        """Set whether gradients lie in memory that the next call of a compiled block reuses."""
        self.gradients_are_lent = lent

    @property
    def is_closed(self) -> bool:
        """Whether the model was closed, or belongs to another process."""
        return self._is_over

    def on_residence_end(self, call: Callable[[], None] | None) -> None:
        """Call ``call`` as soon as chunks may leave DEVICE again; None: no call."""
        self._on_residence_end = call

    def note_residence_end(self) -> None:
        """Note that chunks may leave DEVICE from now on."""
        if self._on_residence_end is not None:
            self._on_residence_end()

    def refuse_use(self, refuse: Callable[..., None]) -> None:
        """Replace pre_op by ``refuse``, which raises (closed or forked model)."""
        self.resident, self._is_over = False, True
        self.note_residence_end()
        self.pre_op = refuse  # type: ignore[method-assign]

    def disable_in_child(self) -> None:
        """Disable the gate in a forked child: the memory is the parent's."""
        self.snapshot = NO_SNAPSHOT  # its thread exists in the parent only
        self.threads.forget_others()
        self.pending.clear()
        self.refuse_use(guards.in_child)
        self.recover = guards.in_child  # type: ignore[method-assign]

    @abstractmethod
    def recover(self) -> None:
        """Unpin the chunks that operators left pinned when they raised. They count as written, because they
        may have been."""

    @abstractmethod
    def run_pending(self, *, parts: bool = True) -> None:
        """Run every pending update now; without ``parts`` leave those of chunks of a choice (experts)
        pending, which are no moments of a step. Raises as :meth:`run_due`; StateError if tensors are
        locked."""

    @abstractmethod
    def abandon(self) -> None:
        """Stop recording: the part of the iteration that ran is not typical."""

    # -- operators -------------------------------------------------------------------------------------

    def pre_op(self, tensors: TensorIds, *, on_host: bool = False) -> None:
        """Pin ``tensors`` on DEVICE (they become COMPUTE), fetching missing chunks; or ``on_host``.

        Raises:
            OutOfBudgetError, IoError: as :meth:`ChunkManager.acquire`; nothing is pinned.
            StateError: a tensor is locked, or another thread is in a call of this model; nothing is pinned.
            EvictedAccessError: memory of an evicted chunk was touched outside an operator before this one.
        """
        holder = self.threads.holder
        if holder and holder != get_ident():
            self.threads.refuse_other()
        if _C.stray_count() != self.strays.seen:
            self.strays.refuse()
        if self.raw_uses:
            self.raw.settle()
        if self.backward_pins.held is not None:
            self.backward_pins.settle()
        for waiting, settle in self._before:
            if waiting:
                settle()
        if self._locked:
            self.lock.refuse(tensors)
        if self._due:
            self.run_due(tensors)
        if self._gather is not None:
            self._gather(tensors)
        self.next_moment(tensors, on_host=on_host)

    def next_moment(self, tensors: TensorIds, *, on_host: bool = False) -> None:
        """Pin ``tensors`` as the next moment, without the checks of :meth:`pre_op`. Raises as
        :meth:`pre_op`."""
        following = self._following
        if following is None:
            self.chunks.acquire(tensors, traced=False, on_host=on_host)
            return
        try:
            too_long = following.pre_op(tensors, self.phase, on_host=on_host)
        except BaseException:
            self.abandon()
            raise
        if too_long:
            self.abandon()

    def next_late_moment(self, order: Moments, tensors: TensorIds, *, on_host: bool) -> bool:
        """Pin ``tensors`` for a pending update, which belongs to the previous step. Returns whether it is a
        moment of ``order``, the order of steps. Raises as :meth:`pre_op`."""
        self.settle()
        if self._following is not order:
            self.chunks.acquire(tensors, traced=False, on_host=on_host)
            return False
        try:
            order.pre_op(tensors, OPTIMIZER, on_host=on_host)
        except BaseException:
            self.abandon()
            raise
        return True

    def next_beside(self, tensors: TensorIds) -> None:
        """Pin ``tensors`` within the current moment. Raises as :meth:`pre_op`."""
        self.settle()
        if self._following is None:
            self.chunks.acquire(tensors, traced=False)
            return
        try:
            self._following.beside(tensors)
        except BaseException:
            self.abandon()
            raise

    def post_op(self, tensors: TensorIds, dirty: bool) -> None:
        """Unpin ``tensors`` (they become HOLD); ``dirty``: the operator wrote to them."""
        if dirty and self._note_written is not None:
            self._note_written(tensors)
        self.chunks.release(tensors, dirty=dirty)

    def post_ops(self, tensors: TensorIds, dirty: TensorIds) -> None:
        """Unpin ``tensors``; those in ``dirty`` were written."""
        written = set(dirty)
        self.post_op([tensor for tensor in tensors if tensor in written], True)
        self.post_op([tensor for tensor in tensors if tensor not in written], False)

    @contextmanager
    def operator(self, tensors: TensorIds, dirty: TensorIds = ()) -> Iterator[None]:
        """Pin ``tensors`` for the block; those in ``dirty`` count as written."""
        self.pre_op(tensors)
        try:
            yield
        finally:
            self.post_ops(tensors, dirty)

    def run_due(self, tensors: TensorIds) -> None:
        """Run the pending updates that must come before any use of ``tensors``.

        Raises:
            OutOfBudgetError, IoError: a chunk could not be fetched. The rest of the update stays pending.
        """
        updates = self.pending.needed_by(tensors)
        for index, update in enumerate(updates):
            if not update.has_moments:
                ahead = updates[index + 1 : index + 1 + _UPDATES_AHEAD]
                self.chunks.table.expect([tensor for each in ahead for tensor in each.tensors])
            self._finish_update(update)
            for following in self.pending.next_to_begin():
                self._update(following, following.begin)

    def finish_begun(self) -> None:
        """Finish the updates that the CPU has begun; they keep chunks pinned. Raises as :meth:`run_due`."""
        if self._due:
            for update in self.pending.begun():
                self._finish_update(update)

    def _finish_update(self, update: PendingUpdate) -> None:
        self._update(update, update.run)
        self.pending.remove(update)

    def _update(self, update: PendingUpdate, run: Callable[[], None]) -> None:
        if self.observer is None:
            run()
        else:
            self.observer.run_update(update, run)

    # -- memory and views ------------------------------------------------------------------------------

    def viewed(self, ref: TensorRef, tensor: torch.Tensor) -> TensorRef | None:
        """Return a reference to the part of ``ref``'s memory that ``tensor``, which begins in a window,
        views; None: no part."""
        if type(ref) is CutRef:
            return ref.of(tensor.data_ptr(), guards.span_bytes(tensor))
        is_there = self.chunks.chunk_at(tensor.data_ptr()) == self.chunks.table.chunk_of(ref.tensors[0])
        return ref if is_there else None


class RefusingGate(ABC):
    """Replaces the gate of tensors with values that nobody may use: everything that an operator needs from it
    raises."""

    number = -1  # before all other gates: it refuses before tensors are pinned
    resident = False
    cuts_tensors = False
    mixes_dtypes = False
    snapshot = NO_SNAPSHOT

    @abstractmethod
    def pre_op(self, *_tensors: Any) -> NoReturn:
        """Raise."""

    @property
    def threads(self) -> NoReturn:
        self.pre_op()

    @property
    def raw_uses(self) -> NoReturn:
        self.pre_op()

    @property
    def windows(self) -> NoReturn:
        self.pre_op()


_living: weakref.WeakSet[Gate] = weakref.WeakSet()
_undo: list[Callable[[], None]] = []


def remember(gate: Gate) -> None:
    """Register ``gate`` for as long as it lives: until its model is gone and every managed tensor, too. A
    managed tensor of a closed model needs its gate to refuse use."""
    weakref.finalize(gate, _one_is_gone).atexit = False
    _living.add(gate)


def when_last_gate_ends(undo: Callable[[], None]) -> None:
    """Call ``undo`` once, as soon as no gate lives."""
    _undo.append(undo)


def _one_is_gone() -> None:
    if next(iter(_living), None) is None:
        while _undo:
            _undo.pop()()


def others(gate: Gate) -> list[Gate]:
    """Return the gates of all other models."""
    return [other for other in _living if other is not gate]


def parameter_at(address: int) -> torch.nn.Parameter | None:
    """Return the managed parameter that contains ``address``, of a model that is not closed; None if there is
    none."""
    for gate in list(_living):
        if address in gate.windows and not gate.is_closed:
            return gate.parameters.at(address)
    return None


def _after_fork_in_child() -> None:
    for gate in _living:
        gate.disable_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
