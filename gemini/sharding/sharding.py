"""Sharding (ZeRO-3) of one model: gathers chunks for operators and exchanges gradients, in rounds of all
ranks.

See docs/notes/zero.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from weakref import WeakMethod

import torch

from gemini.chunk.chunk import TensorIds
from gemini.comm.peers import OwnExperts, Peers, Topic
from gemini.errors import ConfigError, StateError
from gemini.runtime.gate.gate import Gate
from gemini.runtime.storage.gradient import ShardedGradient, SlotGradient
from gemini.runtime.storage.model_storage import ChunkGroup, ModelStorage
from gemini.sharding.gathered_chunks import GatheredChunks
from gemini.sharding.gradient_exchange import GradientExchange
from gemini.sharding.owners import OwnersOfGroups
from gemini.sharding.rounds import (
    WANTS,
    Ending,
    Follow,
    Joining,
    Round,
    count_present,
    decode,
    encode,
    refuse_difference,
)
from gemini.system.process import shown_as


class Sharding:
    """Gathers the chunks that operators need, prefetches the predicted next ones, and exchanges complete
    gradients."""

    def __init__(
        self,
        gate: Gate,
        storage: ModelStorage,
        peers: Peers,
        gather_bytes: int,
        *,
        reduce_dtype: torch.dtype | None = None,
        strict: bool = False,
        experts: OwnExperts | None = None,
    ) -> None:
        """``gather_bytes``: DEVICE bytes for whole parameter chunks, unless one operator needs more.
        ``reduce_dtype``: the dtype in which gradients are sent; None: fp32. ``strict``: ranks must run the
        same operators. ``experts``: this rank's part of divided experts."""
        self.peers = peers
        self._gate = gate
        self._owners = OwnersOfGroups(peers, experts)
        self._chunks = GatheredChunks(gate, storage, self._owners, gather_bytes)
        self._gradients = GradientExchange(
            gate, storage, peers, self._owners, self._round_for_gradients, reduce_dtype
        )
        self.gather_bytes = gather_bytes
        self._num_groups = len(storage.groups)
        self._current: tuple[int, ...] = ()
        self._in_round = False
        self._abandoned = False
        self._strict = strict
        self._joining: Joining | None = None
        self._passes_ended = False  # this rank knows that the passes of all ranks have ended
        self.follower: WeakMethod[Follow] | None = None  # a method of the optimizer

    def __del__(self) -> None:
        # A model may be dropped without close(); its memory is freed right after this.
        with suppress(RuntimeError, AttributeError):
            self.abandon_transfers()

    def follow_with(self, follow: Follow) -> None:
        """Register ``follow``, a method of the optimizer that repeats the calls of the ranks that have
        batches left."""
        self.follower = WeakMethod(follow)

    # -- operators -------------------------------------------------------------------------------

    def gather(self, tensors: TensorIds) -> None:
        """Make the parameters among ``tensors`` whole on DEVICE, and start to gather the predicted next
        chunk."""
        used = self._chunks.used_by(tensors)
        if not used or used == self._current:
            return
        self._current = ()
        for chunk in used:
            self._chunks.order.note(chunk)
        missing = [chunk for chunk in used if not self._chunks[chunk].is_open]
        missing = [chunk for chunk in missing if not self._chunks.open_fresh(chunk, used)]
        missing = [chunk for chunk in missing if not self._chunks.open_alone(chunk, (*used, *missing))]
        while len(missing) > WANTS:
            self._round(missing[:WANTS], used)
            del missing[:WANTS]
        ahead = self._chunks.next_missing((*used, *missing)) if len(missing) < WANTS else None
        if missing or ahead is not None:
            self._round([*missing, *([ahead] if ahead is not None else [])], used)
        for chunk in used:
            self._chunks[chunk].wait()
        self._current = used

    def note_written(self, tensors: TensorIds) -> None:
        """Note that an operator wrote to the parameters among ``tensors``."""
        for chunk in self._chunks.used_by(tensors):
            self._chunks[chunk].note_written()

    def write_all_back(self) -> None:
        """Copy values written to whole chunks to their shards."""
        self._chunks.write_back()

    def close(self, tensor: int) -> None:
        """Close the chunk of parameter ``tensor``, on this rank only, because its shard is about to
        change."""
        self._current = ()
        for chunk in self._chunks.used_by((tensor,)):
            if self._chunks[chunk].is_open:
                self._chunks[chunk].close()

    def write_back(self, tensor: int) -> None:
        """Copy values written to the whole chunk of parameter ``tensor`` to its shard."""
        for chunk in self._chunks.used_by((tensor,)):
            self._chunks[chunk].write_back()

    def add_gradient(self, storage: ModelStorage, grad: SlotGradient) -> None:
        """Include ``grad``, of a parameter that was unfrozen, in exchanges. Collective."""
        self._gradients.add(storage, grad)

    def widen(self, storage: ModelStorage, gather_bytes: int) -> None:
        """Add the new groups of ``storage``, and set the bytes for whole chunks to ``gather_bytes``.
        Collective."""
        self.settle_transfers()
        self.close_all()
        self._chunks.widen(storage, gather_bytes)
        self._chunks.restart(forget=True)
        self._gradients.widen(storage)
        self.gather_bytes = gather_bytes
        self._num_groups = len(storage.groups)

    # -- values --------------------------------------------------------------------------------

    def agree_on(self, values: torch.Tensor, group: ChunkGroup | None = None) -> None:
        """Broadcast ``values``, in place, from the first owner of ``group``; None: from the first of all
        ranks."""
        peers = self.peers if group is None else self._owners.of(group).peers
        if values.is_contiguous():
            peers.broadcast(values)
            return
        contiguous = values.contiguous()
        peers.broadcast(contiguous)
        values.copy_(contiguous)

    def agreed(self, values: torch.Tensor, group: ChunkGroup) -> torch.Tensor:
        """Return ``values`` of the first rank that owns ``group``; on the others in new memory, so that a
        mapped file is neither read nor copied there."""
        found = values if self._owners.of(group).peers.share.place == 0 else torch.empty_like(values)
        self.agree_on(found, group)
        return found

    def assemble(self, flat: torch.Tensor, group: ChunkGroup) -> None:
        """Make values whole, bit for bit: each owner of ``group`` has filled its part, and the rest is zeros.
        Collective over the owners."""
        # Sum as integers: -0.0 + 0.0 would lose its sign. Communication libraries have no 16-bit integers.
        peers = self._owners.of(group).peers
        peers.sum(flat.view(torch.int32 if flat.dtype.itemsize >= 4 else torch.uint8))

    @property
    def divides_experts(self) -> bool:
        """Whether ranks have different experts, so that no rank can have the whole model."""
        return self._owners.divide_experts

    # -- the step --------------------------------------------------------------------------------

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Context of an evaluation: follow its order."""
        self.begin(training=False)
        yield
        self.end()

    def begin(self, *, training: bool) -> None:
        """Begin a step or an evaluation."""
        self._current = ()
        self._chunks.begin(training=training)

    def end(self) -> None:
        """End a step or evaluation; its order is the prediction for the next one of its kind."""
        self._current = ()
        self._chunks.end()

    def close_all(self) -> None:
        """Close every whole parameter chunk, because the shards are about to change."""
        self._current = ()
        self._gate.backward_pins.settle()  # the last node's pin, if no gradient has ended it
        self._chunks.close_all()

    def settle_transfers(self) -> None:
        """Wait for all running transfers, and use their results."""
        self._chunks.wait()
        self._gradients.settle()

    def abandon_transfers(self) -> None:
        """Wait for all running transfers, because their memory is about to be freed."""
        self._abandoned = True
        try:
            self._gradients.wait()
        finally:
            self._chunks.wait()

    def repin(self) -> None:
        """Pin open chunks again after everything was unpinned."""
        self._current = ()
        self._chunks.repin()

    @contextmanager
    def local_gradients(self) -> Iterator[None]:
        """Let gradients accumulate whole within the block, without an exchange."""
        with self._gradients.held():
            yield

    def keep_gradient(self, grad: SlotGradient) -> None:
        """Let ``grad`` accumulate whole on each rank until :meth:`finish_gradients`."""
        assert isinstance(grad, ShardedGradient)
        self._gradients.keep(grad)

    def finish_gradients(
        self,
        doing: str = "",
        call: str = "",
        add_up: Callable[[], None] | None = None,
        loss: float | None = None,
    ) -> float | None:
        """Exchange the remaining gradients, after the passes of every rank have ended; return the mean of the
        losses of the ranks that pass one. Collective. ``call``: describes the call for ranks without batches,
        which repeat it. ``add_up``: adds to gradients before they are exchanged.

        Raises:
            StateError: on all ranks: their purposes ``doing`` differ. Nothing was exchanged.
        """
        if not self._passes_ended:
            said = self._end_passes(Ending.COMPLETE)
            if said is not None and said.joined:
                self.peers.say(call)
        self._passes_ended = False
        if add_up is not None:
            add_up()
        return self._gradients.finish(doing, loss)

    def discard_passes(self) -> None:
        """Wait until the forward and backward passes of every rank have ended, however they ended, and
        restart in the same state on all. Collective."""
        last = self._end_passes(Ending.DISCARDED)
        if last is not None:
            self._chunks.restart(forget=not last.same_predictions)

    def forget_gradients(self, *, keep: bool = False) -> None:
        """Called before the gradients are discarded, or with ``keep`` filled with zeros."""
        self._gradients.forget(keep=keep)

    @contextmanager
    def join(self, joining: Joining) -> Iterator[None]:
        """Context in which ranks may end one after another; a rank that ends calls :meth:`serve` at the end
        of the block."""
        joining.refuse(self.peers.share)
        if self.divides_experts:
            raise ConfigError(
                "join() does not go with experts that ranks divide (ep_size): a rank without batches would "
                "not take part in the exchange of tokens; end the loop on all ranks after the smallest "
                "number of batches"
            )
        before, self._joining = self._joining, joining
        try:
            yield
        finally:
            self._joining = before
            self._gradients.divide_by(self.peers.share.size)

    def serve(self, discard_gradients: Callable[[], None]) -> None:
        """Take part in the rounds of the ranks that have batches left, until none has: gather and exchange
        with them, repeat their calls with gradients, and call ``discard_gradients`` when they
        discard theirs."""
        while (said := self._end_passes(Ending.JOINED)) is not None:
            is_over = len(said.joined) == self.peers.share.world
            if is_over or said.discarded:
                self._chunks.restart(forget=not said.same_predictions)
            if is_over:
                return
            if said.discarded:
                discard_gradients()
                continue
            calls = [call for rank, call in enumerate(self.peers.say("")) if rank not in said.joined]
            follow = self.follower() if self.follower is not None else None
            if follow is None:
                raise StateError(
                    "other ranks use their gradients (step, clipping), and there is no optimizer on this one "
                    "to do so with them; keep it until join() has ended"
                )
            self._passes_ended = True
            follow(calls[0])

    # -- rounds ----------------------------------------------------------------------------------

    def _round_for_gradients(self) -> None:
        if not self._in_round:
            self._round((), self._current)

    def _end_passes(self, ending: Ending) -> Round | None:
        """Take part in rounds until the passes of all ranks have ended; return the last round, None if the
        model was closed."""
        if self._abandoned:
            return None
        self._current = ()  # a round may close the current chunks
        while not (said := self._round((), (), ending)).all_done:
            pass
        return said

    @shown_as("exchange")
    def _round(self, wants: Sequence[int], in_use: Iterable[int], ending: Ending = Ending.NONE) -> Round:
        """Run one round: state what this rank wants and has; perform the requests of all ranks."""
        self._in_round = True
        try:
            self._chunks.make_room(wants, in_use)
            complete = self._gradients.complete()
            step, prediction_digest = self._gate.step, self._chunks.prediction_digest
            message = encode(
                wants,
                complete,
                self._num_groups,
                step=step,
                prediction_digest=prediction_digest,
                ending=ending,
                joining=self._joining.said if self._joining is not None else 0,
            )
            messages = self.peers.exchange(Topic.ROUND, message)
            if self._strict:
                refuse_difference(messages)
            said = decode(messages)
            self._gradients.divide_by(count_present(self._joining, said, self.peers.share))
            for chunk, askers in said.gathers(self.peers.share.members, self._chunks.owners):
                self._chunks.gather(chunk, askers)
            for group in said.complete:
                self._gradients.exchange(group)
        finally:
            self._in_round = False
        return said
