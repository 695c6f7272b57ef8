"""What this rank owns of a chunk group, and gradients over several ranks: whole while backward makes them,
then this rank's shard."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol, cast

import torch

from gemini.chunk import Chunk
from gemini.errors import ConfigError
from gemini.runtime.gate.gate import Gate, TensorRef, TensorState
from gemini.runtime.gate.guards import RefusingGate
from gemini.runtime.intercept.tensors import as_managed
from gemini.runtime.storage.gradient import Left, SlotGradient


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
    under ``no_sync()``), or what was assigned. From then on it is a tensor of which nothing but the
    description may be used: were it None, a loop over ``param.grad`` would miss it in silence.
    """

    __slots__ = ("_is_offered", "_place", "events", "is_shared")

    events: GradientEvents  # set by who exchanges gradients

    def __init__(self, name: str, gate: Gate, tensor: int, view: torch.Tensor, place: ShardPlace) -> None:
        super().__init__(name, gate, tensor, view)
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
    def update_tensor(self) -> int:
        """The shard's tensor in the chunk table."""
        return self._place.tensor

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
