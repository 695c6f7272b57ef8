"""Optimizer states of ZeRO 0 to 2: their export and import in parts or as a whole, access by the model's
parameters, and norms of gradients in parts.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from gemini.comm.peers import ModelRanks, Topic
from gemini.errors import ConfigError
from gemini.optim.gradients import LossScale, NormOverRanks, sum_over_ranks
from gemini.optim.rule_choice import steps_by_element
from gemini.optim.wrapped_optimizer import hooks_set_aside
from gemini.parallel.zero.params import Bucket, ParamShard, ShardedParams
from gemini.parallel.zero.replica_collectives import Collectives


class ShardedStates(Protocol):
    """The interface of an optimizer with sharded states, for state dicts: LowLevelZeroOptimizer."""

    optim: torch.optim.Optimizer
    collectives: Collectives
    sharded: ShardedParams
    loss_scale: LossScale | None

    def gather_all(self) -> None:
        """Set every parameter from the ranks' parts. Collective."""

    def share_groups(self) -> None:
        """Use the groups of the wrapped optimizer as this one's."""


@dataclass(frozen=True)
class StateShard:
    """Elements [start, stop), in row-major order, of the states of parameter number ``index``.

    Parameters are numbered over all groups, as in a state dict. ``tensors`` has the states with one value per
    element, in one dimension; ``values`` has the others, such as ``step``; ``master`` is the fp32 master of a
    16-bit parameter.
    """

    index: int
    shape: tuple[int, ...]
    start: int
    stop: int
    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]
    master: torch.Tensor | None


def state_shards(optimizer: ShardedStates) -> Iterator[StateShard]:
    """Yield this rank's part of the state; see LowLevelZeroOptimizer.state_shards."""
    with hooks_set_aside(optimizer.optim):
        states = optimizer.optim.state_dict()["state"]
    for index, shard in enumerate(optimizer.sharded.shards):
        if shard.own_numel == 0:
            continue
        arrays, values = _split(states.get(index, {}), tuple(shard.master.shape))
        tensors = {name: array.reshape(-1) for name, array in arrays.items()}
        master = shard.master.detach().reshape(-1) if shard.has_master else None
        yield StateShard(index, tuple(shard.shape), shard.start, shard.stop, tensors, values, master)


def export_state(optimizer: ShardedStates, only_rank_0: bool = False) -> dict[str, Any]:
    """Return the whole state, or {} on ranks that do not keep it; see LowLevelZeroOptimizer.state_dict."""
    collectives = optimizer.collectives
    keeps = not only_rank_0 or collectives.rank == 0
    own = {shard.index: shard for shard in state_shards(optimizer)}
    # The first rank has a part of every parameter that is not empty.
    described = collectives.first(
        {
            index: ({name: tensor.dtype for name, tensor in part.tensors.items()}, part.values)
            for index, part in own.items()
        }
    )
    state: dict[Any, Any] = {}
    masters: dict[int, torch.Tensor] = {}
    for index, shard in enumerate(optimizer.sharded.shards):
        names, values = described.get(index, ({}, {}))
        part = own.get(index)
        if names or values:
            state[index] = dict(values if part is None else part.values)
        for name, dtype in names.items():
            mine = None if part is None else part.tensors[name]
            whole = whole_tensor(shard, mine, dtype)
            state[index].update({name: whole} if keeps else {})
        if shard.has_master and shard.numel:
            mine = None if part is None else part.master
            whole = whole_tensor(shard, mine, shard.master_dtype)
            masters.update({index: whole} if keeps else {})
    if not keeps:
        return {}
    state |= _beside(optimizer.optim)
    exported: dict[str, Any] = {"state": state, "param_groups": exported_groups(optimizer)}
    if masters:
        exported["masters"] = masters
    if optimizer.loss_scale is not None:
        exported["loss_scale"] = optimizer.loss_scale.state_dict()
    return exported


def exported_groups(optimizer: ShardedStates) -> list[dict[str, Any]]:
    """Return the groups of a state dict, with the numbers of all parameters."""
    with hooks_set_aside(optimizer.optim):
        groups: list[dict[str, Any]] = optimizer.optim.state_dict()["param_groups"]
    return groups


