"""Undoing what forward passes leave on modules: a stage is run to look at it, and has not been run then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gemini.errors import ConfigError

_LARGEST_BYTES = 2**23  # larger tensors are taken for tables, which forward passes only read
_COLLECTIONS = (list, dict, set)


@contextmanager
def unchanged(modules: Sequence[nn.Module], beside: Sequence[object] = ()) -> Iterator[None]:
    """Undo what happens within the block to the buffers and attributes of ``modules``: new ones in their
    places, writes into tensors of up to 8 MiB, lists, dicts and sets, also those ``beside`` them. Parameters
    are not looked at.

    Raises:
        ConfigError: a larger tensor was written to.
    """
    states = [(module, dict(module.__dict__), dict(module._buffers)) for module in modules]
    values = [*beside, *(value for _, *both in states for each in both for value in each.values())]
    collections = {id(value): (value, value.copy()) for value in values if type(value) in _COLLECTIONS}
    tensors = {id(value): value for value in values if _is_state(value)}
    small = [(each, each.detach().clone()) for each in tensors.values() if each.nbytes <= _LARGEST_BYTES]
    large = [(each, each._version) for each in tensors.values() if each.nbytes > _LARGEST_BYTES]
    try:
        yield
    finally:
        for tensor, content in small:  # all: batch norm leaves the version as it is
            tensor.data.copy_(content)
        for module, attributes, buffers in states:
            _put_back(module.__dict__, attributes)
            _put_back(module._buffers, buffers)
        for collection, members in collections.values():
            _fill(collection, members)
    for tensor, version in large:
        if tensor._version != version:
            raise ConfigError(
                f"the forward pass writes to {_name_of(tensor, states)} of {tensor.nbytes / 2**20:.0f} MiB; "
                f"in stages it may write to buffers of up to {_LARGEST_BYTES // 2**20} MiB: make several of "
                "it, or train without pp"
            )


def _is_state(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter) or value.requires_grad:
        return False
    # Where elements share memory, as in what stands for a tensor, there is nothing to be written.
    return not value.is_meta and not value.is_inference() and 0 not in value.stride()


def _put_back(now: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Have ``now`` hold what it held before, and touch nothing else."""
    for key in [key for key in now if key not in before]:
        del now[key]
    for key, value in before.items():
        if key not in now or now[key] is not value:
            now[key] = value


def _fill(collection: Any, members: Any) -> None:
    """Have a list, dict or set hold ``members`` again, the very same objects."""
    if isinstance(collection, list):
        collection[:] = members
    elif isinstance(collection, dict):
        _put_back(collection, members)
    else:
        collection.intersection_update(members)
        collection.update(members)


def _name_of(tensor: torch.Tensor, states: Sequence[tuple[nn.Module, dict[str, Any], dict[str, Any]]]) -> str:
    for module, attributes, buffers in states:
        for name, value in (*buffers.items(), *attributes.items()):
            if value is tensor:
                return f"the buffer {name!r} of {type(module).__name__}"
    raise AssertionError("a tensor of no module")
