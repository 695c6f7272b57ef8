"""What the operators of a step compute and hold, counted while they run on ``meta`` tensors; and how long
each takes: timed here on memory of its own, or estimated from a machine's speeds.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from gemini.errors import GeminiError
from gemini.forecast.machine import MachineSpeeds
from gemini.runtime.intercept.of_cpu import GROUPED_MM, grouped_mm, grouped_mm_flops

_aten = torch.ops.aten


@dataclass(frozen=True)
class TensorForm:
    """A tensor without its memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorForm:
        """Return the description of a strided tensor."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


@dataclass(frozen=True)
class Operation:
    """One kind of operator call: equal for calls that take equally long.

    ``function`` of ``signature``, its arguments without memory (``None`` for the update of optimizer states);
    ``flops``: multiplications and additions of matrix products and attention; ``moved_bytes``: read and
    written at least; ``dtype``: what it computes in.
    """

    function: Any
    signature: tuple[Any, ...]
    flops: int
    moved_bytes: int
    dtype: torch.dtype
    arguments: Any = field(compare=False, default=None, repr=False)  # (args, kwargs) with specs inside

    @property
    def is_update(self) -> bool:
        """Whether this is the optimizer's kernel."""
        return self.function is None


@dataclass
class Period:
    """What happens between two moments: operators by kind, and the most bytes of non-model data."""

    operations: Counter[Operation] = field(default_factory=Counter)
    peak_bytes: int = 0


class TooManyCalls(GeminiError):
    """A step makes more operator calls than were allowed."""


