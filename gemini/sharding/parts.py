"""Parts of a gradient: how each rank gets those of its shard from all others, and takes their mean.

Parts of the same elements are added in the order of the ranks, in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from gemini.comm.peers import Peers, Transfer


class Parts(Protocol):
    """Sends one whole gradient at a time, through the room for parts; both are pinned from :meth:`send` until
    :meth:`mean` has been used."""

    def send(self, whole: torch.Tensor, count: int) -> Transfer:
        """Start to send every rank its part of ``whole``, fp32, which nobody may write until it is over. The
        sum is divided by ``count``."""
        ...

    def mean(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the mean of what all have sent, fp32, in the room; ``whole`` is void."""
        ...


class FullParts(Parts):
    """Parts travel in fp32."""

    def __init__(self, peers: Peers, room: torch.Tensor) -> None:
        """``room``: fp32, at least as large as a whole gradient."""
        self._peers = peers
        self._room = room
        self._count = peers.share.size

    def send(self, whole: torch.Tensor, count: int) -> Transfer:
        self._count = count
        return self._peers.scatter_all(whole, self._room[: whole.numel()])

    def mean(self, whole: torch.Tensor) -> torch.Tensor:
        share = self._peers.share
        places = list(self._room[: whole.numel()].view(share.size, -1).unbind(0))
        total = places[share.rank]  # nothing has arrived there
        terms = [*places[: share.rank], _own(whole, self._peers), *places[share.rank + 1 :]]
        torch.add(terms[0], terms[1], out=total)
        return _add(total, terms[2:]).mul_(1.0 / self._count)


class NarrowParts(Parts):
    """Parts travel in 16 bits: half the bytes. They are divided by the number of ranks before they are
    rounded, so that none overflows which the mean does not. A rank's own part is rounded, too: who owns an
    element depends on the layout of chunks."""

    def __init__(self, peers: Peers, room: torch.Tensor, dtype: torch.dtype) -> None:
        """``room`` as for :class:`FullParts`: what is sent and what arrives share it."""
        self._peers = peers
        self._room = room
        self._dtype = dtype

    def send(self, whole: torch.Tensor, count: int) -> Transfer:
        sent, arrived = self._room[: whole.numel()].view(self._dtype).chunk(2)
        sent.copy_(whole.mul_(1.0 / count))
        return self._peers.scatter_all(sent, arrived)

    def mean(self, whole: torch.Tensor) -> torch.Tensor:
        share = self._peers.share
        sent, arrived = self._room[: whole.numel()].view(self._dtype).view(2, share.size, -1)
        terms = [*arrived[: share.rank], sent[share.rank], *arrived[share.rank + 1 :]]
        total = _add(_own(whole, self._peers).copy_(terms[0]), terms[1:])
        return self._room[: total.numel()].copy_(total)


def _own(whole: torch.Tensor, peers: Peers) -> torch.Tensor:
    start, stop = peers.share.range_of(whole.numel())
    return whole[start:stop]


def _add(total: torch.Tensor, terms: Sequence[torch.Tensor]) -> torch.Tensor:
    for term in terms:
        total.add_(term)
    return total
