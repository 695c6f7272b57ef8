"""The gradient of one parameter. It lies in a chunk, or in autograd's own memory while the model is resident.
Over several ranks it is whole during backward, and this rank's shard of the mean afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple, NoReturn, Protocol, cast

import torch
from torch.autograd.graph import increment_version

from gemini.chunk import Chunk
from gemini.chunk.layout import ordered_like
from gemini.errors import ConfigError, StateError
from gemini.runtime.gate.gate import Gate, RefusingGate, TensorRef, TensorState
from gemini.runtime.intercept.tensors import as_managed


class _DiscardedGradient(RefusingGate):
    """The gate of every alias of a discarded gradient; raises on use."""

    def pre_op(self, *_tensors: Any) -> NoReturn:
        raise StateError(
            "this .grad was discarded by step(), zero_grad() or an assignment to param.grad, and its "
            "memory was freed; to keep a gradient, clone it before: param.grad.clone()"
        )


_DISCARDED = cast("Gate", _DiscardedGradient())


class Left(Enum):
    """The gradient that plain torch would have if none exists here."""

    NOTHING = auto()
    TAKEN = auto()  # one that a step has used; zero_grad(set_to_none=False) turns it into zeros
    ZEROS = auto()  # zeros that get memory once they are used: by an update, but not by held()


class SlotGradient:
    """Holds the gradient between backward and update.

    ``view`` is its place in the gradient chunk. While the whole model stays on DEVICE permanently
    (``Gate.resident``) gradients stay in autograd's own memory instead, which saves the copy; budgets count
    the chunk's bytes either way. A gradient that a pending update has taken exists only for that update.
    """

    __slots__ = ("_alias_ref", "_gate", "_in_chunk", "_left", "_loose", "_name", "_stride", "ref", "view")

    def __init__(self, name: str, gate: Gate, ref: TensorRef, view: torch.Tensor) -> None:
        self.ref = ref
        # .data has a version counter of its own: other gradients of the chunk may change.
        self.view = view.data
        self._stride = self.view.stride()
        self._name = name
        self._gate = gate
        self._in_chunk = False
        self._left = Left.NOTHING
        self._loose: torch.Tensor | None = None
        self._alias_ref: TensorRef | None = None  # alias of this gradient; the next gradient gets another

    def rename(self, name: str) -> None:
        """Set the parameter's name."""
        self._name = name

    @property
    def exists(self) -> bool:
        """Whether there is a gradient."""
        return (self._in_chunk and not self._is_taken) or self._loose is not None

    @property
    def is_in_torch(self) -> bool:
        """Whether plain torch would have a gradient: this one, one that a step has taken, or zeros."""
        return self.exists or self._left is not Left.NOTHING

    @property
    def _is_taken(self) -> bool:
        """Whether the gradient belongs to a pending update only."""
        update = self._gate.pending.by_tensor.get(self.ref.tensors[0])
        return update is not None and self.ref.tensors[0] in update.gradients

    @property
    def update_tensors(self) -> tuple[int, ...]:
        """The tensors of the gradient chunks that an update uses."""
        return self.ref.tensors

    @property
    def tensors(self) -> tuple[int, ...]:
        """The ids to pin before reading or writing :attr:`value`; none if it is not in a chunk."""
        return self.ref.tensors if self._in_chunk else ()

    @property
    def value(self) -> torch.Tensor:
        """The gradient, in the parameter's shape; valid while pinned, and only if it exists or was taken."""
        return self.view if self._loose is None else self._loose

    def held(self) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Yield the existing parts of the gradient on this rank: the ids to pin, and the values."""
        if self.exists:
            yield self.tensors, self.value

    @property
    def loose_bytes(self) -> int:
        """Bytes held outside the chunk."""
        return 0 if self._loose is None else self._loose.nbytes

    def flat(self, start: int, stop: int) -> torch.Tensor:
        """Return elements ``[start, stop)`` in the memory order of the parameter. If the gradient has another
        order, or a lazy negation or no memory, the result is a view of a new copy."""
        value = self.value
        # Equal strides are the quick answer of :func:`ordered_like`; this runs for every parameter of a step.
        if value.stride() != self._stride or value.is_neg() or value.data_ptr() == 0:
            value = ordered_like(value, self.view, value.dtype)
        return torch.as_strided(value, (stop - start,), (1,), value.storage_offset() + start)

    def tensors_under(self, _start: int, _stop: int) -> tuple[int, ...]:
        """Return the ids to pin before elements ``[start, stop)`` of :attr:`value` are used."""
        return self.tensors

    def unmade_under(self, _start: int, _stop: int) -> tuple[int, ...]:
        """Return the ids among :meth:`tensors_under` that :meth:`make_under` writes to."""
        return ()

    def make_under(self, _start: int, _stop: int) -> None:
        """Fill elements ``[start, stop)``, which are pinned, with zeros if no gradient has arrived for
        them."""

    def end_under(self, _start: int, _stop: int) -> None:
        """Free the chunks that an update is done with, after it has used elements ``[start, stop)``."""

    def collect(self, grad: torch.Tensor) -> None:
        """Take over a gradient from autograd; add it to an existing one.

        Raises:
            ConfigError: it is sparse, or belongs to a loss that was not scaled.
        """
        if grad.layout is not torch.strided:
            self._refuse_sparse()
        grad = self._gate.gradient_scale.admit(grad)
        self._gate.count_gradient()
        if self._in_chunk:
            self._await_update()
        if self._loose is not None:
            self._loose.add_(grad)
        elif self._gate.resident and not self._in_chunk and not self._gate.gradients_are_lent:
            self._set_loose(grad + 0.0 if self._left is Left.ZEROS else grad)
        else:
            self._write(grad, add=self._in_chunk)
        self._left = Left.NOTHING

    def alias(self) -> torch.Tensor | None:
        """Return the value of ``param.grad``: None, or a tensor that fetches the chunk when used, until the
        gradient is discarded. Raises StateError if backward has used it up already."""
        self._gate.lock.refuse(self.ref.tensors)
        self.make_zeros()
        if self._loose is not None:
            return self._loose
        if not self._in_chunk or self._is_taken:
            return None
        if self._alias_ref is None:
            self._alias_ref = self.ref.again()
        return as_managed(self.view.view_as(self.view), self._alias_ref)

    def assign(self, grad: torch.Tensor | None) -> None:
        """Implement ``param.grad = grad``: replace the gradient by a copy of ``grad``.

        Raises:
            ConfigError: shape, dtype or device differ from the parameter's; the gradient is unchanged.
            StateError: backward has used it up already.
        """
        self._gate.lock.refuse(self.ref.tensors)
        if grad is None:
            self.free()
            return
        if grad.layout is not torch.strided:
            self._refuse_sparse()
        for what in ("shape", "dtype", "device"):
            if getattr(grad, what) != getattr(self.view, what):
                raise ConfigError(
                    f"parameter {self._name!r} of {what} {getattr(self.view, what)} cannot take a gradient "
                    f"of {what} {getattr(grad, what)}"
                )
        if self._is_own(grad):
            return
        source = grad.detach().clone()
        self._gate.count_gradient()
        self._left = Left.NOTHING
        if self._in_chunk:
            self._await_update()
        if self._loose is not None or (self._gate.resident and not self._in_chunk):
            self._set_loose(source)
        else:
            with torch.no_grad():
                self._write(source, add=False)
            self.retire_aliases()

    def fill_zero(self) -> None:
        """Set the gradient to zeros if it exists or the last step has taken it."""
        if self.exists:
            with self._gate.operator(self.tensors, self.tensors):
                self.value.zero_()
        elif self._left is Left.TAKEN:
            self._left = Left.ZEROS

    def note_taken(self) -> None:
        """Note that a step uses the gradient, which plain torch would keep."""
        if self._left is Left.NOTHING:
            self._left = Left.TAKEN

    def hand_over(self) -> None:
        """Leave the gradient to an update that is about to run, or pending."""

    def make_zeros(self) -> None:
        """Materialize the zeros that :meth:`fill_zero` deferred. Raises as an operator."""
        if self._left is not Left.ZEROS:
            return
        if self._in_chunk:
            self._await_update()
        if self._gate.resident and not self._in_chunk:
            self._set_loose(torch.zeros_like(self.view))
        else:
            with torch.no_grad():
                self._write(torch.zeros((), dtype=self.view.dtype, device=self.view.device), add=False)
        self._left = Left.NOTHING

    def free(self) -> None:
        """Discard the gradient and free its memory; aliases from ``param.grad`` raise on use. A gradient that
        a pending update has taken stays.

        Raises:
            StateError: it is in use; it stays.
        """
        self._left = Left.NOTHING
        self._set_loose(None)
        if self._in_chunk and not self._is_taken:
            self.use_up()

    def end_update(self) -> None:
        """Free the gradient after its update, also if the update had taken it.

        Raises:
            StateError: it is in use; it stays.
        """
        self._set_loose(None)
        self.use_up()

    def use_up(self) -> None:
        """Free a gradient that is in a chunk, also if an update had taken it.

        Raises:
            StateError: it is in use; it stays.
        """
        if not self._in_chunk:
            return
        self._gate.backward_pins.settle()
        try:
            self._gate.chunks.free(self.ref.tensors)
        finally:
            self._in_chunk = self._gate.tensors.state(self.ref.tensors[0]) != TensorState.FREE
            if not self._in_chunk:
                self.retire_aliases()

    def _await_update(self) -> None:
        """Run the pending update that has taken the last gradient, before a new gradient uses its place."""
        if self._is_taken:
            self._gate.run_due(self.ref.tensors)

    def _set_loose(self, grad: torch.Tensor | None) -> None:
        before, self._loose = self._loose, grad
        more, fewer = 0 if grad is None else grad.nbytes, 0 if before is None else before.nbytes
        if more != fewer:
            self._gate.loose.add(more - fewer)

    def _is_own(self, grad: torch.Tensor) -> bool:
        """Say whether ``grad``, of the same shape, is this very gradient."""
        ref = getattr(grad, "_ref", None)  # a retired alias may have the address of the current one
        own = self.exists and (ref is None or ref is self._alias_ref)
        with torch._C.DisableTorchFunctionSubclass():
            return own and grad.data_ptr() == self.value.data_ptr() and grad.stride() == self.value.stride()

    def retire_aliases(self) -> None:
        """Make all aliases handed out so far, and their views, raise when they are used."""
        if self._alias_ref is not None:
            self._alias_ref.lead_to(_DISCARDED)
            self._alias_ref = None
            increment_version(self.view)  # graphs that saved an alias refuse their backward

    def _refuse_sparse(self) -> NoReturn:
        raise ConfigError(
            f"parameter {self._name!r} has a sparse gradient; build its module with sparse=False"
        )

    def _write(self, grad: torch.Tensor, add: bool) -> None:
        self._gate.pre_op(self.ref.tensors)
        try:
            if add:
                self.view.add_(grad)
            else:
                self.view.copy_(grad)
                if self._left is Left.ZEROS:  # plain torch adds it to zeros: -0.0 becomes 0.0
                    self.view.add_(0.0)
            self._in_chunk = True
        finally:
            self._gate.post_op(self.ref.tensors, True)


@dataclass(frozen=True)
class GroupShard:
    """Elements ``[start, stop)`` of a parameter chunk, which this rank owns, and their gradient.

    ``param_tensor`` is the tensor of the parameter shard in the chunk table. Each parameter has a tensor of
    its own on ``grad``, which is None for frozen parameters.
    """

    start: int
    stop: int
    param: Chunk
    param_tensor: int
    grad: Chunk | None

    def param_flat(self, start: int, stop: int) -> torch.Tensor:
        """Return elements ``[start, stop)`` of the parameter chunk, which must lie in the shard."""
        return self.param.tensor[start - self.start : stop - self.start]

    def clip(self, start: int, stop: int) -> tuple[int, int]:
        """Return the part of ``[start, stop)`` that lies in the shard; an empty range inside the shard if
        there is none."""
        low = min(max(start, self.start), self.stop)
        return low, max(low, min(stop, self.stop))


class ShardPlace(NamedTuple):
    """The place of a gradient's shard: its tensor in the chunk table; elements ``[start, stop)`` of the
    gradient chunk, empty if the parameter lies outside the shard; and the first element of the parameter."""

    tensor: int
    shard: GroupShard
    start: int
    stop: int
    first: int


class GradientEvents(Protocol):
    """Is notified by each gradient; implemented by the exchange of gradients."""

    def arrived(self) -> bool:
        """Backward made a gradient, or added to it. Returns whether the gradient is offered for exchange now;
        otherwise it stays on this rank until a later exchange."""
        ...

    def assigned(self) -> None:
        """The user assigned the gradient."""
        ...

    def discarded(self) -> None:
        """The gradient was discarded on this rank."""
        ...

    def settle(self) -> None:
        """Wait for a running exchange of this gradient."""
        ...


class _Shared(RefusingGate):
    """The gate of a gradient that is spread over the ranks; raises on use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def pre_op(self, *_tensors: Any) -> NoReturn:
        raise ConfigError(
            f"the gradient of parameter {self._name!r} was exchanged among the ranks: each rank "
            "holds only a part of the mean, so functions that read param.grad, such as "
            "torch.nn.utils.clip_grad_norm_ and torch.amp.GradScaler, cannot see it; clip with "
            "optimizer.clip_grad_by_norm(max_norm), clip_grad_by_value() or "
            "GeminiOptimizer(max_norm=...), scale losses by mixed_precision='fp16' and "
            "optimizer.backward(loss), read optimizer.get_param_grad(param). The gradient of this "
            "rank alone can be read under model.no_sync(), and param.grad = values replaces a "
            "gradient"
        )


