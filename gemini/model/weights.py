"""A managed model's weights as an ordinary state dict, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from gemini.errors import ConfigError, StateError
from gemini.model.lazy_state import LazyState
from gemini.model.managed_model import ManagedModel
from gemini.model.state_loading import StateLoad
from gemini.offload.mapped import IN_MEMORY, MappedTensors, Place
from gemini.runtime import (
    GeminiManager,
    ManagedParameter,
    ManagedSlot,
    ManagedTensor,
    read_values,
    write_values,
)
from gemini.runtime.intercept.tensors import plain_copy
from gemini.runtime.storage.model_storage import slot_of
from gemini.system.config import parse_bytes
from gemini.system.process import paused_collector


@paused_collector()
def export_weights(
    model: ManagedModel, *args: Any, only_rank_0: bool = False, **options: Any
) -> dict[str, Any]:
    """Return what :meth:`GeminiDDP.state_dict` does; the other arguments are those of
    ``nn.Module.state_dict``."""
    state = _state(model, "state_dict", *args, **options)
    keeps = not only_rank_0 or model.rank().index == 0
    managed = {id(v): v for v in state.values() if isinstance(v, ManagedParameter)}
    directory = model.manager.chunks.budgets.disk_dir if keeps else None
    capacity = sum(p.numel() * max(4, p.element_size()) for p in managed.values())
    export = MappedTensors(directory, capacity, len(managed)) if directory is not None else IN_MEMORY
    for names, value in _full_values(model, state, export):
        state.update(dict.fromkeys(names, value) if keeps else {})
    if not keeps:
        state.clear()
    return state


def lazy_weights(model: ManagedModel) -> LazyState:
    """Return what :func:`export_weights` does, each value read when it is asked for, by all ranks."""
    state = _state(model, "state_dict")

    def read(name: str) -> Any:
        value = state[name]
        if isinstance(value, ManagedParameter):
            return _full_value(model, value, IN_MEMORY)
        return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value

    return LazyState(state, read, getattr(state, "_metadata", None))


def export_shards(
    model: ManagedModel, max_shard_size: int | str, only_rank_0: bool
) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield what :meth:`GeminiDDP.state_dict_shard` does."""
    most = parse_bytes(max_shard_size, name="max_shard_size")
    if not most or most < 0:
        raise ConfigError(f"max_shard_size is {max_shard_size!r}; give a number of bytes or '1GiB'")
    state = _state(model, "state_dict_shard")
    keeps = not only_rank_0 or model.rank().index == 0
    return _shards(model, _full_values(model, state, IN_MEMORY), most, keeps)


def _shards(
    model: ManagedModel, values: Iterator[tuple[list[str], Any]], most: int, keeps: bool
) -> Iterator[tuple[dict[str, Any], int]]:
    begun = model.manager.step
    shard: dict[str, Any] = {}
    held = 0
    for names, value in values:
        nbytes = value.nbytes if isinstance(value, torch.Tensor) else 0
        if shard and held + nbytes > most:
            yield shard, held
            shard, held = {}, 0
            if model.manager.step != begun:
                raise StateError(
                    "weights were changed while they were read in shards; begin again after the step"
                )
        if keeps:
            shard.update(dict.fromkeys(names, value))
            held += nbytes
    if shard:
        yield shard, held


def _state(model: ManagedModel, doing: str, *args: Any, **options: Any) -> dict[str, Any]:
    """Return the module's state with managed weights as they are; nothing of an update is pending then."""
    model.manager.lock.refuse_all()
    model.storage.mixture.refuse(doing)
    model.managed.refuse_exchanged(doing)
    model.manager.run_pending()
    state: dict[str, Any] = model.module.state_dict(*args, **{**options, "keep_vars": True})
    return state


def _full_values(
    model: ManagedModel, state: Mapping[str, Any], export: Place
) -> Iterator[tuple[list[str], Any]]:
    """Yield each value of a state, as an ordinary one, with its names, several where it is tied."""
    names: dict[int, list[str]] = {}
    for key, value in state.items():
        names.setdefault(id(value), []).append(key)
    for keys in names.values():
        value = state[keys[0]]
        if isinstance(value, ManagedParameter):
            value = _full_value(model, value, export)
        elif isinstance(value, torch.Tensor):
            value = value.detach().cpu()
        yield keys, value