def import_state(
    optimizer: ShardedStates, state_dict: dict[str, Any], shards: Iterable[StateShard] | None = None
) -> None:
    """Load a whole state, or ``shards`` with the groups of one. Raises ConfigError before any change."""
    groups = state_dict["param_groups"]
    lengths = [len(group) for group in optimizer.sharded.groups]
    if [len(group["params"]) for group in groups] != lengths:
        raise ConfigError(f"the state has different parameter groups than the optimizer, which has {lengths}")
    parts = [_OwnPart(shard) for shard in optimizer.sharded.shards]
    numbers = [number for group in groups for number in group["params"]]
    for saved in _whole_shards(optimizer, state_dict, numbers) if shards is None else shards:
        if not 0 <= saved.index < len(numbers):
            raise ConfigError(
                f"the state has a parameter number {saved.index}, but there are {len(numbers)} parameters"
            )
        parts[saved.index].take(saved)
    for part in parts:
        part.check()
    beside = {key: value for key, value in state_dict.get("state", {}).items() if key not in numbers}
    _load_own(optimizer, groups, parts, beside)
    restored = _restore_masters(parts)
    if optimizer.collectives.maximum([int(restored)], "loads a state") == [1]:
        optimizer.gather_all()
    if optimizer.loss_scale is not None and "loss_scale" in state_dict:
        optimizer.loss_scale.load_state_dict(state_dict["loss_scale"])


class _OwnPart:
    """This rank's part of one parameter's state, assembled from saved parts."""

    def __init__(self, shard: ParamShard) -> None:
        self.shard = shard
        self.tensors: dict[str, torch.Tensor] = {}
        self.values: dict[str, Any] = {}
        self.master: torch.Tensor | None = None
        self._covered: dict[str, int] = {}

    def take(self, saved: StateShard) -> None:
        """Copy the overlap with ``saved``. If this rank's part is empty, its states become empty tensors."""
        shard = self.shard
        if tuple(saved.shape) != tuple(shard.shape):
            raise ConfigError(
                f"the state of {shard.label} was saved for a parameter of shape {tuple(saved.shape)}"
            )
        self.values.update(saved.values)
        start, stop = max(saved.start, shard.start), min(saved.stop, shard.stop)
        if start >= stop and shard.own_numel > 0:
            return
        for name, tensor in saved.tensors.items():
            kept = self.tensors.setdefault(name, tensor.new_empty(shard.own_numel))
            self._copy(name, kept, tensor, saved, start, stop)
        if saved.master is not None and shard.has_master:
            if self.master is None:
                self.master = saved.master.new_empty(shard.own_numel)
            self._copy("master", self.master, saved.master, saved, start, stop)

    def _copy(
        self, name: str, kept: torch.Tensor, tensor: torch.Tensor, saved: StateShard, start: int, stop: int
    ) -> None:
        if start >= stop:
            return
        kept[start - self.shard.start : stop - self.shard.start].copy_(
            tensor[start - saved.start : stop - saved.start]
        )
        self._covered[name] = self._covered.get(name, 0) + stop - start

    def state(self) -> dict[str, Any]:
        """Return the state in the form that the optimizer loads."""
        return {**self.values, **{k: self.shard.like_master(tensor) for k, tensor in self.tensors.items()}}

    def check(self) -> None:
        """Raise ConfigError if saved parts do not cover this rank's part."""
        wanted = self.shard.own_numel
        for name, covered in self._covered.items():
            if covered != wanted:
                raise ConfigError(
                    f"the saved parts of {name} of {self.shard.label} have {covered} of {wanted} elements "
                    f"from {self.shard.start} on; pass the parts of all ranks, each once"
                )


