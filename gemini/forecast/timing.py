"""Times operators on this machine: each one is called on tensors with the shapes and strides of the step.

In a real step, operators read memory that has left the caches since its last use. To reproduce this, the
tensors lie one behind another in an arena, which is as large as the step may be, not as all tensors together.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from statistics import median

import torch
from torch.utils._pytree import tree_iter, tree_map_only

from gemini.forecast.machine import MachineSpeeds
from gemini.forecast.meter import Operation, OperationCosts, Period, TensorForm
from gemini.runtime.intercept.cpu_operators import GROUPED_MM
from gemini.system.device import free_memory_bytes

logger = logging.getLogger(__name__)

_MEMORY_SHARE = 0.25  # share of the free memory
_ALIGNMENT = 64
_MUCH = 0.3  # warn if this thread was not scheduled for this share of the time


class Arena:
    """Floating-point memory that operators share. Each tensor begins behind the one before it, or at the
    front if the end is near. Memory is touched when it is first handed out."""

    def __init__(self, nbytes: int) -> None:
        self._values = torch.empty(nbytes // 2, dtype=torch.bfloat16, device="cpu")
        self._next = 0
        self._touched = 0

    def tensor(self, spec: TensorForm) -> torch.Tensor | None:
        """Return a tensor like ``spec`` without denormal values; None if the arena is too small."""
        count = -(-_extent_bytes(spec) // _ALIGNMENT) * _ALIGNMENT // 2
        if count > self._values.numel():
            return None
        if self._next + count > self._values.numel():
            self._next = 0
        begin, self._next = self._next, self._next + count
        if self._touched < self._next:
            # Two of these bf16 values side by side are also about 0.5 as one fp32 value.
            self._values[self._touched : self._next].fill_(0.5)
            self._touched = self._next
        values = self._values[begin : self._next].view(spec.dtype)
        return values.as_strided(spec.shape, spec.stride, values.storage_offset())


def sample(
    periods: Iterable[Period],
    machine: MachineSpeeds,
    *,
    limit_seconds: float,
    most_bytes: int | None = None,
) -> dict[Operation, float]:
    """Time operations on this machine, beginning with those that a step spends most time on. Return the
    median of each.

    Operations take turns until the time is over, so that a moment in which the machine is busy does not spoil
    a single operation. A warning is logged if the machine was busy for much of the time. Operations are left
    out if they need too much memory or time, or fail with made-up values.

    Args:
        most_bytes: limit for the arguments of all operations together, and for one operation with its result.
            Never more than a quarter of the free memory, which is the default.
    """
    calls: Counter[Operation] = Counter()
    for period in periods:
        calls.update(period.operations)
    costs = OperationCosts(machine)
    total = {operation: costs.seconds(operation) * count for operation, count in calls.items()}
    room = int(free_memory_bytes() * _MEMORY_SHARE)
    room = room if most_bytes is None else min(room, most_bytes)
    arena = Arena(min(room, sum(_bytes_of(operation, floats=True) for operation in total)))
    others_room = room
    end = time.perf_counter() + limit_seconds
    prepared_by = end - limit_seconds / 2  # slow first calls must leave time for measured ones
    times: dict[Operation, list[float]] = {}
    turns: list[tuple[Operation, Callable[[], object]]] = []
    for operation in sorted(total, key=lambda each: -total[each]):
        if turns and time.perf_counter() >= prepared_by:
            break
        others_bytes = _bytes_of(operation, floats=False)
        # The arena does not hold the result, nor arguments that are not floats; the latter stay allocated.
        if operation.is_update or operation.moved_bytes > room or others_bytes > others_room:
            continue
        if 2 * costs.seconds(operation) > (end - time.perf_counter()) / 2:
            continue
        call = prepare(operation, arena)
        if call is not None:
            others_room -= others_bytes
            turns.append((operation, call))
            times[operation] = []
    began, ran = time.perf_counter(), time.thread_time()
    while turns and time.perf_counter() < end:
        for operation, call in turns:
            start = time.perf_counter()
            call()
            times[operation].append(time.perf_counter() - start)
            if time.perf_counter() >= end:
                break
    _warn_of_others(time.perf_counter() - began, time.thread_time() - ran)
    return {operation: median(each) for operation, each in times.items() if each}


def _warn_of_others(seconds: float, ran_seconds: float) -> None:
    """Warn if this thread ran for much less than the ``seconds`` of the measurement."""
    if ran_seconds < (1 - _MUCH) * seconds:
        logger.warning(
            "while operators were timed, other programs had the processor for %.0f%% of the time: the times "
            "are those of a busy machine; plan again when it is quiet",
            100 * (1 - ran_seconds / seconds),
        )


def prepare(operation: Operation, arena: Arena) -> Callable[[], object] | None:
    """Call the operation once, and return a function that calls it again; None if it cannot be called with
    made-up values."""
    specs = [each for each in tree_iter(operation.arguments) if isinstance(each, TensorForm)]
    made = [_materialize(spec, arena) for spec in specs]
    if any(tensor is None for tensor in made):
        return None
    tensors = iter(made)
    args, kwargs = tree_map_only(TensorForm, lambda _spec: next(tensors), operation.arguments)
    if operation.function is GROUPED_MM:
        if len(args) < 3 or args[2] is None:
            return None
        args = (*args[:2], _random_offsets(*args[:3]), *args[3:])
    kwargs = {name: torch.device("cpu") if name == "device" else value for name, value in kwargs.items()}

    def call() -> None:
        with torch.no_grad():
            operation.function(*args, **kwargs)

    try:
        call()
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        logger.info("%s cannot be timed alone: %s", operation.function, error)
        return None
    return call


def _materialize(spec: TensorForm, arena: Arena) -> torch.Tensor | None:
    """Return a tensor like ``spec`` with values that suit most operators: no denormals, and 0 for all
    indices; None if the arena is too small."""
    if spec.dtype.is_floating_point:
        return arena.tensor(spec)
    tensor = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="cpu")
    return tensor.fill_(1) if spec.dtype == torch.bool else tensor.zero_()


def _random_offsets(left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Return the end offsets of groups of rows for a grouped product. Rows choose groups at random, so that
    group sizes differ as with a router: kernels are compiled for each size."""
    cut = left.shape[-2] if right.ndim == 3 else right.shape[-1] if left.ndim == 3 else left.shape[-1]
    groups = offs.shape[0]
    rows = torch.randint(groups, (cut,), generator=torch.Generator().manual_seed(0), device="cpu")
    return torch.bincount(rows, minlength=groups).cumsum(0).to(offs.dtype)


def _bytes_of(operation: Operation, *, floats: bool) -> int:
    """Return the arena bytes of the arguments that are floats, or the bytes of the other arguments."""
    specs = (each for each in tree_iter(operation.arguments) if isinstance(each, TensorForm))
    return sum(_extent_bytes(spec) + _ALIGNMENT for spec in specs if spec.dtype.is_floating_point is floats)


def _extent_bytes(spec: TensorForm) -> int:
    """Return the bytes from the first element to the end of the last one."""
    if 0 in spec.shape:
        return 0
    last = sum((size - 1) * step for size, step in zip(spec.shape, spec.stride, strict=True))
    return (last + 1) * spec.dtype.itemsize
