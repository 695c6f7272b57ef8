"""A parameter whose update needs all of it at once: gathered from its pieces, and put back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gemini.chunk import ChunkManager
from gemini.chunk.chunk import StateSpec
from gemini.optim.rule import Part, UpdateStep
from gemini.runtime import MASTER, ChunkGroup, ManagedSlot


class WholeParameter:
    """A parameter still to be updated, and everything that takes, which is pinned at once. What lies in
    several chunks is copied together for the update: extra memory, once masters and states."""

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
        self.grads = list(slot.trainable_grad.tensors)
        self.chunks = tuple(sorted({chunk_of(tensor) for tensor in self.written + self.grads}))

    def gathered(self, step: UpdateStep, *, rewritten: bool) -> tuple[Part, Callable[[], None]]:
        """Return all of the parameter as a part, in its shape, and what puts back what was copied.
        ``rewritten``: the master follows the parameter first, which user code wrote to."""
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
        """The update is over, and nothing is pinned."""

    def _shaped(self, flat: torch.Tensor) -> torch.Tensor:
        view = self._slot.param_view
        return flat.as_strided(view.shape, view.stride(), flat.storage_offset())
