"""The gradient of one parameter: in a chunk, or where autograd made it while nothing can be evicted; and over
several ranks, whole while backward makes it, then this rank's shard.
"""

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
from gemini.runtime.gate.gate import Gate, TensorRef, TensorState
from gemini.runtime.gate.guards import RefusingGate
from gemini.runtime.intercept.tensors import as_managed


class _GivenUp(RefusingGate):
    """The gate of every alias of a gradient that was given up."""

    def pre_op(self, *_tensors: Any) -> NoReturn:
        raise StateError(
            "this .grad was given up by step(), zero_grad() or an assignment to param.grad, and its memory "
            "with it; to keep a gradient, clone it before: param.grad.clone()"
        )


_GIVEN_UP = cast("Gate", _GivenUp())


class Left(Enum):
    """What plain torch would have where there is no gradient here."""

    NOTHING = auto()
    TAKEN = auto()  # one that a step has used; zero_grad(set_to_none=False) makes zeros of it
    ZEROS = auto()  # that, which gets memory once it is used: an update takes it, others do not see it


class SlotGradient:
    """Holds the gradient between backward and update.

    ``view`` is its place in the gradient chunk. While the whole model stays on DEVICE permanently
    (``Gate.resident``) gradients are kept as autograd made them instead, which saves the copy;
    budgets count the chunk's bytes either way. One that a pending update has taken over is there for that
    update only.
    """

    __slots__ = ("_alias_ref", "_gate", "_in_chunk", "_left", "_loose", "_name", "_stride", "ref", "view")

    def __init__(self, name: str, gate: Gate, ref: TensorRef, view: torch.Tensor) -> None:
        self.ref = ref
        self.view = view.data  # with a version counter of its own: the chunk's other gradients may change
        self._stride = self.view.stride()
        self._name = name
        self._gate = gate
        self._in_chunk = False
        self._left = Left.NOTHING
        self._loose: torch.Tensor | None = None
        self._alias_ref: TensorRef | None = None  # of this gradient; the next one gets another

    def rename(self, name: str) -> None:
        """Call the parameter ``name`` from now on."""
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
        """Whether it belongs to a pending update, and to nobody else."""
        update = self._gate.pending.by_tensor.get(self.ref.tensors[0])
        return update is not None and self.ref.tensors[0] in update.gradients

    @property
    def update_tensors(self) -> tuple[int, ...]:
        """The tensors of the chunks that an update takes the gradient from."""
        return self.ref.tensors

    @property
    def tensors(self) -> tuple[int, ...]:
        """The ids to pin before reading or writing :attr:`value`; none when it is not in a chunk."""
        return self.ref.tensors if self._in_chunk else ()

    @property
    def value(self) -> torch.Tensor:
        """The gradient, in the parameter's shape; valid while pinned, and only if it exists or was taken."""
        return self.view if self._loose is None else self._loose

    def held(self) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Yield what there is of the gradient here: the ids to pin, and the values."""
        if self.exists:
            yield self.tensors, self.value

    @property
    def loose_bytes(self) -> int:
        """Bytes held outside the chunk."""
        return 0 if self._loose is None else self._loose.nbytes

    def flat(self, start: int, stop: int) -> torch.Tensor:
        """Return elements ``[start, stop)`` in the memory order of the parameter: of a copy, which the result
        keeps, where the gradient has another order, or no values in its memory."""
        value = self.value
        # Equal strides are the quick answer of :func:`ordered_like`; this runs for every parameter of a step.
        if value.stride() != self._stride or value.is_neg() or value.data_ptr() == 0:
            value = ordered_like(value, self.view, value.dtype)
        return torch.as_strided(value, (stop - start,), (1,), value.storage_offset() + start)

    def tensors_under(self, _start: int, _stop: int) -> tuple[int, ...]:
        """Return the ids to pin before elements ``[start, stop)`` of :attr:`value` are used."""
        return self.tensors

    def unmade_under(self, _start: int, _stop: int) -> tuple[int, ...]:
        """Return those of :meth:`tensors_under` that :meth:`make_under` writes to."""
        return ()

    def make_under(self, _start: int, _stop: int) -> None:
        """Have elements ``[start, stop)``, which are pinned, be there: zeros where nothing has come."""

    def end_under(self, _start: int, _stop: int) -> None:
        """An update has used elements ``[start, stop)``: give up the chunks that hold no others."""

    def collect(self, grad: torch.Tensor) -> None:
        """Take over a gradient that autograd made, adding to what is there.

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
        """Return what ``param.grad`` is: None, or a tensor whose use fetches the chunk until it is given
        up. Raises StateError where backward has used it up already."""
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
        """Do what ``param.grad = grad`` says: keep a copy of it in place of the gradient there was.

        Raises:
            ConfigError: it is not like the parameter; the gradient is as before.
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
        """Set the gradient to zeros, if there is one, or the last step has taken it."""
        if self.exists:
            with self._gate.operator(self.tensors, self.tensors):
                self.value.zero_()
        elif self._left is Left.TAKEN:
            self._left = Left.ZEROS

    def note_taken(self) -> None:
        """A step uses the gradient, which is still there by torch's rules."""
        if self._left is Left.NOTHING:
            self._left = Left.TAKEN

    def hand_over(self) -> None:
        """Leave the gradient to an update that is about to run, or pending."""

    def make_zeros(self) -> None:
        """Have zeros be there that :meth:`fill_zero` left to be made. Raises as an operator."""
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
        """Give up the gradient's memory; what ``param.grad`` was cannot be used any more. One that a pending
        update has taken stays.

        Raises:
            StateError: it is in use; it stays.
        """
        self._left = Left.NOTHING
        self._set_loose(None)
        if self._in_chunk and not self._is_taken:
            self.use_up()

    def end_update(self) -> None:
        """Give up what an update has used, also a gradient that was taken for it.

        Raises:
            StateError: it is in use; it stays.
        """
        self._set_loose(None)
        self.use_up()

    def use_up(self) -> None:
        """Give up the memory of a gradient in a chunk, also of one that was taken: its update has run.

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
        """Run the pending update that has taken the last gradient, before a new one comes to its place."""
        if self._is_taken:
            self._gate.run_due(self.ref.tensors)

    def _set_loose(self, grad: torch.Tensor | None) -> None:
        before, self._loose = self._loose, grad
        more, fewer = 0 if grad is None else grad.nbytes, 0 if before is None else before.nbytes
        if more != fewer:
            self._gate.loose.add(more - fewer)

    def _is_own(self, grad: torch.Tensor) -> bool:
        """Say whether ``grad``, of the same shape, is this very gradient."""
        ref = getattr(grad, "_ref", None)  # an alias given up may have the address of this one
        own = self.exists and (ref is None or ref is self._alias_ref)
        with torch._C.DisableTorchFunctionSubclass():
            return own and grad.data_ptr() == self.value.data_ptr() and grad.stride() == self.value.stride()

    def retire_aliases(self) -> None:
        """Make every alias handed out so far, and every view of one, raise when it is used."""
        if self._alias_ref is not None:
            self._alias_ref.lead_to(_GIVEN_UP)
            self._alias_ref = None
            increment_version(self.view)  # a graph that saved one refuses its backward

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
                if self._left is Left.ZEROS:  # to which plain torch adds it: -0.0 becomes 0.0
                    self.view.add_(0.0)
            self._in_chunk = True
        finally:
            self._gate.post_op(self.ref.tensors, True)


@dataclass(frozen=True)
class GroupShard:
    """Elements ``[start, stop)`` of a parameter chunk, which this rank owns, and their gradient.

    ``param_tensor`` is the shard of the parameters in the chunk table; each parameter has a tensor of its own
    on ``grad``, which is None for what is frozen.
    """

    start: int
    stop: int
    param: Chunk
    param_tensor: int
    grad: Chunk | None

    def param_flat(self, start: int, stop: int) -> torch.Tensor:
        """Return elements ``[start, stop)`` of the parameter chunk, which must be among the shard's."""
        return self.param.tensor[start - self.start : stop - self.start]

    def clip(self, start: int, stop: int) -> tuple[int, int]:
        """Return what of ``[start, stop)`` the shard holds; an empty range at a place of the shard's where
        that is nothing."""
        low = min(max(start, self.start), self.stop)
        return low, max(low, min(stop, self.stop))


