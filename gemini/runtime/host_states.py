"""Which optimizer states are updated by the CPU, where they lie on HOST (docs/notes/gpu.md)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemini.runtime.storage import ChunkGroup

if TYPE_CHECKING:
    from gemini.runtime.gemini_mgr import GeminiManager


@dataclass(frozen=True)
class HostUpdates:
    """States of the first chunk groups are updated on DEVICE, as many as fit a share of the room there; those
    of all others on HOST.

    ``states``: the state chunks of each group and their bytes, in forward order. ``param_bytes``: what
    parameters take. ``ratio``: the share, from 0 to 1, of what parameters and non-model data leave.
    """

    states: tuple[tuple[frozenset[int], int], ...]
    param_bytes: int
    ratio: float

    @classmethod
    def of_groups(cls, groups: Iterable[ChunkGroup], whole_bytes: int, ratio: float) -> HostUpdates:
        """Return the choice for a model's ``groups``; ``whole_bytes``: what whole chunks take over ranks."""
        states, param_bytes = [], whole_bytes
        for group in groups:
            chunks = [chunk for piece in group.pieces for chunk in piece.chunks.values()]
            param, grad, _ = group.updated
            param_bytes += param.spec.nbytes
            if grad is not None:
                states.append(
                    (frozenset(chunk.id for chunk in chunks), sum(chunk.spec.nbytes for chunk in chunks))
                )
        return cls(tuple(states), param_bytes, ratio)

    @property
    def state_bytes(self) -> int:
        """What all states take."""
        return sum(nbytes for _, nbytes in self.states)

    def on_host(self, room_bytes: int | None) -> frozenset[int]:
        """Return the state chunks that are updated on HOST. ``room_bytes``: what model data may take of
        DEVICE; None while that is not known: all of them are then."""
        left = 0.0 if room_bytes is None else self.ratio * (room_bytes - self.param_bytes)
        chosen: set[int] = set()
        for chunks, nbytes in self.states:
            if nbytes > left:
                left = 0.0
                chosen |= chunks
            else:
                left -= nbytes
        return frozenset(chosen)


def choose_host_updates(manager: GeminiManager, updates: HostUpdates | None) -> None:
    """Have ``updates`` say which states are updated on HOST from now on. A step under way is not recorded."""
    if updates == manager.order.host_updates:
        return
    manager.run_pending()
    manager.abandon()
    manager.resident = manager.snapshot.residence(False)  # what is updated on HOST leaves DEVICE
    manager.order.host_updates = updates
