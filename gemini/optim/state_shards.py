"""Optimizer states a few at a time, and on the first rank alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gemini.errors import ConfigError, StateError
from gemini.optim.managed_optimizer import ManagedOptimizer
from gemini.optim.state_exchange import (
    counted_steps,
    entries,
    export_state,
    exported_state,
    nbytes_of,
    slots_in_order,
)
from gemini.system.config import parse_bytes

Entries = dict[int, dict[str, Any]]


def export_to_first(optimizer: ManagedOptimizer) -> dict[str, Any]:
    """Return what :func:`export_state` does on the first rank, nothing on others, which give their part."""
    if optimizer.model.rank().index == 0:
        return export_state(optimizer)
    optimizer.require_complete("state_dict")
    for _ in _entries(optimizer):
        pass
    return {}


def export_shards(
    optimizer: ManagedOptimizer, max_shard_size: int | str, only_rank_0: bool
) -> Iterator[tuple[Entries, int]]:
    """Yield what :meth:`GeminiOptimizer.state_dict_shard` does."""
    most = parse_bytes(max_shard_size, name="max_shard_size")
    if not most or most < 0:
        raise ConfigError(f"max_shard_size is {max_shard_size!r}; give a number of bytes or '1GiB'")
    keeps = not only_rank_0 or optimizer.model.rank().index == 0
    optimizer.require_complete("state_dict_shard")
    return _shards(optimizer, most, keeps)


def _shards(optimizer: ManagedOptimizer, most: int, keeps: bool) -> Iterator[tuple[Entries, int]]:
    shard: Entries = {}
    held = 0
    for number, entry in _entries(optimizer):
        nbytes = nbytes_of(entry)
        if shard and held + nbytes > most:
            yield shard, held
            shard, held = {}, 0
        if keeps:
            shard[number] = entry
            held += nbytes
    if shard:
        yield shard, held


def _entries(optimizer: ManagedOptimizer) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the state of each parameter that has one; over ranks all read them together."""
    manager = optimizer.model.manager
    begun, steps = manager.step, dict(optimizer.steps)
    for number, slot in enumerate(slots_in_order(optimizer)):
        if slot not in steps or not entries(optimizer, slot):
            continue
        if (manager.step, optimizer.steps.get(slot)) != (begun, steps[slot]):
            raise StateError("states were changed while they were read in shards; begin again after the step")
        yield number, {**counted_steps(optimizer, slot), **exported_state(optimizer, slot)}