class Meter(TorchDispatchMode):
    """Counts every operator, and every storage that one of them makes for as long as somebody holds it.

    It raises TooManyCalls at the operator call behind the last of ``most_calls``.

    Storages that exist before are no non-model data of the step: inputs, buffers, chunks. Periods begin with
    :meth:`open_period`; what comes before the first belongs to the last, because the iteration repeats.

    There are no values. A model that asks for a truth value (mostly: is this mask all true) is told yes,
    counted in ``num_guesses``; any other value cannot be had.
    """

    def __init__(self, most_calls: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_calls = 0
        self._most_calls = most_calls
        self.periods: list[Period] = []
        self.num_guesses = 0
        self._prelude = Period()
        self._live_bytes = 0
        self._known: set[int] = set()  # storages that are counted, or that were there before
        self._operations: dict[Any, Operation] = {}

    def open_period(self) -> None:
        """Begin the period of the next moment."""
        self.periods.append(Period(peak_bytes=self._live_bytes))

    def finish(self) -> list[Period]:
        """Return the periods of the step, which is over."""
        if self.periods:
            last = self.periods[-1]
            last.operations.update(self._prelude.operations)
            last.peak_bytes = max(last.peak_bytes, self._prelude.peak_bytes)
        return self.periods

    def count_update(self, numel: int, moved_bytes: int, dtype: torch.dtype) -> None:
        """Count one call of the optimizer's kernel."""
        self._period.operations[Operation(None, (numel,), 0, moved_bytes, dtype)] += 1

    @property
    def live_bytes(self) -> int:
        """What somebody holds now of what the step made."""
        return self._live_bytes

    @property
    def _period(self) -> Period:
        return self.periods[-1] if self.periods else self._prelude

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a wrapper answers by operators on plain tensors, which come here
        kwargs = kwargs or {}
        self.num_calls += 1
        if self._most_calls is not None and self.num_calls > self._most_calls:
            raise TooManyCalls(f"the step makes more than {self._most_calls} operator calls")
        if func is _aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            self.num_guesses += 1
            return True
        if func is _aten.index.Tensor and _in_backward():
            args = (args[0], self._chosen(args[1]))
        for tensor in chain(_tensors(args), _tensors(kwargs)):
            self._know(tensor, new=False)
        # Some kernels for meta are Python: what they do with a managed tensor is no operator of the step.
        with torch._C.DisableTorchFunction():
            out = (grouped_mm if func is GROUPED_MM else func)(*args, **kwargs)
        for tensor in _tensors(out):
            self._know(tensor, new=True)
        if func.namespace == "bitsandbytes":
            held_bytes = self._live_bytes + _workspace_bytes(func, args)
            self._period.peak_bytes = max(self._period.peak_bytes, held_bytes)
        if not func.is_view and func not in _FREE and func.namespace in _COUNTED:
            self._period.operations[self._operation(func, args, kwargs, out)] += 1
        return out

    def _chosen(self, indices: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return indices without masks: the gradient of what a mask chose is taken to be that of all."""
        chosen: list[torch.Tensor | None] = []
        for index in indices:
            if index is None or index.dtype != torch.bool:
                chosen.append(index)
                continue
            self.num_guesses += 1
            chosen += index.ndim * [index.new_empty(index.numel(), dtype=torch.int64)]
        return chosen

    def _know(self, tensor: torch.Tensor, *, new: bool) -> None:
        """Count the storage of ``tensor`` from its first sight to its end; an old one counts nothing."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        nbytes = storage.nbytes() if new else 0
        self._live_bytes += nbytes
        self._period.peak_bytes = max(self._period.peak_bytes, self._live_bytes)
        weakref.finalize(storage, self._forget, key, nbytes)

    def _forget(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self._live_bytes -= nbytes

    def _operation(self, func: Any, args: Any, kwargs: Any, out: Any) -> Operation:
        key = (func, _signature(args), _signature(kwargs))
        operation = self._operations.get(key)
        if operation is None:
            tensors = [*_tensors(args), *_tensors(kwargs), *_tensors(out)]
            operation = self._operations[key] = Operation(
                func,
                key[1:],
                _flops(func, args, kwargs, out),
                sum(_touched_bytes(tensor) for tensor in tensors) + 2 * _workspace_bytes(func, args),
                next((t.dtype for t in tensors if t.is_floating_point()), torch.int64),
                tree_map_only(torch.Tensor, TensorForm.of, (args, kwargs)),
            )
        return operation


# Namespaces with operators that take time; other ones call these.
_COUNTED = ("aten", "bitsandbytes", "torchao")
# Of activations [..., K] and a packed weight [N, K].
_PRODUCT_OF_4_BITS, _SCALE_BYTES = "bitsandbytes::gemm_4bit", 4


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


# Make memory known and touch none of it.
_FREE = {
    _aten.detach.default,
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten._unsafe_view.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}


def _cpu_attention_flops(args: tuple[Any, ...], _out: Any) -> int:
    query, key, value = args[:3]
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _cpu_attention_backward_flops(args: tuple[Any, ...], _out: Any) -> int:
    grad_out, query, key, value = args[:4]
    return int(sdpa_backward_flop_count(grad_out.shape, query.shape, key.shape, value.shape))


# Not in torch's registry.
_MORE_FLOPS: dict[Any, Callable[[tuple[Any, ...], Any], int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward_flops,
    _aten._grouped_mm: grouped_mm_flops,
}


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    packet = func.overloadpacket
    if packet in _MORE_FLOPS:
        return _MORE_FLOPS[packet](args, out)
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=out))
    return 2 * int(args[0].numel()) * int(args[2][0]) if func.name() == _PRODUCT_OF_4_BITS else 0


def _workspace_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Return what an operator of bitsandbytes holds on the CPU until it has its result: the weight and its
    scales, unpacked."""
    if func.name() != _PRODUCT_OF_4_BITS:
        return 0
    x, shape, block_size = args[0], args[2], args[4]
    numel = math.prod(shape)
    return int(numel * x.element_size() + -(-numel // block_size) * _SCALE_BYTES)


def _touched_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements; an expanded one has fewer in memory."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _signature(value: Any) -> Any:
    """Return something hashable that is equal for arguments which take equally long."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple([_signature(item) for item in value])
    if isinstance(value, dict):
        return tuple([(name, _signature(item)) for name, item in value.items()])
    return value if isinstance(value, (int, float, str, bool, torch.dtype, type(None))) else repr(value)


class OperationCosts:
    """Seconds per operation on one machine.

    Operations that were sampled take what they took. Others take the roofline's time (arithmetic or memory,
    whichever is longer), corrected by how far it was off for samples of the same function.
    """

    def __init__(self, machine: MachineSpeeds, samples: dict[Operation, float] | None = None) -> None:
        self._machine = machine
        self.samples = samples or {}
        measured: defaultdict[Any, float] = defaultdict(float)
        expected: defaultdict[Any, float] = defaultdict(float)
        for operation, seconds in self.samples.items():
            measured[operation.function] += seconds
            expected[operation.function] += self._roofline(operation)
        self._correction = {name: measured[name] / expected[name] for name in measured if expected[name] > 0}

    def seconds(self, operation: Operation) -> float:
        """Return how long one call takes."""
        if operation in self.samples:
            return self.samples[operation]
        return self._roofline(operation) * self._correction.get(operation.function, 1.0)

    def period_seconds(self, period: Period) -> float:
        """Return how long the operators of a period take, one after the other."""
        calls = sum(self.seconds(operation) * count for operation, count in period.operations.items())
        return calls + self._machine.moment_seconds

    def _roofline(self, operation: Operation) -> float:
        machine = self._machine
        if operation.is_update:
            return operation.moved_bytes / machine.adam_bytes_per_second
        arithmetic = operation.flops / machine.flops_of(operation.dtype)
        return max(arithmetic, operation.moved_bytes / machine.memory_bytes_per_second)
