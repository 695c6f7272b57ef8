"""Which optimizer states the CPU updates where they lie on HOST."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

from gemini.chunk import CutChunk
from gemini.memstats import LinkSpeed
from gemini.runtime.storage.model_storage import ChunkGroup


class GroupStates(NamedTuple):
    """The optimizer states of a chunk group, and what its update moves and computes."""

    chunks: frozenset[int]
    state_bytes: int
    param_bytes: int
    grad_bytes: int
    numel: int  # elements of this rank


@dataclass(frozen=True)
class HostUpdates:
    """States of the first chunk groups are updated on DEVICE, those of all others on HOST.

    ``groups``: in forward order. ``param_bytes``: what parameters take. ``ratio``: on DEVICE are as many as
    fit this share, from 0 to 1, of what parameters and non-model data leave; ``"auto"``: as many as make the
    step shortest. ``elements_per_second``: what the CPU updates, for ``"auto"``.
    """

    groups: tuple[GroupStates, ...]
    param_bytes: int
    ratio: float | Literal["auto"]
    elements_per_second: float = 1.0

    @classmethod
    def of_groups(
        cls,
        groups: Iterable[ChunkGroup],
        whole_bytes: int,
        ratio: float | Literal["auto"],
    ) -> HostUpdates:
        """Return the choice for a model's ``groups``; ``whole_bytes``: what whole chunks take over ranks."""
        states, param_bytes = [], whole_bytes
        for group in groups:
            param, grad, _ = group.updated
            param_bytes += param.spec.nbytes
            if grad is not None and not isinstance(param, CutChunk):  # else updated on DEVICE
                chunks = [chunk for piece in group.pieces for chunk in piece.chunks.values()]
                state_bytes = sum(chunk.spec.nbytes for chunk in chunks)
                ids = frozenset(chunk.id for chunk in chunks)
                states.append(
                    GroupStates(ids, state_bytes, param.spec.nbytes, grad.spec.nbytes, grad.spec.numel)
                )
        return cls(tuple(states), param_bytes, ratio)

    @property
    def state_bytes(self) -> int:
        """What all states take."""
        return sum(group.state_bytes for group in self.groups)

    def on_host(self, room_bytes: int | None, links: Sequence[LinkSpeed]) -> frozenset[int]:
        """Return the state chunks that are updated on HOST. ``room_bytes``: what model data may take of
        DEVICE; None while that is not known: then a number has all of them there, ``"auto"`` none.
        ``links``: how fast they are; where those to HOST are not known, ``"auto"`` has none there either."""
        if self.ratio == "auto":
            count = self._fastest(room_bytes, {link.name: link for link in links})
        else:
            left = 0.0 if room_bytes is None else self.ratio * (room_bytes - self.param_bytes)
            totals = accumulate(group.state_bytes for group in self.groups)
            count = sum(1 for total in totals if total <= left)
        return frozenset().union(*(group.chunks for group in self.groups[count:]))

    def _fastest(self, room_bytes: int | None, links: Mapping[str, LinkSpeed]) -> int:
        """Return how many groups are updated on DEVICE so that the slowest of three that work side by side
        ends first: the link to DEVICE, the link from it, and the CPU. Of equals the most."""
        if room_bytes is None or "h2d" not in links or "d2h" not in links:
            return len(self.groups)
        up = down = cpu = best = 0.0
        on_device, count = self.state_bytes, len(self.groups)
        # States stay beside parameters and, at the end of backward, the gradients of updates on DEVICE.
        stays = room_bytes - self.param_bytes - sum(group.grad_bytes for group in self.groups)
        for index in range(len(self.groups), -1, -1):
            if index < len(self.groups):
                group = self.groups[index]
                up += group.param_bytes
                down += group.grad_bytes
                cpu += group.numel / self.elements_per_second
                on_device -= group.state_bytes
                stays += group.grad_bytes
            moved = max(0, on_device - max(0, stays))
            seconds = max(
                (up + moved) / links["h2d"].bytes_per_second,
                (down + moved) / links["d2h"].bytes_per_second,
                cpu,
            )
            if index == len(self.groups) or seconds < best:
                best, count = seconds, index
        return count