def import_weights(
    model: ManagedModel,
    state_dict: Mapping[str, Any],
    *,
    strict: bool,
    fill: Callable[[ManagedSlot, torch.Tensor], None] | None = None,
) -> Any:
    """Do what :meth:`GeminiDDP.load_state_dict` does; ``fill`` writes the values of managed weights, None: as
    :func:`write_values`."""
    model.managed.refuse_exchanged("load_state_dict")
    rank = model.rank()

    def found() -> StateLoad:
        load = StateLoad(model.module, state_dict, partial(_kept, model))
        if not load.has_post_hooks:  # or they may yet forgive
            _refuse_keys(load.keys, strict=strict)
        return load

    load = rank.together(found)
    names = _stored_names(model.module)
    loaded = {_stored_name(target, names) for target in load.targets}
    rank.together(model.manager.run_pending)

    def write() -> Any:
        keys = load.carry_out(partial(_write, model, fill=fill))
        _refuse_keys(keys, strict=strict)
        return keys

    with model.storage.mixture.load(loaded, set(names.values())):
        return rank.together(write)


def import_others(model: ManagedModel, others: Mapping[str, Any]) -> bool:
    """Load ``others``, which are all of the module's state but managed weights; those have their values.

    Hooks of loading run as where everything is loaded and see all names, with the weights as they are. What
    they make of a managed weight is not taken over. Returns whether one wrote to a weight itself, which is
    then no more what it was.
    """
    written = model.manager.written.times()
    state = model.module.state_dict(keep_vars=True)
    for name, value in list(state.items()):
        state[name] = value.detach() if isinstance(value, torch.Tensor) else value
    state.update(others)

    def write(target: torch.Tensor, value: torch.Tensor) -> None:
        if not isinstance(target, ManagedParameter):
            _write(model, target, value)

    StateLoad(model.module, state, partial(_kept, model)).carry_out(write)
    return model.manager.written.times() != written


def _refuse_keys(keys: Any, *, strict: bool) -> None:
    missing, unexpected = keys.missing_keys, keys.unexpected_keys
    if strict and (missing or unexpected):
        raise RuntimeError(f"load_state_dict: missing keys {missing}, unexpected keys {unexpected}")


def _stored_names(module: nn.Module) -> dict[int, str]:
    """Return what a load of everything writes, by id: the one name of a parameter, tied ones included, and a
    buffer's."""
    names: dict[int, str] = {}
    for prefix, part in module.named_modules():
        held = dict(part._parameters)
        held |= {k: v for k, v in part._buffers.items() if k not in part._non_persistent_buffers_set}
        for key, value in held.items():
            if value is not None:
                names.setdefault(id(value), _name_of(value) or f"{prefix}.{key}".lstrip("."))
    return names


def _stored_name(target: torch.Tensor, names: Mapping[int, str]) -> str:
    return names.get(id(target)) or _name_of(target)


def _name_of(value: torch.Tensor) -> str:
    return value._slot.name if isinstance(value, ManagedParameter) else ""


@torch.no_grad()
def _write(
    model: ManagedModel,
    target: torch.Tensor,
    value: torch.Tensor,
    fill: Callable[[ManagedSlot, torch.Tensor], None] | None = None,
) -> None:
    """Copy a value into chunks, or into a buffer. Over several ranks each writes what it owns."""
    if isinstance(value, ManagedParameter):  # a hook puts it where a name is missing
        owner = value._ref.manager  # perhaps another model's
        assert isinstance(owner, GeminiManager)
        value = read_values(slot_of(value), owner)
    elif isinstance(value, ManagedTensor):
        value = plain_copy(value)
    if not isinstance(target, ManagedParameter):
        target.copy_(value)
        return
    if fill is not None:
        fill(slot_of(target), value)
    else:
        write_values(slot_of(target), value, model.manager)
    with torch._C.DisableTorchFunctionSubclass():
        increment_version(target)


def _kept(model: ManagedModel, value: torch.Tensor) -> torch.Tensor:
    """Return what is kept of a value that a hook has made, until it is written: in a file where there is a
    DISK tier, so that a hook that converts all weights needs no memory for them at once."""
    directory = model.manager.chunks.budgets.disk_dir
    if directory is None or value.device.type != "cpu":
        return value
    return MappedTensors(directory, value.numel() * value.element_size(), 1).copy(value)


def _full_value(model: ManagedModel, param: ManagedParameter, export: Place) -> torch.Tensor:
    """Return a copy of a parameter in fp32, in host memory: of its master where it has one."""
    dtype = torch.float32 if param.dtype.itemsize < 4 else param.dtype
    return read_values(slot_of(param), model.manager, export, dtype)
