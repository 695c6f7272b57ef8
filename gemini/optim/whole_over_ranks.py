"""A parameter whose update needs all of it, while every rank has parts: put together on each rank, which all
make the same step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from gemini.chunk import ChunkManager
from gemini.chunk.chunk import StateSpec
from gemini.optim.rule import Part, UpdateStep
from gemini.optim.whole_parameter import WholeParameter
from gemini.runtime import ChunkGroup, ManagedSlot, StatePiece
from gemini.runtime.storage.data_sizes import places_in_room
from gemini.runtime.storage.model_storage import Room
from gemini.sharding.sharding import Sharding


class WholeOverRanks(WholeParameter):
    """As :class:`WholeParameter`; the gradient, the values and the states are whole in ``room`` until the
    update is over. One message brings all of them, so all ranks come to the same parameters in one order;
    each keeps its part of what the step makes, and all of the small states."""

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
        if not self.pieces:  # all of it is other ranks'
            self.written, self.grads = [], []
        self.written = [*self.written, room.tensor]
        self.chunks = tuple(sorted({chunk_of(tensor) for tensor in self.written + self.grads}))
        self._sharding, self._room = sharding, room

    def gathered(self, step: UpdateStep, *, rewritten: bool) -> tuple[Part, Callable[[], None]]:
        """As :meth:`WholeParameter.gathered`; all ranks together."""
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
            self._sharding.assemble(self._used)

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
        """Give the room up."""
        chunks.free((self._room.tensor,))

    def _places(self) -> list[torch.Tensor]:
        """Return where the gradient, the values and each state are to be whole, flat, all zeros."""
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
        """Yield this rank's pieces, and which elements of the parameter each has."""
        first = self._slot.start
        for piece in self.pieces:
            start, stop = self._slot.overlapping(piece)
            yield piece, slice(start - first, stop - first)
