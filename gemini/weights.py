"""A managed model's weights as an ordinary state dict, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from gemini.errors import ConfigError
from gemini.offload.mapped import MappedTensors
from gemini.rank import rank_of
from gemini.runtime import ManagedParameter, read_values, write_values

if TYPE_CHECKING:
    from gemini.ddp import GeminiDDP


def export_weights(model: GeminiDDP, *args: Any, **options: Any) -> dict[str, Any]:
    """Return what :meth:`GeminiDDP.state_dict` does; the arguments are those of ``nn.Module.state_dict``."""
    model.manager.lock.refuse_all()
    model.storage.mixture.refuse("state_dict")
    model.manager.run_pending()
    state: dict[str, Any] = model.module.state_dict(*args, **{**options, "keep_vars": True})
    managed = {id(v): v for v in state.values() if isinstance(v, ManagedParameter)}
    directory = model.manager.chunks.budgets.disk_dir
    capacity = sum(p.numel() * max(4, p.element_size()) for p in managed.values())
    export = MappedTensors(directory, capacity, len(managed)) if directory is not None else None
    full: dict[int, torch.Tensor] = {}
    for key, value in state.items():
        if isinstance(value, ManagedParameter):
            if id(value) not in full:
                full[id(value)] = _full_value(model, value, export)
            state[key] = full[id(value)]
        elif isinstance(value, torch.Tensor):
            state[key] = value.detach().cpu()
    return state


def import_weights(model: GeminiDDP, state_dict: Mapping[str, Any], *, strict: bool) -> Any:
    """Do what :meth:`GeminiDDP.load_state_dict` does."""
    rank = rank_of(model)
    own: dict[str, Any] = model.module.state_dict(keep_vars=True)
    keys = rank.together(lambda: _checked_keys(own, state_dict, strict=strict))
    tensors = {key: value for key, value in own.items() if isinstance(value, torch.Tensor)}
    loaded = {_stored_name(key, value) for key, value in tensors.items() if key in state_dict}
    every = {_stored_name(key, value) for key, value in tensors.items()}
    rank.together(model.manager.run_pending)
    with model.storage.mixture.load(loaded, every):
        rank.together(lambda: _write(model, own, state_dict))
    return keys


def _checked_keys(own: Mapping[str, Any], state_dict: Mapping[str, Any], *, strict: bool) -> Any:
    for key, value in own.items():
        if isinstance(value, torch.Tensor) and key in state_dict:
            _check_loadable(key, state_dict[key], value)
    missing = [key for key in own if key not in state_dict]
    unexpected = [key for key in state_dict if key not in own]
    if strict and (missing or unexpected):
        raise RuntimeError(f"load_state_dict: missing keys {missing}, unexpected keys {unexpected}")
    return nn.modules.module._IncompatibleKeys(missing, unexpected)


def _stored_name(key: str, value: torch.Tensor) -> str:
    """Return the one name of a parameter, tied ones included, or a buffer's."""
    return value._slot.name if isinstance(value, ManagedParameter) else key


@torch.no_grad()
def _write(model: GeminiDDP, own: Mapping[str, Any], state_dict: Mapping[str, Any]) -> None:
    """Copy what is there into chunks and buffers. Over several ranks each writes what it owns."""
    managed = {key: value for key, value in own.items() if isinstance(value, ManagedParameter)}
    for key, param in managed.items():
        if key in state_dict:
            write_values(param._slot, state_dict[key], model.manager)
            with torch._C.DisableTorchFunctionSubclass():
                increment_version(param)
    rest = {key: value for key, value in state_dict.items() if key in own and key not in managed}
    model.module.load_state_dict(rest, strict=False)


def _full_value(model: GeminiDDP, param: ManagedParameter, export: MappedTensors | None) -> torch.Tensor:
    """Return a copy of a parameter in fp32, in host memory: of its master where it has one."""
    value = read_values(param._slot, model.manager)
    value = (value.float() if value.dtype.itemsize < 4 else value).cpu()
    return export.copy(value) if export else value


def _check_loadable(key: str, value: Any, target: torch.Tensor) -> None:
    if not isinstance(value, torch.Tensor):
        raise ConfigError(f"{key!r} is a {type(value).__name__} in the state but a tensor in the model")
    if value.shape != target.shape:
        raise ConfigError(
            f"{key!r} has shape {tuple(value.shape)} in the state but {tuple(target.shape)} in the model"
        )
