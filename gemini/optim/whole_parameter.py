"""Updates for optimizers that need a whole parameter: it is gathered from its pieces, on one rank or on all
ranks, updated, and written back. Over ranks all make the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from gemini.chunk import ChunkManager
from gemini.chunk.chunk import StateSpec
from gemini.optim.rule import Part, UpdateStep
from gemini.runtime.gate.gradients import MASTER, StatePiece
from gemini.runtime.storage.data_sizes import places_in_room
from gemini.runtime.storage.model_storage import ChunkGroup, ManagedSlot, Room
from gemini.sharding.sharding import Sharding


class WholeParameter:
    """A parameter still to be updated, and all tensors that this needs, pinned at once.

    Data in several chunks is copied together for the update. The copies are extra memory: the size of the
    parameter's masters and states.
    """

    def __init__(
        self,
        group: ChunkGroup,
        slot: ManagedSlot,
        states: tuple[StateSpec, ...],
        chunk_of: Callable[[int], int],
    ) -> None:
        self.slots = [slot]
        self.pieces = slot.pieces
        self._group = group
        self._slot = slot
        self._states = states
        keys = (*((MASTER,) if group.has_master else ()), *(state.key for state in states))
        kept = [piece.tensors[key] for piece in self.pieces for key in keys]
        self.written = group.value_tensors(self.slots) + kept
        self.places = [(slot.trainable_grad, 0, slot.stop - slot.start)]
        self.grads = list(slot.trainable_grad.tensors)
        self.chunks = tuple(sorted({chunk_of(tensor) for tensor in self.written + self.grads}))

    def gathered(self, step: UpdateStep, *, rewritten: bool) -> tuple[Part, Callable[[], None]]:
        """Return the whole parameter as a part, in its shape, and a function that writes copied data back.

        ``rewritten``: user code wrote the parameter, so it is copied to the master first.
        """
        slot, group = self._slot, self._group
        values, half_out = group.values(slot.start, slot.stop), None
        copies: list[tuple[torch.Tensor, Sequence[torch.Tensor]]] = []

        def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
            if len(parts) == 1:
                return self._shaped(parts[0])
            whole = torch.cat(list(parts))
            copies.append((whole, parts))
            return self._shaped(whole)

        if group.has_master:
            masters = [piece.master(*slot.overlapping(piece)) for piece in self.pieces]
            if rewritten:
                for master, piece in zip(masters, self.pieces, strict=True):
                    master.copy_(group.values(*slot.overlapping(piece)))
            half_out, whole = self._shaped(values), joined(masters)
        else:
            whole = self._shaped(values)
        states = {
            state.name: joined([slot.state_in(piece, state) for piece in self.pieces])
            for state in self._states
        }
        grad = self._shaped(slot.trainable_grad.flat(0, slot.stop - slot.start))

        def put_back() -> None:
            for copied, parts in copies:
                for part, values in zip(parts, copied.split([p.numel() for p in parts]), strict=True):
                    part.copy_(values)

        return Part(whole, grad, states, half_out, step, 0), put_back

    def end(self, chunks: ChunkManager) -> None:
        """Called after the update, when nothing is pinned."""

    def _shaped(self, flat: torch.Tensor) -> torch.Tensor:
        view = self._slot.param_view
        return flat.as_strided(view.shape, view.stride(), flat.storage_offset())


class WholeOverRanks(WholeParameter):
    """A :class:`WholeParameter` over ranks: gradient, values and states are whole in ``room`` until the
    update ends.

    One message gathers all of them, so all ranks must update parameters in the same order. Each rank keeps
    its part of the result, and all of the small states.
    """

    def __init__(
        self,
        group: ChunkGroup,
        slot: ManagedSlot,
        states: tuple[StateSpec, ...],
        chunk_of: Callable[[int], int],
        sharding: Sharding,
        room: Room,
    ) -> None:
        super().__init__(group, slot, states, chunk_of)
        if not self.pieces:  # no element on this rank
            self.written, self.grads = [], []
        self.written = [*self.written, room.tensor]
        self.chunks = tuple(sorted({chunk_of(tensor) for tensor in self.written + self.grads}))
        self._sharding, self._room = sharding, room

    def gathered(self, step: UpdateStep, *, rewritten: bool) -> tuple[Part, Callable[[], None]]:
        """Gather over all ranks; see :meth:`WholeParameter.gathered`. Collective."""
        slot, group = self._slot, self._group
        grad, values, *arrays = self._places()
        for piece, own in self._own():
            start, stop = slot.overlapping(piece)
            param = group.values(start, stop)
            if group.has_master:
                if rewritten:
                    piece.master(start, stop).copy_(param)
                param = piece.master(start, stop)
            values[own].copy_(param)
            grad[own].copy_(slot.trainable_grad.flat(own.start, own.stop))
            for state, whole in zip(self._states, arrays, strict=True):
                whole[own].copy_(slot.state_in(piece, state))
        if self._used.numel():
            self._sharding.assemble(self._used, group)

        def put_back() -> None:
            for piece, own in self._own():
                start, stop = slot.overlapping(piece)
                if group.has_master:
                    piece.master(start, stop).copy_(values[own])
                group.values(start, stop).copy_(values[own])
                for state, whole in zip(self._states, arrays, strict=True):
                    slot.state_in(piece, state).copy_(whole[own])

        states = {state.name: self._shaped(a) for state, a in zip(self._states, arrays, strict=True)}
        return Part(self._shaped(values), self._shaped(grad), states, None, step, 0), put_back

    def end(self, chunks: ChunkManager) -> None:
        """Free the room."""
        chunks.free((self._room.tensor,))

    def _places(self) -> list[torch.Tensor]:
        """Return flat zeroed views of ``room`` for the gradient, the values and each state."""
        numel = self._slot.stop - self._slot.start
        dtypes = (torch.float32, self._group.plan.updated_dtype, *(state.dtype for state in self._states))
        starts, sizes = places_in_room(numel, dtypes)
        self._used = self._room.chunk.tensor[: sum(sizes) // torch.float32.itemsize].zero_()
        held = self._used.view(torch.uint8)
        return [
            held[start : start + numel * dtype.itemsize].view(dtype)
            for start, dtype in zip(starts, dtypes, strict=True)
        ]

    def _own(self) -> Iterator[tuple[StatePiece, slice]]:
        """Yield each piece of this rank with the slice of the parameter's elements that it has."""
        first = self._slot.start
        for piece in self.pieces:
            start, stop = self._slot.overlapping(piece)
            yield piece, slice(start - first, stop - first)
