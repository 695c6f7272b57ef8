"""Creates process groups without the ranks outside them, and finds their timeouts, backends and stores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gemini.errors import StateError

# A connection to the store for each default group.
_connections: WeakKeyDictionary[dist.ProcessGroup, Any] = WeakKeyDictionary()


def new_group(ranks: list[int], timeout: timedelta | None, backend: str | None = "gloo") -> dist.ProcessGroup:
    """Make a group. Only its ``ranks``, at least two, call this, in the same order.

    torch names such a group after the number of groups that a process is in, so ranks with different numbers
    would wait for each other indefinitely. Ranks with fewer first make groups of themselves alone.
    """
    missing = _most_groups(ranks) - _num_groups()
    for _ in range(missing):
        dist.new_group([dist.get_rank()], timeout, "gloo", use_local_synchronization=True)
    group: dist.ProcessGroup = dist.new_group(ranks, timeout, backend, use_local_synchronization=True)
    return group


@contextmanager
def alone() -> Iterator[dist.ProcessGroup | None]:
    """Yield a group of this process alone, made without the other ranks; None without torch.distributed."""
    if not (dist.is_available() and dist.is_initialized()):
        yield None
        return
    group = dist.new_group([dist.get_rank()], None, "gloo", use_local_synchronization=True)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def _num_groups() -> int:
    return len(dist.distributed_c10d._world.pg_names)


def _most_groups(ranks: list[int]) -> int:
    """Return the highest number of groups that any of ``ranks`` is in. Raises StateError if the rank that
    keeps the store is gone. Collective over ``ranks``.
    """
    members = f"gemini-groups/{'_'.join(map(str, ranks))}"
    store: Any = dist.PrefixStore(members, dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
    try:
        # No rank arrives a second time before all have arrived once, so this counts the meetings.
        turn = (store.add("arrivals", 1) - 1) // len(ranks)
        store.set(f"{turn}/{dist.get_rank()}", str(_num_groups()))
        return max(map(int, store.multi_get([f"{turn}/{rank}" for rank in ranks])))  # waits for all
    except dist.DistNetworkError as error:
        raise StateError(
            "the rank that hosts the store is gone, because a rank failed or was stopped. Start all "
            "ranks again"
        ) from error


def group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the process group of all ranks of ``mesh``. Collective over the mesh."""
    if mesh.ndim == 1:
        return mesh.get_group()
    return new_group(mesh.mesh.flatten().tolist(), _timeout(dist.group.WORLD), backend=None)


def in_time(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return ``group`` or, if its timeout is longer than the default group's, a new group of its ranks with
    the shorter timeout: ``init_device_mesh`` makes groups that wait half an hour, whatever
    ``init_process_group`` was given.
    """
    timeout, limit = _timeout(group), _timeout(dist.group.WORLD)
    is_late = limit is not None and timeout is not None and timeout > limit
    over_gloo = [is_over_gloo(group, device) for device in devices_of(group)]
    if not (is_late and any(over_gloo)):
        return group
    backend = "gloo" if all(over_gloo) else None  # None: each device type's backend in the default group
    return new_group(dist.get_process_group_ranks(group), limit, backend)


def shortest_timeout(*groups: dist.ProcessGroup | None) -> timedelta | None:
    """Return the shortest timeout of ``groups``; None if none is known."""
    return min((found for found in map(_timeout, groups) if found is not None), default=None)


def _timeout(group: dist.ProcessGroup | None) -> timedelta | None:
    if group is None:
        return None
    backend: Any = group._get_backend(devices_of(group)[0])
    found: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
    return found


def devices_of(group: dist.ProcessGroup) -> list[torch.device]:
    """Return the device types that ``group`` has a backend for."""
    found: list[torch.device] = group._device_types
    return found


def is_over_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether ``group`` uses gloo for memory of ``device``. A group made without naming a backend has
    one per device type.
    """
    config = dist.get_backend_config(group)
    return f"{device.type}:gloo" in config.split(",")


def store_of(group: dist.ProcessGroup, name: str = "") -> Any:
    """Return a store for the ranks of ``group``; ``name`` distinguishes several stores of a group. All such
    stores share a connection on which no call blocks.
    """
    assert dist.group.WORLD is not None
    store = _connections.get(dist.group.WORLD)
    if store is None:
        store = dist.distributed_c10d._get_default_store()
        store = store.clone() if hasattr(store, "clone") else store  # since torch 2.6
        _connections[dist.group.WORLD] = store
    return dist.PrefixStore(f"gemini-heartbeats/{group.group_name}/{name}", store)  # type: ignore[attr-defined]
