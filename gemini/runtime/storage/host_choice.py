"""Chooses the optimizer states that the CPU updates on HOST."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

from gemini.chunk.chunk import CutChunk
from gemini.memstats.trace import LinkSpeed
from gemini.runtime.storage.model_storage import ChunkGroup


class GroupStates(NamedTuple):
    """The optimizer states of a chunk group, and the bytes and elements of its update."""

    chunks: frozenset[int]
    state_bytes: int
    param_bytes: int
    grad_bytes: int
    numel: int  # gradient elements on this rank


@dataclass(frozen=True)
class HostUpdates:
    """States of the first chunk groups are updated on DEVICE, those of all others on HOST.

    ``groups``: in forward order. ``param_bytes``: the bytes of all parameters. ``ratio``: the share, from 0
    to 1, of the DEVICE bytes left by parameters and non-model data that states may use on DEVICE; ``"auto"``:
    the share with the shortest step. ``elements_per_second``: the CPU's update speed, for ``"auto"``.
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
        """Return the choice for a model's ``groups``; ``whole_bytes``: the bytes of whole chunks over
        ranks."""
        states, param_bytes = [], whole_bytes
        for group in groups:
            param, grad, _ = group.updated
            param_bytes += param.spec.nbytes
            if grad is not None and not isinstance(param, CutChunk):  # cut groups are updated on DEVICE
                chunks = [chunk for piece in group.pieces for chunk in piece.chunks.values()]
                state_bytes = sum(chunk.spec.nbytes for chunk in chunks)
                ids = frozenset(chunk.id for chunk in chunks)
                states.append(
                    GroupStates(ids, state_bytes, param.spec.nbytes, grad.spec.nbytes, grad.spec.numel)
                )
        return cls(tuple(states), param_bytes, ratio)

    @property
    def state_bytes(self) -> int:
        """The bytes of all states."""
        return sum(group.state_bytes for group in self.groups)

    def on_host(self, room_bytes: int | None, links: Sequence[LinkSpeed]) -> frozenset[int]:
        """Return the state chunks that are updated on HOST. ``room_bytes``: the DEVICE bytes for model data,
        None if not known yet; then a numeric ratio puts all states on HOST, ``"auto"`` none. ``links``: their
        speeds; if those between DEVICE and HOST are unknown, ``"auto"`` puts no states on HOST."""
        if self.ratio == "auto":
            count = self._fastest(room_bytes, {link.name: link for link in links})
        else:
            left = 0.0 if room_bytes is None else self.ratio * (room_bytes - self.param_bytes)
            totals = accumulate(group.state_bytes for group in self.groups)
            count = sum(1 for total in totals if total <= left)
        return frozenset().union(*(group.chunks for group in self.groups[count:]))

    def _fastest(self, room_bytes: int | None, links: Mapping[str, LinkSpeed]) -> int:
        """Return the number of groups to update on DEVICE that minimizes the slowest of three that run in
        parallel: the link to DEVICE, the link from it, and the CPU. Among equals, the largest number."""
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
