"""The four placement policies and the plain data that they return. Policies decide; the runtime moves
chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

import numpy as np

from gemini import _C
from gemini.errors import ConfigError, OutOfBudgetError
from gemini.memstats import Trace
from gemini.placement.problem import NO_RUN, Flags, Intervals, Ints, Iteration
from gemini.system.config import format_bytes, format_enough


@dataclass(frozen=True)
class ModelDataSize:
    """The sizes that a policy needs to know of a model, in bytes.

    ``total_bytes``: all chunks. ``working_set_bytes``: the bytes that the optimizer needs on DEVICE at once
    for one piece of the model. ``largest_chunk_bytes``: the largest single chunk. ``operator_bytes``: the
    parameter chunks that the submodule ``operator_name`` needs at once, the most of all submodules.
    """

    total_bytes: int
    working_set_bytes: int
    largest_chunk_bytes: int
    operator_bytes: int = 0
    operator_name: str = ""


@dataclass(frozen=True)
class TierCapacity:
    """Hard byte budgets of the tiers; ``non_model_bytes`` is reserved on DEVICE at all times when given."""

    device_bytes: int
    host_bytes: int
    disk_bytes: int
    non_model_bytes: int | None = None


@dataclass(frozen=True)
class PlacementPlan:
    """How model data may use DEVICE during an iteration.

    ``device_limit_bytes``: soft limit for model data (operands of a running operator may exceed it, never the
    budget). ``reserve_bytes``: per moment, the non-model bytes of the period that follows; empty if nothing
    was recorded. ``sample_non_model``: whether the iteration should measure non-model memory. ``retention``:
    whether to plan which chunks stay on DEVICE between uses, beyond following the order.
    """

    device_limit_bytes: int
    reserve_bytes: tuple[int, ...] = ()
    sample_non_model: bool = False
    retention: bool = False

    def withholding(self, nbytes: int, device_bytes: int) -> PlacementPlan:
        """Return a plan that leaves ``nbytes`` more of ``device_bytes`` free at every moment."""
        if nbytes == 0:
            return self
        if not self.reserve_bytes:
            return replace(self, device_limit_bytes=max(0, self.device_limit_bytes - nbytes))
        least = device_bytes - self.device_limit_bytes
        return replace(self, reserve_bytes=tuple(max(one, least) + nbytes for one in self.reserve_bytes))


class DeviceTooSmallError(OutOfBudgetError):
    """DEVICE is too small for the bytes that must be there at once. ``reason``: which bytes. ``least_bytes``:
    a sufficient budget, with chunks of these sizes. ``otherwise``: another way out."""

    def __init__(self, reason: str, least_bytes: int, otherwise: str) -> None:
        self._reason = reason
        self._otherwise = otherwise
        self.least_bytes = least_bytes
        super().__init__(
            f"{reason}; raise device_bytes to at least {format_enough(least_bytes)} or {otherwise}"
        )

    def asking(self, least_bytes: int) -> DeviceTooSmallError:
        """Return the same error with a larger ``least_bytes``: a larger DEVICE has larger chunks."""
        return DeviceTooSmallError(self._reason, least_bytes, self._otherwise)


def check_fits(size: ModelDataSize, capacity: TierCapacity) -> None:
    """Refuse a model that no placement can fit.

    Raises:
        DeviceTooSmallError: with the numbers and the way out.
    """
    reserved = capacity.non_model_bytes or 0
    _check_total(size, capacity, reserved)
    room = capacity.device_bytes - reserved
    # Chunks that parameters share are a small part of DEVICE, because the minimum chunk size is lowered for
    # that. Only the chunk of one large parameter, or all parameters of an operator together, can be too
    # large.
    if size.operator_bytes > room:
        raise DeviceTooSmallError(
            f"submodule {size.operator_name!r} needs {format_bytes(size.operator_bytes)} of parameter chunks "
            f"on DEVICE at once but {_budget_text(capacity, reserved)}",
            max(size.operator_bytes, size.working_set_bytes) + reserved,
            f"split this submodule, or its parameters ({_largest_text(size)})",
        )
    if size.working_set_bytes > room:
        raise DeviceTooSmallError(
            f"updating one chunk needs {format_bytes(size.working_set_bytes)} on DEVICE at once (parameters, "
            f"gradients and optimizer states) but {_budget_text(capacity, reserved)}",
            size.working_set_bytes + reserved,
            f"split the largest parameter ({_largest_text(size)})",
        )


def _largest_text(size: ModelDataSize) -> str:
    return f"the largest chunk has {format_bytes(size.largest_chunk_bytes)}"


def _budget_text(capacity: TierCapacity, reserved: int) -> str:
    held_back = f" with {format_bytes(reserved)} reserved for non-model data" if reserved else ""
    return f"device_bytes is {format_bytes(capacity.device_bytes)}{held_back}"


def missing_bytes(size: ModelDataSize, capacity: TierCapacity, reserved: int = 0) -> int:
    """Return how much more model data there is than all tiers together can hold; 0 if it fits. ``reserved``
    bytes of DEVICE are for other data."""
    room = capacity.device_bytes - reserved
    if size.total_bytes <= room or capacity.disk_bytes >= size.total_bytes:
        return 0
    return max(size.total_bytes - (room - _passing(size) + _below(size, capacity)), 0)


def _passing(size: ModelDataSize) -> int:
    """Return the bytes of DEVICE that chunks cannot stay in: a chunk can leave DEVICE only for a free place,
    so the working set needs room besides the chunks that stay."""
    return size.working_set_bytes + size.largest_chunk_bytes


def _below(size: ModelDataSize, capacity: TierCapacity) -> int:
    """Return the bytes that chunks can use below DEVICE. With two tiers, each may have less left than one
    chunk; a tier smaller than a chunk adds nothing."""
    host, disk = capacity.host_bytes, capacity.disk_bytes
    return max(host, disk, host + disk - size.largest_chunk_bytes)


def _check_total(size: ModelDataSize, capacity: TierCapacity, reserved: int) -> None:
    """Refuse model data that all tiers together cannot hold."""
    missing = missing_bytes(size, capacity, reserved)
    if not missing:
        return
    room = capacity.device_bytes - reserved
    host, disk = capacity.host_bytes, capacity.disk_bytes
    wanted = size.total_bytes - (room - _passing(size))  # below DEVICE
    host_least = min(wanted, wanted - disk + size.largest_chunk_bytes)
    disk_least = min(size.total_bytes, wanted, wanted - host + size.largest_chunk_bytes)
    more_disk = "raise disk_bytes to" if disk else "give disk_dir and disk_bytes of"
    raise DeviceTooSmallError(
        f"the model data is {format_bytes(size.total_bytes)} but the tiers hold "
        f"{format_bytes(max(size.total_bytes - missing, 0))} besides the largest update: DEVICE "
        f"{format_bytes(room)}, HOST {format_bytes(host)}, DISK {format_bytes(disk)}",
        min(size.total_bytes, room + missing) + reserved,
        f"raise host_bytes to at least {format_enough(host_least)}, or {more_disk} at least "
        f"{format_enough(disk_least)}",
    )


# Share of DEVICE for model data while non-model memory is unknown, as in ColossalAI's example.
WARMUP_SHARE = 0.30


class PlacementPolicy(Protocol):
    """Decides how much of DEVICE model data may take, before and after the first iteration is recorded."""

    def warmup_plan(self, size: ModelDataSize, capacity: TierCapacity) -> PlacementPlan:
        """Return the plan for the iteration that records the trace.

        Raises:
            OutOfBudgetError: the model cannot fit under this policy.
        """
        ...

    def plan(self, size: ModelDataSize, capacity: TierCapacity, trace: Trace) -> PlacementPlan:
        """Return the plan for the iterations that repeat ``trace``."""
        ...


class AutoPolicy:
    """Fill DEVICE up to the budget minus the recorded non-model data, with the chunks that a plan for the
    whole iteration keeps there."""

    def warmup_plan(self, size: ModelDataSize, capacity: TierCapacity) -> PlacementPlan:
        check_fits(size, capacity)
        if capacity.non_model_bytes is not None:
            return PlacementPlan(capacity.device_bytes - capacity.non_model_bytes)
        limit = max(int(capacity.device_bytes * WARMUP_SHARE), size.working_set_bytes)
        return PlacementPlan(limit, sample_non_model=True)

    def plan(self, size: ModelDataSize, capacity: TierCapacity, trace: Trace) -> PlacementPlan:
        if capacity.non_model_bytes is not None:
            return PlacementPlan(capacity.device_bytes - capacity.non_model_bytes, retention=True)
        return PlacementPlan(capacity.device_bytes, trace.reserve_bytes(), retention=True)


class CudaPolicy:
    """Keep everything on the computing device; refuse at wrapping a model that does not fit there."""

    def warmup_plan(self, size: ModelDataSize, capacity: TierCapacity) -> PlacementPlan:
        reserved = capacity.non_model_bytes or 0
        if size.total_bytes > capacity.device_bytes - reserved:
            raise DeviceTooSmallError(
                f"placement_policy='cuda' keeps all {format_bytes(size.total_bytes)} of model data on "
                f"DEVICE but {_budget_text(capacity, reserved)}",
                size.total_bytes + reserved,
                "choose 'auto' with host_bytes or disk_dir",
            )
        return PlacementPlan(capacity.device_bytes)

    def plan(self, size: ModelDataSize, capacity: TierCapacity, trace: Trace) -> PlacementPlan:
        return PlacementPlan(capacity.device_bytes)


class CpuPolicy:
    """Keep chunks on HOST; DEVICE holds the chunks of the running operator and those fetched for the next.
    Without another tier, if DEVICE is CPU memory, they stay there."""

    def warmup_plan(self, size: ModelDataSize, capacity: TierCapacity) -> PlacementPlan:
        check_fits(size, capacity)
        room = capacity.device_bytes - (capacity.non_model_bytes or 0)
        if capacity.host_bytes == capacity.disk_bytes == 0:
            return PlacementPlan(room)
        return PlacementPlan(min(room, 2 * size.working_set_bytes))

    def plan(self, size: ModelDataSize, capacity: TierCapacity, trace: Trace) -> PlacementPlan:
        return self.warmup_plan(size, capacity)


class ConstPolicy:
    """Keep at most a constant number of model-data bytes on DEVICE: ``device_bytes``, nothing sampled."""

    def warmup_plan(self, size: ModelDataSize, capacity: TierCapacity) -> PlacementPlan:
        check_fits(size, capacity)
        return PlacementPlan(capacity.device_bytes - (capacity.non_model_bytes or 0))

    def plan(self, size: ModelDataSize, capacity: TierCapacity, trace: Trace) -> PlacementPlan:
        return self.warmup_plan(size, capacity)


policies: Mapping[str, type[PlacementPolicy]] = MappingProxyType(
    {"auto": AutoPolicy, "cpu": CpuPolicy, "cuda": CudaPolicy, "const": ConstPolicy}
)


def make_policy(policy: str | PlacementPolicy) -> PlacementPolicy:
    """Return the policy of that name; an object is returned as it is.

    Raises:
        ConfigError: no policy has that name.
    """
    if not isinstance(policy, str):
        return policy
    if policy not in policies:
        raise ConfigError(f"unknown placement_policy {policy!r}; choose one of {', '.join(policies)}")
    return policies[policy]()


# Flags of an interval, equal to those in csrc/chunk/schedule.h.
KEEP = 1
FLUSH = 2


@dataclass(frozen=True)
class Hints:
    """A plan in the form that the core takes.

    ``intervals``: a byte for each access of each moment, one after another, with the flags of the interval
    that begins there: KEEP (the chunk stays on DEVICE until its next use) and FLUSH (written content is
    copied below at once). ``planned_bytes``: per moment, the DEVICE bytes of operands, kept chunks and chunks
    that are still being flushed.
    """

    intervals: bytes
    planned_bytes: tuple[int, ...]


def make_hints(intervals: Intervals, keep: Flags, flushed_at: Ints) -> Hints:
    """Return the hints for the intervals in ``keep``.

    ``flushed_at``: per interval, the moment from which a flush that begins with it has ended.
    """
    gone = np.zeros(len(intervals.run_bytes), dtype=bool)
    in_run = intervals.run != NO_RUN
    gone[intervals.run[in_run & ~keep]] = True
    flush = np.zeros(len(intervals), dtype=bool)
    flush[in_run] = intervals.dirty[in_run] & gone[intervals.run[in_run]]
    flags = np.zeros(intervals.num_accesses, dtype=np.uint8)
    flags[intervals.access] = KEEP * keep + FLUSH * flush
    leaving = np.where(flush & ~keep, intervals.begin + 1, flushed_at)
    planned = intervals.kept_bytes(keep) + intervals.occupied(leaving, flushed_at)
    return Hints(flags.tobytes(), tuple(planned.tolist()))


def make_schedule(iteration: Iteration, hints: Hints | None) -> _C.Schedule:
    """Return the chunk table's schedule for such a step."""
    order = _C.Schedule(iteration.accesses, iteration.reserve_bytes, len(iteration.chunk_bytes))
    return order if hints is None else with_hints(order, hints)


def with_hints(order: _C.Schedule, hints: Hints) -> _C.Schedule:
    """Return a schedule with the same order and a plan."""
    return order.with_plan(hints.intervals, hints.planned_bytes)
