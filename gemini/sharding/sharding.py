"""Sharding: chunks cut among ranks, whole on DEVICE while they are used. See docs/notes/zero.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from weakref import WeakMethod

import torch

from gemini.chunk import TensorIds
from gemini.comm.peers import OwnExperts, Peers, Topic
from gemini.errors import ConfigError, StateError
from gemini.runtime.gate.gate import Gate
from gemini.runtime.storage.gradient import ShardedGradient, SlotGradient
from gemini.runtime.storage.model_storage import ChunkGroup, ModelStorage
from gemini.sharding.gathered import GatheredChunks
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
    """Gathers what operators need, foretells what they need next, and exchanges complete gradients."""

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
        """``gather_bytes``: what whole parameter chunks may take on DEVICE, where an operator does not need
        more at once. ``reduce_dtype``: what gradients travel in, None: fp32. ``strict``: ranks must not
        differ. ``experts``: those that this rank has of divided ones."""
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
        self._is_told = False  # of a call with gradients: the passes of all ranks have ended for it
        self.follower: WeakMethod[Follow] | None = None  # the optimizer's

    def __del__(self) -> None:
        # A model that is dropped without close(): its memory goes right after this.
        with suppress(RuntimeError, AttributeError):
            self.abandon_transfers()

    def follow_with(self, follow: Follow) -> None:
        """Have ``follow``, a method of the optimizer, make the calls of the ranks that have batches left."""
        self.follower = WeakMethod(follow)

    # -- operators -------------------------------------------------------------------------------

    def gather(self, tensors: TensorIds) -> None:
        """See to it that the parameters among ``tensors`` are there, whole; start what comes next."""
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
        """The parameters among ``tensors`` were written by an operator."""
        for chunk in self._chunks.used_by(tensors):
            self._chunks[chunk].note_written()

    def write_all_back(self) -> None:
        """Bring everything that was written to whole chunks to the shards."""
        self._chunks.write_back()

    def close(self, tensor: int) -> None:
        """Give up the whole chunk that parameter ``tensor`` lies in, for which nobody else need do anything:
        its shard is about to change."""
        self._current = ()
        for chunk in self._chunks.used_by((tensor,)):
            if self._chunks[chunk].is_open:
                self._chunks[chunk].close()

    def write_back(self, tensor: int) -> None:
        """Bring what was written to the whole chunk that parameter ``tensor`` lies in to its shard."""
        for chunk in self._chunks.used_by((tensor,)):
            self._chunks[chunk].write_back()

    def add_gradient(self, storage: ModelStorage, grad: SlotGradient) -> None:
        """Exchange ``grad``, of a parameter that was unfrozen, as the others; all ranks together."""
        self._gradients.add(storage, grad)

    def widen(self, storage: ModelStorage, gather_bytes: int) -> None:
        """Take in the groups of ``storage`` that are new, with ``gather_bytes`` for what is whole; all ranks
        together."""
        self.settle_transfers()
        self.close_all()
        self._chunks.widen(storage, gather_bytes)
        self._chunks.restart(forget=True)
        self._gradients.widen(storage)
        self.gather_bytes = gather_bytes
        self._num_groups = len(storage.groups)

    # -- values --------------------------------------------------------------------------------

    def agree_on(self, values: torch.Tensor, group: ChunkGroup | None = None) -> None:
        """Give ``values``, in place, those of the first rank that owns ``group``; None: of the first of
        all."""
        peers = self.peers if group is None else self._owners.of(group).peers
        if values.is_contiguous():
            peers.broadcast(values)
            return
        contiguous = values.contiguous()
        peers.broadcast(contiguous)
        values.copy_(contiguous)

    def assemble(self, flat: torch.Tensor, group: ChunkGroup) -> None:
        """Make values whole of which every owner of ``group`` has given its part, zeros elsewhere; bit for
        bit."""
        # As integers: -0.0 + 0.0 would lose its sign. Of two bytes communication libraries know none.
        peers = self._owners.of(group).peers
        peers.sum(flat.view(torch.int32 if flat.dtype.itemsize >= 4 else torch.uint8))

    @property
    def divides_experts(self) -> bool:
        """Whether ranks have different experts, so that no rank can have the whole model."""
        return self._owners.divide_experts

    # -- the step --------------------------------------------------------------------------------

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Foresee an evaluation within the block."""
        self.begin(training=False)
        yield
        self.end()

    def begin(self, *, training: bool) -> None:
        """Start a step, or an evaluation."""
        self._current = ()
        self._chunks.begin(training=training)

    def end(self) -> None:
        """End a step or evaluation: the next one of its kind is foretold to be like it."""
        self._current = ()
        self._chunks.end()

    def close_all(self) -> None:
        """Give up every whole parameter chunk: the shards are about to change."""
        self._current = ()
        self._gate.backward_pins.settle()  # of the node that ran last, where no gradient has settled it
        self._chunks.close_all()

    def settle_transfers(self) -> None:
        """Wait for what is under way."""
        self._chunks.wait()
        self._gradients.settle()

    def abandon_transfers(self) -> None:
        """Wait for what is under way, because its memory is about to go."""
        self._abandoned = True
        try:
            self._gradients.wait()
        finally:
            self._chunks.wait()

    def repin(self) -> None:
        """Pin again what is whole, after everything was unpinned."""
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
        """Exchange what is left of all gradients, when every rank has come here; return the mean of the
        losses of the ranks that give one. ``call``: what ranks that have no batches left are to do;
        ``add_up``: what comes to gradients before they are exchanged.

        Raises:
            StateError: on all ranks: they are not ``doing`` the same with them. Nothing was exchanged.
        """
        if not self._is_told:
            said = self._end_passes(Ending.COMPLETE)
            if said is not None and said.joined:
                self.peers.say(call)
        self._is_told = False
        if add_up is not None:
            add_up()
        return self._gradients.finish(doing, loss)

    def give_up_passes(self) -> None:
        """Wait until every rank has come here, however its forward and backward passes have ended, and make
        all alike."""
        last = self._end_passes(Ending.GIVEN_UP)
        if last is not None:
            self._chunks.restart(forget=not last.alike)

    def forget_gradients(self, *, keep: bool = False) -> None:
        """The gradients are about to be given up, or, to ``keep`` them, filled with zeros."""
        self._gradients.forget(keep=keep)

    @contextmanager
    def join(self, joining: Joining) -> Iterator[None]:
        """Let ranks leave the block one after another: :meth:`serve` is its end."""
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

    def serve(self, give_up: Callable[[], None]) -> None:
        """Do what the ranks do that have batches left, until none has: gather and exchange with them, follow
        the calls in which they use gradients, or ``give_up`` as they do."""
        while (said := self._end_passes(Ending.JOINED)) is not None:
            is_over = len(said.joined) == self.peers.share.world
            if is_over or said.given_up:
                self._chunks.restart(forget=not said.alike)
            if is_over:
                return
            if said.given_up:
                give_up()
                continue
            calls = [call for rank, call in enumerate(self.peers.say("")) if rank not in said.joined]
            follow = self.follower() if self.follower is not None else None
            if follow is None:
                raise StateError(
                    "other ranks use their gradients (step, clipping), and there is no optimizer on this one "
                    "to do so with them; keep it until join() has ended"
                )
            self._is_told = True
            follow(calls[0])

    # -- rounds ----------------------------------------------------------------------------------

    def _round_for_gradients(self) -> None:
        if not self._in_round:
            self._round((), self._current)

    def _end_passes(self, ending: Ending) -> Round | None:
        """Serve ranks whose passes are not over, until all are here; return the last round, None on a model
        that was closed."""
        if self._abandoned:
            return None
        self._current = ()  # a round may close it
        while not (said := self._round((), (), ending)).all_done:
            pass
        return said

    @shown_as("exchange")
    def _round(self, wants: Sequence[int], in_use: Iterable[int], ending: Ending = Ending.NONE) -> Round:
        """Say what this rank wants and has; carry out what all of them said."""
        self._in_round = True
        try:
            self._chunks.make_room(wants, in_use)
            complete = self._gradients.complete()
            step, foretold = self._gate.step, self._chunks.foretold
            message = encode(
                wants,
                complete,
                self._num_groups,
                step=step,
                foretold=foretold,
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
