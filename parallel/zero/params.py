"""The parameters of an optimizer, sharded over ranks: this rank's part of each, and the buckets in which
gradients and values are sent.

Reading ``grad`` of a parameter raises while the optimizer holds its gradient, instead of returning None.
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
from gemini.optim.wrapped_optimizer import hooks_set_aside
from gemini.parallel.zero.replica_collectives import Collectives, Flight

_HALVES = (torch.bfloat16, torch.float16)


class ParamShard:
    """A parameter divided into one part per rank, with the tensor that the optimizer updates on this rank.

    All parts have ``width`` elements in the row-major order of the parameter; the last ones may be short or
    empty. The division depends only on the number of ranks, so nothing else can change the numbers.

    ``master`` has the part's elements in one dimension. It is empty if the part is, so each parameter keeps
    its place in its group on every rank. If the parameter is not divided, it has the parameter's shape. It is
    fp32 for a 16-bit parameter and has the parameter's type otherwise. It is a view of the parameter
    (``aliased``) if type, device and memory order allow it, and then takes no memory. Both tensors share
    their attributes.

    Args:
        param: changed in place: it gets ``dtype``. Must be contiguous in some order, floating-point.
        label: its name in error messages.
        ranks: the ranks that it is divided over.
        mean_over: divide the sum of these ranks' gradients by this number.
        dtype: the dtype in which the model computes; ``None`` keeps the parameter's.
        home: the device of the master; ``None`` means the parameter's.
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
        # Make the master from the original weight, before the model's copy is rounded.
        self.master = self._make_master()
        # One dict: attributes that an optimizer reads or sets on the master are the parameter's.
        self.master.__dict__ = vars(param)
        if param.dtype != dtype:
            param.data = param.data.to(dtype)
        self.note_param()

    @property
    def has_master(self) -> bool:
        """Return whether the master has a higher precision than the parameter."""
        return self.param.dtype != self.master_dtype

    def _make_master(self) -> torch.Tensor:
        part = self.own_part(self.param)
        if not self.aliased:
            part = part.to(self.home, self.master_dtype, copy=True)
        return part.requires_grad_()

    def refresh_master(self) -> None:
        """Copy the parameter's current values to the master."""
        if not self.aliased:
            with torch.no_grad():
                self.master.copy_(self.own_part(self.param))
        self.note_param()

    def own_part(self, values: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of ``values`` (the parameter's shape) in the shape of the master: a view if
        the memory order allows it.
        """
        # detach(), not .data: a view shares the version counter, so autograd sees every update.
        return self.like_master(values.detach().reshape(-1)[self.start : self.stop])

    def like_master(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a flat tensor of the part's elements in the shape of the master."""
        return flat.view(self._own_shape)

    def note_param(self) -> None:
        """Record the parameter's memory and version as those that the master belongs to."""
        self._seen = self._marks()

    def is_as_noted(self) -> bool:
        """Return whether the parameter's memory and, if it has a master, its values are as recorded."""
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
        """Copy the whole parameter from ``rows``."""
        with torch.no_grad():
            self.param.copy_(rows.reshape(-1)[: self.numel].view(self.shape))
        self.note_param()

    def fill_own(self, row: torch.Tensor) -> None:
        """Write this rank's part over ``row`` (width)."""
        row[self.own_numel :].zero_()
        row[: self.own_numel].copy_(self.master.detach().reshape(-1))


class Bucket:
    """The gradients of some parameters on this rank: the local gradients, and its part of the mean.

    Local gradients are in ``rows`` of (parts, width): row i is for part i. The mean is one tensor of (width),
    with the type and device of the masters.
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
        """Return whether a local gradient waits to be sent."""
        return bool(self._filled)

    def local_bytes(self) -> int:
        """Return the bytes of local gradients, including buffers kept for the next step."""
        return sum(rows.nbytes for rows in (self._rows, self._spare) if rows is not None)

    def put(self, shard: ParamShard, grad: torch.Tensor, *, wide: bool) -> None:
        """Add a local gradient, in the masters' type if ``wide`` or if the parameter has one already."""
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
        """Return the local gradients as ``dtype``, with zeros for parameters without one. The bucket gives up
        its local gradients.
        """
        rows = self._rows if self._rows is not None else self._buffer(self.dtype, device)
        for shard in self.shards:
            if shard not in self._filled:
                self._part(rows, shard).zero_()
        self._rows = None
        self._filled.clear()
        return rows.to(dtype)

    def keep_buffer(self, rows: torch.Tensor) -> None:
        """Keep the memory of a sent message for the next one."""
        self._spare = rows

    def absorb(self, received: torch.Tensor) -> None:
        """Divide the sum of the received rows by ``mean_over`` and add it to this rank's mean. Rows are
        summed in rank order. A single row is overwritten; of several the mean must not keep the memory.
        """
        first = self.shards[0]
        mean = received[0].to(first.master_dtype, copy=len(received) > 1)
        if self._mean_over != 1:
            for row in received[1:]:
                mean.add_(row)
            mean.div_(self._mean_over)
        mean = mean.to(first.home)
        self.mean = mean if self.mean is None else self.mean.add_(mean)

    def own_mean(self, shard: ParamShard) -> torch.Tensor | None:
        """Return this rank's part of the mean gradient of a parameter, a one-dimensional view."""
        if self.mean is None:
            return None
        start = self._starts[shard]
        return self.mean[start : start + shard.own_numel]

    def set_mean(self, shard: ParamShard, values: torch.Tensor) -> None:
        """Replace this rank's part of the mean gradient of a parameter."""
        if self.mean is None:
            self.mean = torch.zeros(self.width, dtype=shard.master_dtype, device=shard.home)
        own = self.own_mean(shard)
        if own is not None:
            own.copy_(values)

    def own_values(self) -> torch.Tensor:
        """Return the masters of this rank's parts (width), with the parameters' type and device."""
        values = torch.empty(self.width, dtype=self.dtype, device=self.shards[0].param.device)
        for shard in self.shards:
            start = self._starts[shard]
            shard.fill_own(values[start : start + shard.width])
        return values

    def write_params(self, rows: torch.Tensor) -> None:
        """Set the parameters from all ranks' parts (parts, width)."""
        for shard in self.shards:
            shard.write_param(self._part(rows, shard))

    def forget(self) -> None:
        """Discard local gradients and the mean."""
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
    """Group parameters into buckets of at most ``bucket_numel`` elements (or one larger parameter).

    The last parameters come first, because backward reaches them first. Parameters that are frozen now get
    their own buckets, so no bucket waits for them.
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


# The most buckets of new values in flight at one time.
_MAX_FLIGHTS = 2


class ShardedParams:
    """Replace the parameters of ``optimizer`` by this rank's masters; changes its groups in place.

    Every rank gets the weights of the first. Raises ConfigError, on all ranks and with nothing changed, for a
    parameter that cannot be divided or differs between ranks.
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
        """``kept``: parameters that do not get ``dtype``. ``ranks_of``: returns the ranks that share a
        parameter, if not those of ``collectives``; gradients are divided by the number of the latter in any
        case.
        """
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
        """Return the shard of a parameter or of its master. Raises ConfigError if there is none."""
        for shard in self.shards:
            if shard.param is param or shard.master is param:
                return shard
        raise ConfigError(
            f"a parameter of shape {tuple(param.shape)} does not belong to this optimizer; pass a parameter "
            "of its model"
        )

    def refuse_others(self, groups: Iterable[dict[str, Any]]) -> None:
        """Raise ConfigError if ``groups`` have a parameter that was not sharded: ranks would diverge."""
        known = {id(shard.master) for shard in self.shards}
        for number, group in enumerate(groups):
            for param in group["params"]:
                if id(param) not in known:
                    raise ConfigError(
                        f"group {number} has a parameter of shape {tuple(param.shape)} that was added after "
                        "wrapping, but parameters are cut only once; give the optimizer all parameters first"
                    )

    def take_earlier_state(self) -> dict[str, Any] | None:
        """Return, once, the state that the optimizer had before its parameters were sharded."""
        state, self._earlier_state = self._earlier_state, None
        return state

    def check_as_noted(self) -> None:
        """Raise StateError if a parameter was changed or replaced without its master."""
        for shard in self.shards:
            if not shard.is_as_noted():
                raise StateError(
                    f"{shard.label} was replaced, or changed without its master, since the last step; call "
                    "update_master_params() to take over its values, and do not move a model after wrapping "
                    "its optimizer"
                )

    def gather(self, buckets: Sequence[Bucket]) -> None:
        """Send the new values of all parameters of ``buckets`` to every rank."""
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
    """Return the name of each parameter for errors; raise ConfigError for one that cannot be sharded."""
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
                raise ConfigError(f"{label} already has a gradient; call zero_grad() before wrapping")
            labels[param] = label
    return labels


def _check_alike(optimizer: torch.optim.Optimizer, collectives: Collectives) -> None:
    """Raise ConfigError on all ranks if parameters differ: ranks would wait for each other indefinitely."""
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
            f"the optimizers of ranks {odd} have different parameters (shape, type, requires_grad or order) "
            "than rank 0's; build the same model and optimizer on every rank"
        )


_GRAD: Any = torch.Tensor.grad  # the original descriptor
_OF_WATCHED = ("_had_class", "_is_held")


class GradientInParts:
    """Base of a watched parameter's class: ``grad`` raises while the optimizer holds the gradient.

    Nothing else differs: copies and pickles have the class that the parameter had before.
    """

    _had_class: type[torch.Tensor]
    _is_held: Callable[[], str]

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient that autograd has stored; None between backward and the optimizer's step.

        Raises:
            StateError: the optimizer holds it, and a reader would think that there is none.
        """
        grad = raw_grad(self)
        if grad is None and (label := self._is_held()):
            raise StateError(
                f"the gradient of {label} is not in param.grad, because LowLevelZeroOptimizer holds it, one "
                "part on each rank; clip with optimizer.clip_grad_by_norm(max_norm) or "
                "clip_grad_by_value(), read it with optimizer.get_param_grad(param) or get_grad_norm(), and "
                "discard it with optimizer.zero_grad()"
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
    """Restore a parameter's original class and attributes for a block. They are replaced, not edited: what is
    pickled after the block may refer to the dict.
    """

    def __init__(self, param: Any) -> None:
        self._param = param

    def __enter__(self) -> None:
        self._watched, self._attributes = type(self._param), vars(self._param)
        self._param.__class__ = self._param._had_class
        self._param.__dict__ = {name: v for name, v in self._attributes.items() if name not in _OF_WATCHED}

    def __exit__(self, *_exception: object) -> None:
        self._param.__dict__, self._param.__class__ = self._attributes, self._watched


def watch(param: torch.Tensor, is_held: Callable[[], str]) -> None:
    """Make ``param.grad`` raise while ``is_held()`` returns a name for the parameter; "" means not held."""
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
    """Return the gradient that autograd has stored, without the check."""
    grad: torch.Tensor | None = _GRAD.__get__(param)
    return grad


def set_raw_grad(param: Any, grad: torch.Tensor | None) -> None:
    """Set the gradient that autograd accumulates into, without the check."""
    _GRAD.__set__(param, grad)


@cache
def _watched(had: type[torch.Tensor]) -> type[torch.Tensor]:
    members = {"__torch_function__": torch._C._disabled_torch_function_impl} if had is torch.Tensor else {}
    watched: type[torch.Tensor] = type(had.__name__, (GradientInParts, had), members)
    return watched
