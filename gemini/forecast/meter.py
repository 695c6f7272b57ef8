"""Counts the operators and the memory of a step while it runs on ``meta`` tensors, and estimates the seconds
of each operator from samples or from a machine's speeds."""

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
from gemini.runtime.intercept.cpu_operators import GROUPED_MM, grouped_mm, grouped_mm_flops

_aten = torch.ops.aten


@dataclass(frozen=True)
class TensorForm:
    """The shape, stride and dtype of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorForm:
        """Return the form of a strided tensor."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


@dataclass(frozen=True)
class Operation:
    """One kind of operator call. Equal operations take equally long.

    Attributes:
        function: the operator; None for the update of optimizer states.
        signature: its arguments without memory.
        flops: multiplications and additions of matrix products and attention.
        moved_bytes: minimum of bytes read and written.
        dtype: type in which it computes.
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
    """The operators between two moments, by kind, and the peak of non-model data."""

    operations: Counter[Operation] = field(default_factory=Counter)
    peak_bytes: int = 0


class TooManyCalls(GeminiError):
    """A step makes more operator calls than the limit."""


class Meter(TorchDispatchMode):
    """Counts every operator, and the bytes of every storage that an operator makes, for as long as it is
    alive.

    The operator call after the first ``most_calls`` raises TooManyCalls.

    Storages that exist before (inputs, buffers, chunks) are not non-model data of the step. A period begins
    with :meth:`open_period`. Everything before the first period belongs to the last one, because the
    iteration repeats.

    Tensors have no values. If a model asks for a truth value (usually: is this mask all true), the answer is
    True, counted in ``num_guesses``. Queries for other values raise.
    """

    def __init__(self, most_calls: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_calls = 0
        self._most_calls = most_calls
        self.periods: list[Period] = []
        self.num_guesses = 0
        self._prelude = Period()
        self._live_bytes = 0
        # Storages that are counted, or that were there before: how many periods had begun when each was made
        # (-1: it was there before), and its bytes.
        self._known: dict[int, tuple[int, int]] = {}
        self._operations: dict[Any, Operation] = {}

    def open_period(self) -> None:
        """Begin the period of the next moment."""
        self.periods.append(Period(peak_bytes=self._live_bytes))

    def finish(self) -> list[Period]:
        """End the step, and return its periods."""
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
        """Bytes of storages made by the step that are still alive."""
        return self._live_bytes

    def period_of(self, tensor: torch.Tensor) -> int:
        """Return how many periods had begun when an operator made the memory of ``tensor``; -1 if it was
        there before."""
        return self._known.get(tensor.untyped_storage()._cdata, (-1, 0))[0]

    def live_by_period(self) -> Counter[int]:
        """Return the bytes of storages made by the step that are still alive, by how many periods had begun
        when each was made."""
        found: Counter[int] = Counter()
        for period, nbytes in self._known.values():
            found[period] += nbytes
        return found

    @property
    def _period(self) -> Period:
        return self.periods[-1] if self.periods else self._prelude

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the wrapper then calls operators on plain tensors, which are counted
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
        # Some meta kernels are Python: their operators on managed tensors are not operators of the step.
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
        """Replace boolean masks in ``indices`` by integer indices of all elements: backward of a masked
        selection is counted as if the mask selected everything."""
        chosen: list[torch.Tensor | None] = []
        for index in indices:
            if index is None or index.dtype != torch.bool:
                chosen.append(index)
                continue
            self.num_guesses += 1
            chosen += index.ndim * [index.new_empty(index.numel(), dtype=torch.int64)]
        return chosen

    def _know(self, tensor: torch.Tensor, *, new: bool) -> None:
        """Count the storage of ``tensor`` from the first time it is seen until it dies. If it is not ``new``,
        it counts 0 bytes."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        nbytes = storage.nbytes() if new else 0
        self._known[key] = len(self.periods) if new else -1, nbytes
        self._live_bytes += nbytes
        self._period.peak_bytes = max(self._period.peak_bytes, self._live_bytes)
        weakref.finalize(storage, self._forget, key, nbytes)

    def _forget(self, key: int, nbytes: int) -> None:
        self._known.pop(key, None)
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


# Namespaces with operators that take time; operators of other namespaces call these.
_COUNTED = ("aten", "bitsandbytes", "torchao")
# Activations [..., K] times a packed weight [N, K].
_PRODUCT_OF_4_BITS, _SCALE_BYTES = "bitsandbytes::gemm_4bit", 4


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


# Operators that do not touch the memory of their tensors.
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


# Operators that are missing in torch's registry.
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
    """Return the temporary bytes of a bitsandbytes operator on the CPU: the unpacked weight and its scales; 0
    for other operators."""
    if func.name() != _PRODUCT_OF_4_BITS:
        return 0
    x, shape, block_size = args[0], args[2], args[4]
    numel = math.prod(shape)
    return int(numel * x.element_size() + -(-numel // block_size) * _SCALE_BYTES)


def _touched_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements. An expanded tensor has fewer bytes in memory."""
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
    """Return a hashable key: arguments with equal keys take equally long."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple([_signature(item) for item in value])
    if isinstance(value, dict):
        return tuple([(name, _signature(item)) for name, item in value.items()])
    return value if isinstance(value, (int, float, str, bool, torch.dtype, type(None))) else repr(value)


class OperationCosts:
    """Seconds per operation on one machine.

    Sampled operations take their measured time. Others take the roofline's time (the longer of arithmetic and
    memory), corrected by the roofline's error for samples of the same function.
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
        """Return the seconds of one call."""
        if operation in self.samples:
            return self.samples[operation]
        return self._roofline(operation) * self._correction.get(operation.function, 1.0)

    def period_seconds(self, period: Period) -> float:
        """Return the seconds of a period's operators, one after another, plus the overhead of its moment."""
        calls = sum(self.seconds(operation) * count for operation, count in period.operations.items())
        return calls + self._machine.moment_seconds

    def _roofline(self, operation: Operation) -> float:
        machine = self._machine
        if operation.is_update:
            return operation.moved_bytes / machine.adam_bytes_per_second
        arithmetic = operation.flops / machine.flops_of(operation.dtype)
        return max(arithmetic, operation.moved_bytes / machine.memory_bytes_per_second)
