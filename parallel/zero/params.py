"""The parameters of an optimizer, cut over ranks."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from gemini.errors import ConfigError, StateError
from gemini.optim.wrapped import hooks_set_aside
from gemini.parallel.zero.bucket import Bucket
from gemini.parallel.zero.collectives import Collectives, Flight
from gemini.parallel.zero.shards import ParamShard

# Buckets of new values under way at one time.
_MAX_FLIGHTS = 2


class ShardedParams:
    """Replace the parameters of ``optimizer`` by this rank's masters; changes its groups in place.

    Every rank gets the first one's weights. Raises ConfigError, on all ranks and with nothing changed, for a
    parameter that cannot be cut or that other ranks have otherwise.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        collectives: Collectives,
        *,
        dtype: torch.dtype | None,
        home: torch.device | None,
        kept: Iterable[torch.Tensor] = (),
    ) -> None:
        """``kept``: parameters that do not get ``dtype``."""
        keeps_type = {id(param) for param in kept}
        self._collectives = collectives
        labels = _checked_labels(optimizer)
        _check_alike(optimizer, collectives)
        with hooks_set_aside(optimizer):
            self._earlier_state = optimizer.state_dict() if optimizer.state else None
        optimizer.state.clear()
        self.groups: list[list[ParamShard]] = []
        self.names: list[list[str] | None] = []
        for group in optimizer.param_groups:
            shards = []
            for param in group["params"]:
                collectives.spread(param)
                shards.append(
                    ParamShard(
                        param,
                        labels[param],
                        rank=collectives.part,
                        world_size=collectives.num_parts,
                        dtype=None if id(param) in keeps_type else dtype,
                        home=home,
                    )
                )
            self.groups.append(shards)
            self.names.append(group.get("param_names"))
            group["params"] = [shard.master for shard in shards if shard.master is not None]
            if "param_names" in group:
                group["param_names"] = self.own_names(len(self.groups) - 1)
        self.shards = [shard for group in self.groups for shard in group]
        self.home = home or (self.shards[0].home if self.shards else torch.device("cpu"))

    def own_names(self, group: int) -> list[str]:
        """Return the names of a group's parameters of which this rank has a part."""
        names = self.names[group] or []
        return [
            name for name, shard in zip(names, self.groups[group], strict=False) if shard.master is not None
        ]

    def shard_of(self, param: torch.Tensor) -> ParamShard:
        """Return what belongs to a parameter of the model, or to its master. Raises ConfigError."""
        for shard in self.shards:
            if shard.param is param or shard.master is param:
                return shard
        raise ConfigError(
            f"a parameter of shape {tuple(param.shape)} is none of this optimizer's; give one of the model's "
            "that it was made with"
        )

    def refuse_others(self, groups: Iterable[dict[str, Any]]) -> None:
        """Raise ConfigError where ``groups`` have a parameter that was not cut: ranks would update it apart
        from each other."""
        known = {id(shard.master) for shard in self.shards}
        for number, group in enumerate(groups):
            for param in group["params"]:
                if id(param) not in known:
                    raise ConfigError(
                        f"group {number} has a parameter of shape {tuple(param.shape)} that came after "
                        "wrapping, and parameters are cut once; give the optimizer all of them before"
                    )

    def take_earlier_state(self) -> dict[str, Any] | None:
        """Return, once, the state the optimizer had before its parameters were cut."""
        state, self._earlier_state = self._earlier_state, None
        return state

    def check_as_noted(self) -> None:
        """Raise StateError where a parameter is no longer what its master says."""
        for shard in self.shards:
            if not shard.is_as_noted():
                raise StateError(
                    f"{shard.label} was replaced, or written to behind its master, since the last step; "
                    "call update_master_params() to take its values over, and do not move a model after "
                    "wrapping its optimizer"
                )

    def gather(self, buckets: Sequence[Bucket]) -> None:
        """Give every rank the new values of all parameters of ``buckets``."""
        flights: deque[tuple[Bucket, Flight]] = deque()
        for bucket in buckets:
            if self._collectives.num_parts == 1 and all(shard.aliased for shard in bucket.shards):
                continue  # updated in place
            if len(flights) == _MAX_FLIGHTS:
                _land(flights)
            flights.append((bucket, self._collectives.gather(bucket.own_values())))
        while flights:
            _land(flights)


def _land(flights: deque[tuple[Bucket, Flight]]) -> None:
    bucket, flight = flights.popleft()
    bucket.write_params(flight.wait())


def _checked_labels(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, str]:
    """Return what errors call each parameter; raise ConfigError for one that cannot be cut."""
    labels = {}
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names")
        for index, param in enumerate(group["params"]):
            named = f" {names[index]!r}" if names else ""
            label = f"parameter{named} {index} of group {number} (shape {tuple(param.shape)})"
            if param.layout != torch.strided or not param.is_floating_point() or param.is_meta:
                raise ConfigError(
                    f"{label} is {param.layout} of {param.dtype} on {param.device}; ZeRO cuts dense "
                    "floating-point parameters that have memory"
                )
            if param.grad is not None:
                raise ConfigError(f"{label} has a gradient already; call zero_grad() before wrapping")
            labels[param] = label
    return labels


def _check_alike(optimizer: torch.optim.Optimizer, collectives: Collectives) -> None:
    """Raise ConfigError on all ranks if one has other parameters: they would wait for each other for ever."""
    if collectives.size == 1:
        return
    described = [
        [(tuple(p.shape), str(p.dtype), p.requires_grad) for p in group["params"]]
        for group in optimizer.param_groups
    ]
    digests = collectives.objects(hashlib.sha256(repr(described).encode()).hexdigest())
    if len(set(digests)) > 1:
        odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        raise ConfigError(
            f"the optimizers of ranks {odd} have other parameters (shape, type, requires_grad or order) than "
            "rank 0's; build the same model and optimizer on every rank"
        )