class ShardPlace(NamedTuple):
    """Where the shard of a gradient is: its tensor in the chunk table, elements ``[start, stop)`` of the
    gradient chunk, empty where the parameter lies outside the shard, and where the parameter begins."""

    tensor: int
    shard: GroupShard
    start: int
    stop: int
    first: int


class GradientEvents(Protocol):
    """The exchange of gradients, as seen by one of them."""

    def arrived(self) -> bool:
        """Backward has made a gradient, or added to it. Say whether the ranks exchange it from now on; else
        it stays with this one until they are told to."""
        ...

    def assigned(self) -> None:
        """The user has set the gradient."""
        ...

    def given_up(self) -> None:
        """There is none any more, here."""
        ...

    def settle(self) -> None:
        """Wait for the exchange that the gradient is part of, if one is under way."""
        ...


class _Shared(RefusingGate):
    """The gate of a gradient that all ranks have together."""

    def __init__(self, name: str) -> None:
        self._name = name

    def pre_op(self, *_tensors: Any) -> NoReturn:
        raise ConfigError(
            f"the gradient of parameter {self._name!r} is exchanged among the ranks: each holds a part of "
            "their mean and none the whole, so what goes through param.grad, as torch.nn.utils."
            "clip_grad_norm_ and torch.amp.GradScaler do, cannot see it; clip with "
            "optimizer.clip_grad_by_norm(max_norm), clip_grad_by_value() or GeminiOptimizer(max_norm=...), "
            "scale losses by mixed_precision='fp16' and optimizer.backward(loss), read "
            "optimizer.get_param_grad(param). What this rank alone has made can be "
            "read under model.no_sync(), and param.grad = values replaces a gradient"
        )


