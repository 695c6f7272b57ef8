"""The four placement policies. They return plans and move nothing."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from gemini.errors import ConfigError
from gemini.memstats import Trace
from gemini.placement.plan import (
    DeviceTooSmallError,
    ModelDataSize,
    PlacementPlan,
    TierCapacity,
    check_fits,
)

# Share of DEVICE that model data may take while non-model memory is still unknown (the seeds' example).
WARMUP_SHARE = 0.30


class PlacementPolicy(Protocol):
    """Decides how much of DEVICE model data may take, before and after the first iteration was recorded."""

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
    """Fill DEVICE up to the budget less what the recorded iteration needs for non-model data, with what a
    plan for the whole iteration keeps there."""

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
    """Keep everything on the computing device; refuse up front what cannot fit there."""

    def warmup_plan(self, size: ModelDataSize, capacity: TierCapacity) -> PlacementPlan:
        reserved = capacity.non_model_bytes or 0
        if size.total_bytes > capacity.device_bytes - reserved:
            raise DeviceTooSmallError(
                f"placement_policy='cuda' keeps all {size.total_bytes} bytes of model data on DEVICE but "
                f"device_bytes is {capacity.device_bytes} with {reserved} reserved for non-model data",
                size.total_bytes + reserved,
                "choose 'auto' with host_bytes or disk_dir",
            )
        return PlacementPlan(capacity.device_bytes)

    def plan(self, size: ModelDataSize, capacity: TierCapacity, trace: Trace) -> PlacementPlan:
        return PlacementPlan(capacity.device_bytes)


class CpuPolicy:
    """Keep chunks on HOST; DEVICE holds what an operator needs now and what is fetched for the next. Without
    another tier, where DEVICE is CPU memory, they stay there."""

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
    """Return the policy of that name, or the object itself.

    Raises:
        ConfigError: no policy has that name.
    """
    if not isinstance(policy, str):
        return policy
    if policy not in policies:
        raise ConfigError(f"unknown placement_policy {policy!r}; choose one of {', '.join(policies)}")
    return policies[policy]()
