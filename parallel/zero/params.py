"""The parameters of an optimizer, cut over ranks: the part of each that this rank updates, in buckets whose
gradients and values travel together. A parameter whose gradient is with its optimizer says so when it is
read, instead of None.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, TypeGuard

import torch

from gemini.errors import ConfigError, StateError
from gemini.optim.wrapped import hooks_set_aside
from gemini.parallel.zero.replica_collectives import Collectives, Flight

_HALVES = (torch.bfloat16, torch.float16)


class ParamShard:
    """A parameter cut into one part per rank; of this rank's part, the tensor that the optimizer updates.

    All parts have ``width`` elements in the row-major order of the parameter; the last ones may be short or
    empty. Where the cuts are depends on the number of ranks alone, so nothing else can change the numbers.

    ``master`` has the part's elements in one dimension, none where the part is empty, so that each parameter
    has its place in its group on every rank; of a parameter that is not cut it has the shape. It is fp32
    behind a 16-bit parameter and has the parameter's type otherwise. It is a view of the parameter
    (``aliased``) where type, device and memory order allow it, and costs nothing then. Attributes that were
    or will be set on the one are set on the other.

    Args:
        param: changed in place: it gets ``dtype``. Must be contiguous in some order, floating-point.
        label: how errors call it.
        ranks: those that it is cut over.
        mean_over: the sum of what these ranks have of its gradient is divided by this.
        dtype: what the model computes in; ``None`` keeps the parameter's.
        home: where the master lives; ``None`` is where the parameter does.
    """

    def __init__(
        self,
        param: torch.Tensor,
        label: str,
        ranks: Collectives,
        *,
        mean_over: int,
        dtype: torch.dtype | None,
        home: torch.device | None,
    ) -> None:
        self.param, self.label, self.ranks, self.mean_over = param, label, ranks, mean_over
        rank, world_size = ranks.part, ranks.num_parts
        self.shape, self.numel = param.shape, param.numel()
        self.width = -(-self.numel // world_size)
        self.start = min(rank * self.width, self.numel)
        self.stop = min(self.start + self.width, self.numel)
        self.own_numel = self.stop - self.start
        self._own_shape = self.shape if world_size == 1 else torch.Size((self.own_numel,))
        self.home = home or param.device
        self.master_dtype = torch.float32 if param.dtype in _HALVES else param.dtype
        dtype = dtype or param.dtype
        self.aliased = (
            param.is_contiguous() and dtype == self.master_dtype == param.dtype and param.device == self.home
        )
        # The master comes from the original weight, before the model's copy of it is rounded.
        self.master = self._make_master()
        # One dict: what a class reads and sets on the master are the attributes of the parameter.
        self.master.__dict__ = vars(param)
        if param.dtype != dtype:
            param.data = param.data.to(dtype)
        self.note_param()

    @property
    def has_master(self) -> bool:
        """Say whether the master knows more than the parameter."""
        return self.param.dtype != self.master_dtype

    def _make_master(self) -> torch.Tensor:
        part = self.own_part(self.param)
        if not self.aliased:
            part = part.to(self.home, self.master_dtype, copy=True)
        return part.requires_grad_()

    def refresh_master(self) -> None:
        """Take the parameter's present values into the master."""
        if not self.aliased:
            with torch.no_grad():
                self.master.copy_(self.own_part(self.param))
        self.note_param()

    def own_part(self, values: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of ``values`` (the parameter's shape), as the master has it: a view where
        the memory order allows it."""
        # detach(), not .data: a view shares the version counter, so that autograd sees every update.
        return self.like_master(values.detach().reshape(-1)[self.start : self.stop])

    def like_master(self, flat: torch.Tensor) -> torch.Tensor:
        """Return what belongs to the part, in one dimension, in the shape of the master."""
        return flat.view(self._own_shape)

    def note_param(self) -> None:
        """Remember the parameter's memory and values as the ones that the master belongs to."""
        self._seen = self._marks()

    def is_as_noted(self) -> bool:
        """Say whether nobody has replaced the parameter's memory or, behind a master, its values."""
        return self._seen == self._marks()

    def _marks(self) -> tuple[int, int]:
        return self.param.data_ptr(), 0 if self.aliased else self.param._version

    # -- rows: (world size, width), padded with zeros -------------------------------------------------

    def put_rows(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Write ``values`` (the parameter's shape) over ``rows``."""
        full, flat = self._split(values)
        if full:
            rows[:full].copy_(flat[: full * self.width].view(full, self.width))
        if full < len(rows):
            rows[full:].zero_()
            tail = flat[full * self.width :]
            rows[full, : tail.numel()].copy_(tail)

    def add_rows(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Add ``values`` (the parameter's shape) to ``rows``."""
        full, flat = self._split(values)
        if full:
            rows[:full].add_(flat[: full * self.width].view(full, self.width))
        if full < len(rows):
            tail = flat[full * self.width :]
            rows[full, : tail.numel()].add_(tail)

    def _split(self, values: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Return how many rows are full, and the values in one dimension."""
        return self.numel // self.width, values.detach().reshape(-1)

    def write_param(self, rows: torch.Tensor) -> None:
        """Take the values of the whole parameter from ``rows``."""
        with torch.no_grad():
            self.param.copy_(rows.reshape(-1)[: self.numel].view(self.shape))
        self.note_param()

    def fill_own(self, row: torch.Tensor) -> None:
        """Write this rank's part over ``row`` (width)."""
        row[self.own_numel :].zero_()
        row[: self.own_numel].copy_(self.master.detach().reshape(-1))


class Bucket:
    """What this rank has of the gradients of some parameters: local ones, and its part of the mean.

    Local gradients lie in ``rows`` of (parts, width): row i is what part i needs. The mean is one tensor of
    (width), in the masters' type and where they live.
    """

    def __init__(self, shards: Sequence[ParamShard]) -> None:
        self.shards = list(shards)
        self.ranks, self._mean_over = shards[0].ranks, shards[0].mean_over
        self.dtype = shards[0].param.dtype
        self.width = sum(shard.width for shard in shards)
        self.mean: torch.Tensor | None = None
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
        """Add the mean, whose sum over the ranks the rows have, to this rank's mean: in the order of the
        ranks."""
        first = self.shards[0]
        if self._mean_over == 1:
            mean = received[0].to(first.master_dtype)
        else:
            mean = received[0].to(first.master_dtype, copy=True)
            for row in received[1:]:
                mean.add_(row)
            mean.div_(self._mean_over)
        mean = mean.to(first.home)
        self.mean = mean if self.mean is None else self.mean.add_(mean)

    def own_mean(self, shard: ParamShard) -> torch.Tensor | None:
        """Return the mean gradient of a parameter's own part, a view in one dimension."""
        if self.mean is None:
            return None
        start = self._starts[shard]
        return self.mean[start : start + shard.own_numel]

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
        return torch.empty(self.ranks.num_parts, self.width, dtype=dtype, device=device)


def make_buckets(shards: Sequence[ParamShard], bucket_numel: int) -> list[Bucket]:
    """Return buckets of at most ``bucket_numel`` elements (or one parameter), last parameters first.

    Backward reaches the last ones first. Parameters that are frozen now get buckets of their own, so that
    nobody waits for them.
    """
    kinds: dict[object, list[ParamShard]] = {}
    for shard in reversed(shards):
        if shard.numel:
            param = shard.param
            key = (param.requires_grad, param.dtype, param.device, shard.master_dtype, id(shard.ranks))
            kinds.setdefault(key, []).append(shard)
    buckets = []
    for members in kinds.values():
        first, numel = 0, 0
        for index, shard in enumerate(members):
            if index > first and numel + shard.numel > bucket_numel:
                buckets.append(Bucket(members[first:index]))
                first, numel = index, 0
            numel += shard.numel
        buckets.append(Bucket(members[first:]))
    return buckets


def _fits(spare: torch.Tensor | None, dtype: torch.dtype) -> TypeGuard[torch.Tensor]:
    return spare is not None and spare.dtype == dtype


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
        ranks_of: Callable[[torch.Tensor], Collectives] | None = None,
    ) -> None:
        """``kept``: parameters that do not get ``dtype``. ``ranks_of``: which ranks have a parameter, where
        it is not those of ``collectives``; gradients are divided by the number of these in any case."""
        keeps_type = {id(param) for param in kept}
        labels = _checked_labels(optimizer)
        _check_alike(optimizer, collectives)
        with hooks_set_aside(optimizer):
            self._earlier_state = optimizer.state_dict() if optimizer.state else None
        optimizer.state.clear()
        self.groups: list[list[ParamShard]] = []
        for group in optimizer.param_groups:
            shards = []
            for param in group["params"]:
                ranks = collectives if ranks_of is None else ranks_of(param)
                ranks.spread(param)
                shards.append(
                    ParamShard(
                        param,
                        labels[param],
                        ranks,
                        mean_over=collectives.size,
                        dtype=None if id(param) in keeps_type else dtype,
                        home=home,
                    )
                )
            self.groups.append(shards)
            group["params"] = [shard.master for shard in shards]
        self.shards = [shard for group in self.groups for shard in group]
        self.home = home or (self.shards[0].home if self.shards else torch.device("cpu"))

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
            if bucket.ranks.num_parts == 1 and all(shard.aliased for shard in bucket.shards):
                continue  # updated in place
            if len(flights) == _MAX_FLIGHTS:
                _land(flights)
            flights.append((bucket, bucket.ranks.gather(bucket.own_values())))
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
    """Raise ConfigError on all ranks if one has other parameters: they would wait for each other forever."""
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


_GRAD: Any = torch.Tensor.grad  # the descriptor
_OF_WATCHED = ("_had_class", "_is_held")


class GradientInParts:
    """Of a parameter's class: ``grad``, which raises while the optimizer has the gradient.

    Nothing else differs: copies and pickles are of the class that the parameter had.
    """

    _had_class: type[torch.Tensor]
    _is_held: Callable[[], str]

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient as autograd has it; between backward and the optimizer's step that is none.

        Raises:
            StateError: the optimizer has it; a reader would take it for missing.
        """
        grad = raw_grad(self)
        if grad is None and (label := self._is_held()):
            raise StateError(
                f"the gradient of {label} is with its LowLevelZeroOptimizer, a part of it on each rank, not "
                "in param.grad: clip by optimizer.clip_grad_by_norm(max_norm) or clip_grad_by_value(), read "
                "optimizer.get_param_grad(param) or get_grad_norm(), and give gradients up by "
                "optimizer.zero_grad()"
            )
        return grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        set_raw_grad(self, value)

    @grad.deleter
    def grad(self) -> None:
        set_raw_grad(self, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            with _AsBefore(self):
                return self.__deepcopy__(memo)
        copied: torch.Tensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _AsBefore(self):
            return self.__reduce_ex__(protocol)


class _AsBefore:
    """Have a parameter as it was before it was watched, for the block. What it has then as attributes may be
    in what is pickled after the block."""

    def __init__(self, param: Any) -> None:
        self._param = param

    def __enter__(self) -> None:
        self._watched, self._attributes = type(self._param), vars(self._param)
        self._param.__class__ = self._param._had_class
        self._param.__dict__ = {name: v for name, v in self._attributes.items() if name not in _OF_WATCHED}

    def __exit__(self, *_exception: object) -> None:
        self._param.__dict__, self._param.__class__ = self._attributes, self._watched


def watch(param: torch.Tensor, is_held: Callable[[], str]) -> None:
    """Have ``param.grad`` raise while ``is_held()`` says, by a name for the parameter, that it is held."""
    unwatch(param)
    watched: Any = param
    watched._had_class, watched._is_held = type(param), is_held
    watched.__class__ = _watched(type(param))


def unwatch(param: torch.Tensor) -> None:
    """Undo :func:`watch`. Idempotent."""
    if isinstance(param, GradientInParts):
        watched: Any = param
        watched.__class__ = watched._had_class
        del watched._had_class, watched._is_held


def raw_grad(param: Any) -> torch.Tensor | None:
    """Return what autograd has put into ``param.grad``."""
    grad: torch.Tensor | None = _GRAD.__get__(param)
    return grad


def set_raw_grad(param: Any, grad: torch.Tensor | None) -> None:
    """Set what autograd adds to."""
    _GRAD.__set__(param, grad)


@cache
def _watched(had: type[torch.Tensor]) -> type[torch.Tensor]:
    members = {"__torch_function__": torch._C._disabled_torch_function_impl} if had is torch.Tensor else {}
    watched: type[torch.Tensor] = type(had.__name__, (GradientInParts, had), members)
    return watched
