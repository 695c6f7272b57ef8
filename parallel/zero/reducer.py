"""GradientReducer: collects gradients from backward and sends each rank the mean of its part."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from gemini.comm.peers import Peers
from gemini.errors import ConfigError, StateError
from gemini.parallel.zero.params import Bucket, ParamShard, make_buckets, raw_grad, unwatch, watch
from gemini.parallel.zero.replica_collectives import Collectives, Flight

# Messages in flight in stage 2: more would take the memory that stage 2 saves.
MAX_FLIGHTS = 2
_ONE, _SEVERAL = 1, 2


class GradientReducer:
    """Take each gradient as autograd finishes it, and give every rank the mean of its part.

    A *reduction* sends buckets in a fixed order, independent of the order in which gradients arrive, so ranks
    agree without communication. At its end they exchange whether each parameter has a gradient on any rank,
    and whether a bucket must be sent again.

    Args:
        bucket_numel: elements of a bucket.
        wire_dtype: the dtype in which gradients are sent; ``None``: their own, and fp32 sums after
            accumulation.
        overlap: send a bucket as soon as it is complete, during backward.
        partition: free the memory of a bucket after it is sent (stage 2).
        scaled: refuse a gradient that did not come from :meth:`backward`: its loss was not scaled.
    """

    def __init__(
        self,
        shards: Sequence[ParamShard],
        collectives: Collectives,
        *,
        bucket_numel: int,
        wire_dtype: torch.dtype | None,
        overlap: bool,
        partition: bool,
        scaled: bool,
    ) -> None:
        self.shards = [shard for shard in shards if shard.numel]
        self.buckets = make_buckets(self.shards, bucket_numel)
        self.used: set[ParamShard] = set()
        self.num_arrivals = 0
        self._collectives = collectives
        self._wire_dtype = wire_dtype
        self._overlap = overlap
        self._partition = partition
        self._scaled = scaled
        self._in_backward = False
        self._bucket_of = {shard: bucket for bucket in self.buckets for shard in bucket.shards}
        # No bucket waits for parameters that are frozen at the start.
        self._eager = [bucket for bucket in self.buckets if bucket.shards[0].param.requires_grad]
        self._flights: deque[tuple[Bucket, torch.Tensor, Flight]] = deque()
        self._local: set[ParamShard] = set()
        self._syncing = True
        self._start_over()
        hooks = [self._hook(number) for number in range(len(self.shards))]
        self._let_go = weakref.finalize(self, _let_go, hooks, [weakref.ref(s.param) for s in self.shards])
        self._let_go.atexit = False

    # -- backward --------------------------------------------------------------------------------

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Run a backward pass inside the block. At the end reduce all its gradients, unless inside
        :meth:`no_sync`.
        """
        self._in_backward = True
        try:
            self._eager_open = self._overlap and self._syncing
            yield
            if self._syncing:
                self.reduce()
        finally:
            self._in_backward = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients that arrive inside as local fp32 sums; the next reduction sends them."""
        before, self._syncing, self._wide = self._syncing, False, True
        try:
            yield
        finally:
            self._syncing = before

    def _arrive(self, shard: ParamShard) -> None:
        grad = raw_grad(shard.param)
        if grad is None:
            return
        if self._scaled and not self._in_backward:
            raise StateError(
                "a gradient under fp16 did not come from optimizer.backward(loss), so its loss was not "
                "scaled; call optimizer.backward(loss) instead of loss.backward()"
            )
        if grad.layout != torch.strided:
            raise ConfigError(
                f"the gradient of {shard.label} is {grad.layout}, but ZeRO cuts only dense gradients; make "
                "it dense (sparse=False)"
            )
        shard.param.grad = None
        self._several |= shard in self._local
        self._local.add(shard)
        self.num_arrivals += 1
        self._bucket_of[shard].put(shard, grad, wide=self._wide)
        if self._eager_open:
            self._arrived.add(shard)
            self._send_complete()

    def _send_complete(self) -> None:
        """Send complete buckets in order; stop at the first incomplete one."""
        while self._next < len(self._eager) and self._arrived.issuperset(self._eager[self._next].shards):
            self._send(self._eager[self._next])
            self._next += 1

    # -- reduction -------------------------------------------------------------------------------

    def reduce_rest(self) -> None:
        """Reduce gradients from outside :meth:`backward` or inside :meth:`no_sync`, if any rank has some."""
        self._take_strays()
        pending = _SEVERAL if self._several else _ONE if self._local else 0
        most = self._collectives.maximum([pending], "completes gradients (clipping, step)")[0]
        self._wide |= most == _SEVERAL
        if most:
            self.reduce()

    def reduce(self) -> None:
        """Send all local gradients and wait until this rank's part of the mean is complete."""
        self._take_strays()
        if self._eager_open:
            for bucket in self._eager[self._next :]:
                self._send(bucket)
        used = self.used | self._local
        flags = [int(shard in used) for shard in self.shards]
        flags += [int(bucket.has_local) for bucket in self.buckets]
        agreed = self._collectives.maximum(flags, "reduces gradients (backward, step)")
        self.used = {shard for shard, flag in zip(self.shards, agreed, strict=False) if flag}
        for bucket, flag in zip(self.buckets, agreed[len(self.shards) :], strict=True):
            if flag:
                self._send(bucket)
        while self._flights:
            self._land()
        self._start_over()

    def add_up(self, shard: ParamShard, ranks: Peers) -> None:
        """Replace the mean gradient of ``shard`` by the sum over ``ranks``, which have copies of it, if any
        has a gradient. Call it after a reduction; collective over ``ranks``.
        """
        bucket = self._bucket_of[shard]
        own = bucket.own_mean(shard) if shard in self.used else None
        total = torch.zeros(shard.own_numel + 1, dtype=shard.master_dtype, device="cpu")
        total[-1] = int(shard in self.used)
        if own is not None:
            total[:-1].copy_(own)
        ranks.sum(total)
        if total[-1] > 0:
            self.used.add(shard)
            bucket.set_mean(shard, total[:-1])

    def _take_strays(self) -> None:
        """Collect gradients that no hook has seen: set by hand, or older than this object."""
        for shard in self.shards:
            if raw_grad(shard.param) is not None:
                self._arrive(shard)

    def _send(self, bucket: Bucket) -> None:
        if len(self._flights) >= MAX_FLIGHTS:  # each holds what it receives
            self._land()
        first = bucket.shards[0]
        dtype = self._wire_dtype or (first.master_dtype if self._wide else bucket.dtype)
        message = bucket.take_message(dtype, first.param.device)
        self._flights.append((bucket, message, bucket.ranks.exchange(message)))

    def _land(self) -> None:
        bucket, message, flight = self._flights.popleft()
        bucket.absorb(flight.wait())
        if not self._partition and bucket.ranks.size > 1:
            bucket.keep_buffer(message)

    def _start_over(self) -> None:
        self._wide = False
        self._several = False
        self._eager_open = False
        self._next = 0
        self._arrived: set[ParamShard] = set()
        self._local.clear()

    # -- end -------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Discard all gradients, reduced or not."""
        while self._flights:
            self._flights.popleft()[2].wait()
        for bucket in self.buckets:
            bucket.forget()
        for shard in self.shards:
            shard.param.grad = None
        self.used = set()
        self._start_over()

    def close(self) -> None:
        """Remove the hooks from the parameters; also done when this object is destroyed. Idempotent."""
        self._let_go()

    def holds(self, shard: ParamShard) -> bool:
        """Return whether a gradient has arrived on this rank or, after a reduction, on any rank."""
        return shard in self._local or shard in self.used

    def _hook(self, number: int) -> Any:
        param, reducer = self.shards[number].param, weakref.ref(self)
        trained = param.requires_grad
        param.requires_grad_(True)  # a frozen parameter may be unfrozen later
        hook = param.register_post_accumulate_grad_hook(partial(_tell, reducer, number))
        param.requires_grad_(trained)
        watch(param, partial(_held_name, reducer, number))
        return hook


# Weak, and by number: the parameter refers to these, so they must not keep it alive.
def _tell(reducer: weakref.ref[GradientReducer], number: int, _param: torch.Tensor) -> None:
    alive = reducer()
    if alive is not None:
        alive._arrive(alive.shards[number])


def _held_name(reducer: weakref.ref[GradientReducer], number: int) -> str:
    alive = reducer()
    shard = None if alive is None else alive.shards[number]
    return shard.label if alive is not None and shard is not None and alive.holds(shard) else ""


def _let_go(hooks: list[Any], params: list[weakref.ref[torch.Tensor]]) -> None:
    """Remove the hooks and restore the parameters' classes."""
    for hook in hooks:
        hook.remove()
    for alive in params:
        param = alive()
        if param is not None:
            unwatch(param)