class ShardedGradient(SlotGradient):
    """Collects the whole gradient in its chunk until all ranks exchange it; what is left then is the mean
    over the ranks, each holding its shard.

    ``param.grad`` is what backward has made here as long as that stays here (within a backward pass, and
    under ``no_sync()``), or what was assigned. From then on nothing of the tensor but its
    description may be used: were it None, a loop over ``param.grad`` would miss it silently.
    """

    __slots__ = ("_is_offered", "_place", "events", "is_shared")

    events: GradientEvents  # set by who exchanges gradients

    def __init__(self, name: str, gate: Gate, tensor: int, view: torch.Tensor, place: ShardPlace) -> None:
        super().__init__(name, gate, TensorRef(gate, tensor), view)
        self._place = place
        self.is_shared = False  # there is a mean over the ranks
        self._is_offered = False  # the ranks will exchange it, once all of them have theirs

    def tell(self, events: GradientEvents) -> None:
        """Have ``events`` told what happens to this gradient."""
        self.events = events

    def take_mean(self) -> None:
        """The shard holds the mean over the ranks."""
        self.is_shared = True
        self._left = Left.NOTHING

    @property
    def is_local(self) -> bool:
        """Whether there is something that was not exchanged yet."""
        return self._in_chunk

    @property
    def exists(self) -> bool:
        """Whether there is a gradient, on this or on all ranks."""
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
        """Return elements ``[start, stop)`` of the parameter, in its memory order, which the shard holds."""
        place = self._place
        assert place.shard.grad is not None
        offset = place.first - place.shard.start
        return place.shard.grad.tensor[offset + start : offset + stop]

    def held(self) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Yield what this rank has made, and its part of the mean."""
        self.events.settle()
        if self._in_chunk:
            yield self.ref.tensors, self.view
        if self._has_mean:
            yield self.tensors, self.value

    def alias(self) -> torch.Tensor | None:
        """Return what ``param.grad`` is: None, this rank's own, or one whose use raises ConfigError."""
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
        """Take over a gradient that autograd made, and offer it for exchange."""
        super().collect(grad)
        self._is_offered = self.events.arrived()

    def assign(self, grad: torch.Tensor | None) -> None:
        """Keep a copy of ``grad``, which the next step exchanges; the parameter's dtype is taken, too."""
        place = self._place
        if grad is not None and grad.dtype == place.shard.param.spec.dtype:
            grad = grad.to(self.view.dtype)
        super().assign(grad)
        if grad is not None:
            self._is_offered = False
            if not self._shard_is_taken:
                self.give_up_shard()
            self.events.assigned()

    def fill_zero(self) -> None:
        """Set both to zeros, where they exist, or the last step has taken the shard."""
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
        """Have the shard be zeros that :meth:`fill_zero` left to be made, after the exchange: where no rank
        had anything to add to them. All ranks call it."""
        if self._left is Left.ZEROS:
            tensor = (self._place.tensor,)
            with torch.no_grad(), self._gate.operator(tensor, tensor):
                self.value.zero_()
            self.take_mean()

    def free(self) -> None:
        """Give both up, but not a shard that a pending update has taken."""
        self._left = Left.NOTHING
        self.events.settle()
        if self._in_chunk:
            super().use_up()
        if not self._shard_is_taken:
            self.give_up_shard()
        self.events.given_up()

    def end_update(self) -> None:
        """Give up the shard, which the update has used. What has come to the chunk since is another
        gradient."""
        self.give_up_shard()

    def give_up_whole(self) -> None:
        """Give up the whole gradient, or the zeros in its place: they were exchanged."""
        if self._in_chunk:
            super().use_up()
        else:
            self._gate.chunks.free(self.ref.tensors)

    def _await_update(self) -> None:
        """Wait until the chunk may be written: a pending update has taken the shard, but an exchange under
        way sends the chunk."""
        self.events.settle()

    @property
    def _has_mean(self) -> bool:
        """Whether there is a mean over the ranks that no update has taken."""
        return self.is_shared and not self._shard_is_taken

    @property
    def _shard_is_taken(self) -> bool:
        update = self._gate.pending.by_tensor.get(self._place.tensor)
        return update is not None and self._place.tensor in update.gradients

    def give_up_shard(self) -> None:
        """Give up this rank's shard, if there is one."""
        tensor = (self._place.tensor,)
        if self._gate.tensors.state(tensor[0]) != TensorState.FREE:
            self._gate.chunks.free(tensor)
        self.is_shared = False