class ShardedGradient(SlotGradient):
    """Collects the whole gradient in its chunk until all ranks exchange it; afterwards each rank holds its
    shard of the mean.

    ``param.grad`` is this rank's own gradient until the exchange (within a backward pass, and under
    ``no_sync()``), or an assigned value. Afterwards it is a tensor that has a shape and dtype but raises on
    use. None would be wrong: a loop over ``param.grad`` would skip it silently.
    """

    __slots__ = ("_is_offered", "_place", "events", "is_shared")

    events: GradientEvents  # set by the exchange

    def __init__(self, name: str, gate: Gate, tensor: int, view: torch.Tensor, place: ShardPlace) -> None:
        super().__init__(name, gate, TensorRef(gate, tensor), view)
        self._place = place
        self.is_shared = False  # the shard has the mean over the ranks
        self._is_offered = False  # the ranks exchange it once all of them have theirs

    def set_events(self, events: GradientEvents) -> None:
        """Set the receiver of this gradient's events."""
        self.events = events

    def note_mean(self) -> None:
        """Note that the shard holds the mean over the ranks."""
        self.is_shared = True
        self._left = Left.NOTHING

    @property
    def is_local(self) -> bool:
        """Whether this rank has a gradient that was not exchanged yet."""
        return self._in_chunk

    @property
    def exists(self) -> bool:
        """Whether there is a gradient, on this rank or as a mean over all."""
        return self._in_chunk or self._has_mean

    @property
    def update_tensors(self) -> tuple[int, ...]:
        """The shard's tensor in the chunk table."""
        return (self._place.tensor,)

    @property
    def tensors(self) -> tuple[int, ...]:
        """The ids to pin before the shard is used."""
        return (self._place.tensor,) if self.is_shared else ()

    @property
    def value(self) -> torch.Tensor:
        """This rank's part of the mean, flat, fp32; valid while pinned, after the exchange."""
        place = self._place
        return self.flat(place.start - place.first, place.stop - place.first)

    def flat(self, start: int, stop: int) -> torch.Tensor:
        """Return elements ``[start, stop)`` of the parameter, in its memory order; they must lie in the
        shard."""
        place = self._place
        assert place.shard.grad is not None
        offset = place.first - place.shard.start
        return place.shard.grad.tensor[offset + start : offset + stop]

    def held(self) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Yield this rank's own gradient and its shard of the mean, those that exist."""
        self.events.settle()
        if self._in_chunk:
            yield self.ref.tensors, self.view
        if self._has_mean:
            yield self.tensors, self.value

    def alias(self) -> torch.Tensor | None:
        """Return the value of ``param.grad``: None, this rank's own gradient, or a tensor that raises
        ConfigError on use."""
        self.events.settle()
        is_zeros = self._left is Left.ZEROS
        if not self.exists and not is_zeros:
            return None
        in_backward = torch._C._current_graph_task_id() != -1
        if self._has_mean or is_zeros or (self._is_offered and not in_backward):
            ref = TensorRef(cast("Gate", _Shared(self._name)), self.ref.tensors[0])
            return as_managed(self.view.view_as(self.view), ref)
        return super().alias()

    def collect(self, grad: torch.Tensor) -> None:
        """Take over a gradient from autograd, and offer it for exchange."""
        super().collect(grad)
        self._is_offered = self.events.arrived()

    def assign(self, grad: torch.Tensor | None) -> None:
        """Keep a copy of ``grad``, which the next step exchanges. The parameter's dtype is accepted as
        well."""
        place = self._place
        if grad is not None and grad.dtype == place.shard.param.spec.dtype:
            grad = grad.to(self.view.dtype)
        super().assign(grad)
        if grad is not None:
            self._is_offered = False
            if not self._shard_is_taken:
                self.free_shard()
            self.events.assigned()

    def fill_zero(self) -> None:
        """Set this rank's gradient and its shard to zeros if they exist or the last step has taken the
        shard."""
        if not self.exists and self._left is Left.TAKEN:
            self._left = Left.ZEROS
            self.events.assigned()
        with torch.no_grad():
            if self._in_chunk:
                with self._gate.operator(self.ref.tensors, self.ref.tensors):
                    self.view.zero_()
            if self._has_mean:
                with self._gate.operator(self.tensors, self.tensors):
                    self.value.zero_()

    def make_zeros(self) -> None:
        """Materialize the zeros that :meth:`fill_zero` deferred in the shard, after the exchange, if no rank
        has added to them. Collective."""
        if self._left is Left.ZEROS:
            tensor = (self._place.tensor,)
            with torch.no_grad(), self._gate.operator(tensor, tensor):
                self.value.zero_()
            self.note_mean()

    def free(self) -> None:
        """Discard this rank's gradient and its shard, unless a pending update has taken the shard."""
        self._left = Left.NOTHING
        self.events.settle()
        if self._in_chunk:
            super().use_up()
        if not self._shard_is_taken:
            self.free_shard()
        self.events.discarded()

    def end_update(self) -> None:
        """Free the shard, which the update has used. A gradient that arrived in the chunk since is another
        one and stays."""
        self.free_shard()

    def free_whole(self) -> None:
        """Free the whole gradient, or its zeros, after the exchange."""
        if self._in_chunk:
            super().use_up()
        else:
            self._gate.chunks.free(self.ref.tensors)

    def _await_update(self) -> None:
        """Wait until the chunk may be written. A pending update uses only the shard, but a running exchange
        sends the chunk."""
        self.events.settle()

    @property
    def _has_mean(self) -> bool:
        """Whether there is a mean over the ranks that no update has taken."""
        return self.is_shared and not self._shard_is_taken

    @property
    def _shard_is_taken(self) -> bool:
        update = self._gate.pending.by_tensor.get(self._place.tensor)
        return update is not None and self._place.tensor in update.gradients

    def free_shard(self) -> None:
        """Free this rank's shard, if it exists."""
        tensor = (self._place.tensor,)
        if self._gate.tensors.state(tensor[0]) != TensorState.FREE:
            self._gate.chunks.free(tensor)
        self.is_shared = False