def _whole_shards(
    optimizer: ShardedStates, state_dict: dict[str, Any], numbers: list[int]
) -> Iterator[StateShard]:
    """Yield the entries of a state dict as shards of whole parameters."""
    masters = state_dict.get("masters", {})
    # If nothing is sharded, a state may have any shape, but a master must match.
    is_fixed = optimizer.collectives.num_parts > 1 or steps_by_element(optimizer.optim)
    for index, (number, shard) in enumerate(zip(numbers, optimizer.sharded.shards, strict=True)):
        shape = tuple(shard.shape)
        tensors, values = _split(state_dict["state"].get(number, {}), shape)
        master = masters.get(number)
        for name, tensor in (("master", master), *values.items()):
            is_odd = isinstance(tensor, torch.Tensor) and tensor.numel() != 1 and tuple(tensor.shape) != shape
            if is_odd and (is_fixed or name == "master"):
                raise ConfigError(
                    f"{name} of {shard.label} has shape {tuple(tensor.shape)} in the state, which does not "
                    "fit"
                )
        flat = {name: tensor.reshape(-1) for name, tensor in tensors.items()}
        flat_master = None if master is None else master.reshape(-1)
        yield StateShard(index, shape, 0, shard.numel, flat, values, flat_master)


def _beside(optim: torch.optim.Optimizer) -> dict[Any, Any]:
    """Return the entries that a user keeps in the state besides those of parameters."""
    return {key: value for key, value in optim.state.items() if not isinstance(key, torch.Tensor)}


def _load_own(
    optimizer: ShardedStates,
    groups: list[dict[str, Any]],
    parts: list[_OwnPart],
    beside: dict[Any, Any],
) -> None:
    """Load the state, and the entries ``beside`` it, into the wrapped optimizer, which checks before it
    changes anything.
    """
    state = {index: part.state() for index, part in enumerate(parts)}
    own_groups: list[dict[str, Any]] = []
    for saved, own in zip(groups, exported_groups(optimizer), strict=True):  # saved names may differ
        settings = {name: value for name, value in saved.items() if name != "param_names"}
        settings |= {name: value for name, value in own.items() if name in ("params", "param_names")}
        own_groups.append(settings)
    present = {**{place: entry for place, entry in state.items() if entry}, **beside}
    with hooks_set_aside(optimizer.optim):
        optimizer.optim.load_state_dict({"state": present, "param_groups": own_groups})
    optimizer.share_groups()


def _restore_masters(parts: list[_OwnPart]) -> bool:
    restored = False
    with torch.no_grad():
        for part in parts:
            if part.master is not None:
                part.shard.master.copy_(part.shard.like_master(part.master))
                restored = True
    return restored


