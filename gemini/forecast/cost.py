"""How long an operation takes: timed here on memory of its own, or estimated from a machine's speeds."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from gemini.forecast.machine import MachineSpeeds
from gemini.forecast.meter import Operation, Period, TensorSpec
from gemini.runtime.intercept.of_cpu import GROUPED_MM
from gemini.system.device import free_memory_bytes

logger = logging.getLogger(__name__)

# A sample may take this part of the free memory.
_MEMORY_SHARE = 0.25


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


def sample(
    periods: Iterable[Period], machine: MachineSpeeds, *, limit_seconds: float
) -> dict[Operation, float]:
    """Time operations on this machine, those first that a step spends most on; return the median of each.

    They take turns until the time is over, so that a moment in which the machine is busy with something else
    spoils no single one. Each runs on tensors of its shapes and strides; one that would need too much memory
    or time, or that values of our own making do not suit, is left out.
    """
    calls: Counter[Operation] = Counter()
    for period in periods:
        calls.update(period.operations)
    costs = OperationCosts(machine)
    total = {operation: costs.seconds(operation) * count for operation, count in calls.items()}
    room = int(free_memory_bytes() * _MEMORY_SHARE)
    end = time.perf_counter() + limit_seconds
    prepared_by = end - limit_seconds / 2  # first calls, which are slow, leave time for those that count
    times: dict[Operation, list[float]] = {}
    turns: list[tuple[Operation, Callable[[], object]]] = []
    for operation in sorted(total, key=lambda each: -total[each]):
        if turns and time.perf_counter() >= prepared_by:
            break
        if operation.is_update or operation.moved_bytes > room:
            continue
        if 2 * costs.seconds(operation) > (end - time.perf_counter()) / 2:
            continue
        call = prepare(operation)
        if call is not None:
            room -= operation.moved_bytes
            turns.append((operation, call))
            times[operation] = []
    while turns and time.perf_counter() < end:
        for operation, call in turns:
            start = time.perf_counter()
            call()
            times[operation].append(time.perf_counter() - start)
            if time.perf_counter() >= end:
                break
    return {operation: median(each) for operation, each in times.items() if each}


def prepare(operation: Operation) -> Callable[[], object] | None:
    """Return a call of the operation that has been made once, or None where it cannot be called like this."""
    if operation.function is GROUPED_MM:  # rows of no group are not computed, and offsets of zeros name none
        return None
    args, kwargs = tree_map_only(TensorSpec, _materialize, operation.arguments)
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


def _materialize(spec: TensorSpec) -> torch.Tensor:
    """Return a tensor like ``spec`` whose values suit most operators: no denormals, no index above 0."""
    tensor = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="cpu")
    if spec.dtype.is_floating_point:
        return tensor.fill_(0.5)
    return tensor.fill_(1) if spec.dtype == torch.bool else tensor.zero_()
