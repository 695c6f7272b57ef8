"""GradientExchange: takes the mean of gradients over the ranks, each keeping its shard of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from gemini.zero.gradient import ShardedGradient
from gemini.zero.peers import Peers, Transfer
from gemini.zero.rounds import from_bits, to_bits

if TYPE_CHECKING:
    from gemini.runtime.gemini_mgr import GeminiManager
    from gemini.runtime.storage import ChunkGroup, ModelStorage


class GradientExchange:
    """Exchanges the gradients of a chunk group once all of its parameters have theirs on every rank; the rest
    at the end of the step, zeros standing for what a rank does not have.

    Parts of the same elements are added in the order of the ranks, so how parameters are laid out in chunks
    does not change a bit of the result.
    """

    def __init__(
        self,
        manager: GeminiManager,
        storage: ModelStorage,
        peers: Peers,
        enter_round: Callable[[], None],
    ) -> None:
        self.is_held = False  # gradients accumulate here, without an exchange
        self._manager = manager
        self._peers = peers
        self._enter_round = enter_round
        self._groups = storage.groups
        self._had: set[int] = set()  # places in _gradients of what had one here since they were given up
        self._arrived: list[set[int]] = [set() for _ in storage.groups]
        self._complete: set[int] = set()
        self._under_way: tuple[int, Transfer] | None = None
        self._parts = storage.exchange
        self._parts_tensor = manager.chunks.add_tensor(storage.exchange) if storage.exchange else -1
        self._gradients: list[ShardedGradient] = []
        for index, group in enumerate(storage.groups):
            for grad in _gradients(group):
                grad.events = _Events(self, index, len(self._gradients))
                self._gradients.append(grad)

    def complete(self) -> list[int]:
        """Return the groups whose gradients are all here and wait for those of the other ranks."""
        return sorted(self._complete)

    def exchange(self, index: int) -> None:
        """Exchange what there is of a group's gradients, all ranks together; ends the exchange before it."""
        self.settle()
        self._complete.discard(index)
        self._arrived[index].clear()
        group, manager = self._groups[index], self._manager
        assert group.grad is not None
        assert self._parts is not None
        whole = [grad.ref.tensors[0] for grad in _gradients(group)]
        manager.next_moment((*whole, self._parts_tensor))
        for grad in _gradients(group):
            if not grad.is_local:
                grad.view.zero_()
        numel = group.grad.spec.numel
        parts = self._parts.tensor[:numel]
        self._under_way = index, self._peers.scatter_all(group.grad.tensor, parts)

    def wait(self) -> None:
        """Wait for the exchange under way, if there is one; what it brought is void."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way[1].wait()

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for the exchange under way, if there is one, and add its mean to the shard."""
        if self._under_way is None:
            return
        index = self._under_way[0]
        self.wait()
        group, manager, size = self._groups[index], self._manager, self._peers.share.size
        total = self._add_parts(group)
        whole = [grad.ref.tensors[0] for grad in _gradients(group)]
        manager.chunks.release(whole, dirty=True)
        for grad in _gradients(group):
            grad.give_up_whole()
        shard = group.shard
        assert shard is not None
        assert shard.grad is not None
        own = [grad.update_tensor for grad in _gradients(group)]
        manager.run_due(own)  # of the step before: it reads the shard
        manager.next_moment(own)
        if any(grad.is_shared for grad in _gradients(group)):
            for grad in _gradients(group):
                if not grad.is_shared:  # what was given up since is not zero by itself
                    grad.value.zero_()
            shard.grad.tensor.add_(total.mul_(1.0 / size))
        else:
            torch.mul(total, 1.0 / size, out=shard.grad.tensor)
        manager.chunks.release(own, dirty=True)
        for grad in _gradients(group):
            grad.is_shared = True
        manager.chunks.release((self._parts_tensor,), dirty=False)
        manager.chunks.free((self._parts_tensor,))

    def _add_parts(self, group: ChunkGroup) -> torch.Tensor:
        """Return this rank's part of a whole gradient plus those that have arrived, added in the order of the
        ranks."""
        assert group.grad is not None
        assert self._parts is not None
        share, numel = self._peers.share, group.grad.spec.numel
        start, stop = share.range_of(numel)
        places = list(self._parts.tensor[:numel].view(share.size, -1).unbind(0))
        total = places[share.rank]  # nothing has arrived there
        terms = [*places[: share.rank], group.grad.tensor[start:stop], *places[share.rank + 1 :]]
        torch.add(terms[0], terms[1], out=total)
        for term in terms[2:]:
            total.add_(term)
        return total

    def finish(self) -> None:
        """Exchange what is left; then a gradient is there on all ranks if it was on one."""
        self.settle()
        left = [i for i, group in enumerate(self._groups) if any(g.is_local for g in _gradients(group))]
        words = to_bits(left, len(self._groups))
        said = self._peers.exchange([*words, *to_bits(sorted(self._had), len(self._gradients))])
        for index in _union(message[: len(words)] for message in said):
            self.exchange(index)
        self.settle()
        self._complete.clear()
        had = set(_union(message[len(words) :] for message in said))
        for place, grad in enumerate(self._gradients):
            if place not in had and grad.exists:
                grad.give_up_shard()

    def forget(self, *, keep: bool) -> None:
        """The gradients are about to be given up, or, to ``keep`` them, filled with zeros."""
        self.settle()
        if not keep:
            self._had.clear()
        self._complete.clear()
        for arrived in self._arrived:
            arrived.clear()

    def settle_group(self, index: int) -> None:
        """Do as :meth:`settle` if the exchange under way is that of a group."""
        if self._under_way is not None and self._under_way[0] == index:
            self.settle()

    def note_presence(self, place: int, *, present: bool) -> None:
        """A gradient is there, or none any more."""
        if present:
            self._had.add(place)
        else:
            self._had.discard(place)

    def note_arrival(self, index: int, place: int) -> None:
        """Backward has made a gradient of a group."""
        self._had.add(place)
        if self.is_held:
            return
        arrived = self._arrived[index]
        arrived.add(place)
        if len(arrived) == len(_gradients(self._groups[index])):
            self._complete.add(index)
            self._enter_round()


class _Events:
    """Tells the exchange what happens to one gradient of a group."""

    __slots__ = ("_exchange", "_index", "_place")

    def __init__(self, exchange: GradientExchange, index: int, place: int) -> None:
        self._exchange = exchange
        self._index = index
        self._place = place

    def arrived(self) -> None:
        self._exchange.note_arrival(self._index, self._place)

    def assigned(self) -> None:
        self._exchange.note_presence(self._place, present=True)

    def given_up(self) -> None:
        self._exchange.note_presence(self._place, present=False)

    def settle(self) -> None:
        self._exchange.settle_group(self._index)


def _gradients(group: ChunkGroup) -> list[ShardedGradient]:
    return [slot.grad for slot in group.slots if isinstance(slot.grad, ShardedGradient)]


def _union(sets: Iterable[Sequence[int]]) -> list[int]:
    """Return the numbers that are in any of some sets of bits, ascending."""
    return sorted({number for words in sets for number in from_bits(words)})
