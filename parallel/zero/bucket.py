"""Parameters whose gradients and values travel together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol, TypeGuard

import torch

from gemini.parallel.zero.shards import ParamShard


class Ranks(Protocol):
    """How many ranks there are, and in how many parts they have what is cut."""

    size: int
    num_parts: int


class Bucket:
    """What this rank has of the gradients of some parameters: local ones, and its part of the mean.

    Local gradients lie in ``rows`` of (parts, width): row i is what part i needs. The mean is one tensor of
    (width), in the masters' type and where they live.
    """

    def __init__(self, shards: Sequence[ParamShard], ranks: Ranks) -> None:
        self.shards = list(shards)
        self.dtype = shards[0].param.dtype
        self.width = sum(shard.width for shard in shards)
        self.mean: torch.Tensor | None = None
        self._num_parts, self._num_ranks = ranks.num_parts, ranks.size
        ends = accumulate(shard.width for shard in shards)
        self._starts = {shard: end - shard.width for shard, end in zip(shards, ends, strict=True)}
        self._rows: torch.Tensor | None = None
        self._spare: torch.Tensor | None = None
        self._filled: set[ParamShard] = set()

    @property
    def has_local(self) -> bool:
        """Say whether a local gradient waits to be sent."""
        return bool(self._filled)

    def local_bytes(self) -> int:
        """Return the bytes of local gradients, buffers kept for the next step included."""
        return sum(rows.nbytes for rows in (self._rows, self._spare) if rows is not None)

    def put(self, shard: ParamShard, grad: torch.Tensor, *, wide: bool) -> None:
        """Add a local gradient; in the masters' type if ``wide`` or if the parameter has one already."""
        if self._rows is None:
            self._rows = self._buffer(shard.master_dtype if wide else self.dtype, shard.param.device)
        if wide or shard in self._filled:
            self._rows = self._rows.to(shard.master_dtype)
        rows = self._part(self._rows, shard)
        if shard in self._filled:
            shard.add_rows(rows, grad)
        else:
            shard.put_rows(rows, grad)
            self._filled.add(shard)

    def take_message(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the local gradients as ``dtype``, zero where there are none; they are given up here."""
        rows = self._rows if self._rows is not None else self._buffer(self.dtype, device)
        for shard in self.shards:
            if shard not in self._filled:
                self._part(rows, shard).zero_()
        self._rows = None
        self._filled.clear()
        return rows.to(dtype)

    def keep_buffer(self, rows: torch.Tensor) -> None:
        """Use the memory of a message that has been sent for the next one."""
        self._spare = rows

    def absorb(self, received: torch.Tensor) -> None:
        """Add the mean over the ranks, whose sum the rows have, to this rank's mean: in the order of the
        ranks."""
        first = self.shards[0]
        if self._num_ranks == 1:
            mean = received[0].to(first.master_dtype)
        else:
            mean = received[0].to(first.master_dtype, copy=True)
            for row in received[1:]:
                mean.add_(row)
            mean.div_(self._num_ranks)
        mean = mean.to(first.home)
        self.mean = mean if self.mean is None else self.mean.add_(mean)

    def own_mean(self, shard: ParamShard) -> torch.Tensor | None:
        """Return the mean gradient of a parameter's own part, a view; None where that is empty."""
        if self.mean is None or shard.master is None:
            return None
        start = self._starts[shard]
        return self.mean[start : start + shard.stop - shard.start]

    def set_mean(self, shard: ParamShard, values: torch.Tensor) -> None:
        """Replace the mean gradient of a parameter's own part."""
        if self.mean is None:
            self.mean = torch.zeros(self.width, dtype=shard.master_dtype, device=shard.home)
        own = self.own_mean(shard)
        if own is not None:
            own.copy_(values)

    def own_values(self) -> torch.Tensor:
        """Return the masters of the own parts (width), as the parameters' type, where the parameters are."""
        values = torch.empty(self.width, dtype=self.dtype, device=self.shards[0].param.device)
        for shard in self.shards:
            start = self._starts[shard]
            shard.fill_own(values[start : start + shard.width])
        return values

    def write_params(self, rows: torch.Tensor) -> None:
        """Set the parameters from all ranks' own values (parts, width)."""
        for shard in self.shards:
            shard.write_param(self._part(rows, shard))

    def forget(self) -> None:
        """Give up local gradients and the mean."""
        self.mean = None
        self._rows = None
        self._filled.clear()

    def _part(self, rows: torch.Tensor, shard: ParamShard) -> torch.Tensor:
        start = self._starts[shard]
        return rows[:, start : start + shard.width]

    def _buffer(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        spare, self._spare = self._spare, None
        if _fits(spare, dtype):
            return spare
        return torch.empty(self._num_parts, self.width, dtype=dtype, device=device)


def make_buckets(shards: Sequence[ParamShard], ranks: Ranks, bucket_numel: int) -> list[Bucket]:
    """Return buckets of at most ``bucket_numel`` elements (or one parameter), last parameters first.

    Backward reaches the last ones first. Parameters that are frozen now get buckets of their own, so that
    nobody waits for them.
    """
    kinds: dict[object, list[ParamShard]] = {}
    for shard in reversed(shards):
        if shard.numel:
            param = shard.param
            key = (param.requires_grad, param.dtype, param.device, shard.master_dtype)
            kinds.setdefault(key, []).append(shard)
    buckets = []
    for members in kinds.values():
        first, numel = 0, 0
        for index, shard in enumerate(members):
            if index > first and numel + shard.numel > bucket_numel:
                buckets.append(Bucket(members[first:index], ranks))
                first, numel = index, 0
            numel += shard.numel
        buckets.append(Bucket(members[first:], ranks))
    return buckets


def _fits(spare: torch.Tensor | None, dtype: torch.dtype) -> TypeGuard[torch.Tensor]:
    return spare is not None and spare.dtype == dtype