def _split(
    state: Mapping[str, Any], shape: tuple[int, ...]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Split a parameter's state into tensors with one value per element, and the rest."""
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    for name, value in state.items():  # iterate once: a lazy mapping reads files here
        if name != "step" and isinstance(value, torch.Tensor) and tuple(value.shape) == shape:
            tensors[name] = value
        else:
            values[name] = value
    return tensors, values


def whole_tensor(shard: ParamShard, own: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return a whole tensor from all ranks' parts of it. Collective."""
    padded = torch.zeros(shard.width, dtype=dtype, device=shard.home)
    if own is not None:
        padded[: shard.own_numel].copy_(own)
    rows = shard.ranks.gather_anywhere(padded)
    return rows.reshape(-1)[: shard.numel].view(shard.shape)


_HELPER = "torch.distributed.checkpoint.state_dict"


class StatesByParam(MutableMapping[Any, Any]):
    """The states of the wrapped optimizer, which are stored by this rank's parts of the masters.

    ``state[param]``, for a parameter of the model, is the state of this rank's part in a new dict. Its
    tensors are the optimizer's own, in the parameter's shape if the part is the whole parameter.
    """

    def __init__(self, states: MutableMapping[Any, Any], shards: list[ParamShard]) -> None:
        self._states = states
        self._shards = {shard.param: shard for shard in shards}

    def __getitem__(self, key: Any) -> Any:
        shard = self._shards.get(key)
        if shard is None:
            return self._states[key]
        state = self._states.get(shard.master) or {}
        return {name: _in_shape(value, shard) for name, value in state.items()}

    def __setitem__(self, key: Any, value: Any) -> None:
        self._states[self._own(key)] = value

    def __delitem__(self, key: Any) -> None:
        del self._states[self._own(key)]

    def __contains__(self, key: object) -> bool:
        return self._own(key) in self._states

    def __iter__(self) -> Iterator[Any]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def __bool__(self) -> bool:
        # The helper first tests this; if it went on, it would fail with a KeyError.
        if sys._getframe(1).f_globals.get("__name__") == _HELPER:
            raise ConfigError(
                f"{_HELPER} looks for the model's parameters in the optimizer's groups, but "
                "LowLevelZeroOptimizer has this rank's parts there; save and load optimizer.state_dict(), "
                "which is whole and in the wrapped optimizer's format, or its state_shards(), one part for "
                "each rank"
            )
        return len(self) > 0

    def _own(self, key: Any) -> Any:
        shard = self._shards.get(key)
        return key if shard is None else shard.master


def _in_shape(value: Any, shard: ParamShard) -> Any:
    is_whole = shard.own_numel == shard.numel and isinstance(value, torch.Tensor)
    return value.view(shard.shape) if is_whole and value.shape == shard.master.shape else value


Gradients = Sequence[tuple[ParamShard, torch.Tensor | None]]


def total_norm(
    gradients: Gradients,
    norm_type: float,
    collectives: Collectives,
    model_ranks: ModelRanks | None,
    experts: ModelRanks | None,
    device: torch.device,
) -> torch.Tensor:
    """Return the gradient norm over the parts of all ranks, including ``model_ranks``. Every rank gets the
    same bits, however parameters are sharded. With one rank it equals ``torch.nn.utils.get_total_norm`` bit
    for bit.

    Args:
        gradients: this rank's part of every gradient, None if there is none.
        experts: the ranks that divide experts, if nothing else is sharded; else None.
        device: where to put the result.
    """
    if collectives.size > 1 or model_ranks is not None:
        norm, groups = NormOverRanks(norm_type), [each for each in (experts, model_ranks) if each is not None]
        for shard, part in gradients:
            if part is not None and part.numel() and all(ranks.counts(shard.param) for ranks in groups):
                norm.add(part.float())
        return norm.over([collectives, *(ranks.peers for ranks in groups)]).to(device)
    norms = [torch.linalg.vector_norm(part, norm_type) for _, part in gradients if part is not None]
    if not norms:
        return torch.zeros((), dtype=torch.float32, device=device)
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([n.to(device) for n in norms]), norm_type)
    return total


def count_zeros(
    gradients: Gradients,
    collectives: Collectives,
    model_ranks: ModelRanks | None = None,
    experts: ModelRanks | None = None,
) -> int:
    """Return the number of gradient elements that are 0, over the parts of all ranks, including
    ``model_ranks``. Arguments as for :func:`total_norm`.
    """
    found, groups = 0, [each for each in (experts, model_ranks) if each is not None]
    for shard, part in gradients:
        if not all(ranks.counts(shard.param) for ranks in groups):
            continue
        if part is not None:
            found += part.numel() - int(torch.count_nonzero(part))
        if model_ranks is not None and collectives.part == 0:
            found -= model_ranks.filling(shard.param)
    return sum_over_ranks(found, [collectives, *(ranks.peers for ranks in groups)])


def any_overflow(
    buckets: Sequence[Bucket], collectives: Collectives, model_ranks: ModelRanks | None = None
) -> bool:
    """Return whether any rank has an infinity or a NaN in its part of the mean gradients."""
    largest = [
        torch.linalg.vector_norm(bucket.mean, math.inf) for bucket in buckets if bucket.mean is not None
    ]
    finite = not largest or bool(
        torch.stack([value.to(largest[0].device) for value in largest]).isfinite().all()
    )
    overflowed = collectives.maximum([int(not finite)], "looks for overflow (step)")
    if model_ranks is None:
        return overflowed == [1]
    return any(said == [1] for said in model_ranks.peers.exchange(Topic.GRADIENTS, overflowed))
