"""Reading optimizer states made by torch or by us, without losing a bit and without aliasing them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, StateDict

from gemini.errors import ConfigError
from gemini.optim.state_format import ARRAYS, StateFormat, step_count

# What torch's Adam takes and we do not, with the values that ask for nothing.
TORCH_FLAGS = {
    "amsgrad": False,
    "foreach": None,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}
# Keys of torch's groups that mean nothing here once the two that change results are known to be off.
_UNSUPPORTED = ("amsgrad", "maximize")
_OF_THE_OPTIMIZER = (
    "state_dtype",
    "master_remainders",
    "nvme_offload_fraction",
    "nvme_offload_dir",
    "nvme_offload_checksums",
)
_TORCH_ONLY = (*TORCH_FLAGS, "decoupled_weight_decay")
STATE_KEYS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, eq=False)
class _Box:
    """Hides a value from ``Optimizer.load_state_dict``, which casts every tensor it sees."""

    value: Any


def refuse_flags(kind: str, flags: Mapping[str, Any]) -> None:
    """Refuse what ``kind`` was given beside its own arguments: a TypeError where torch has no such, a
    ConfigError for one of torch's that is not at its default."""
    for name in flags:
        if name not in TORCH_FLAGS:
            raise TypeError(f"{kind}() got an unexpected keyword argument {name!r}")
    for name, default in TORCH_FLAGS.items():
        if name in flags and flags[name] is not default:
            raise ConfigError(
                f"{kind}({name}={flags[name]!r}) is not supported, only {name}={default}; leave it out, or "
                "use torch.optim.AdamW for it"
            )


def torch_flags_in(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a group says of torch's own variants."""
    return {name: group[name] for name in TORCH_FLAGS if name in group}


def refuse_unsupported(group: Mapping[str, Any]) -> None:
    """Raise ConfigError when a group asks for a variant of Adam that the kernel does not do."""
    for name in _UNSUPPORTED:
        if group.get(name):
            raise ConfigError(f"{name}=True is not supported; use torch.optim.AdamW for it")
    for name in _OF_THE_OPTIMIZER:
        if name in group:
            raise ConfigError(f"{name} is a setting of the whole optimizer, not of a parameter group")


def require_complete(state: Mapping[str, Any], label: str) -> None:
    """Raise ConfigError when the state of ``label`` is neither empty nor that of an Adam."""
    missing = [name for name in STATE_KEYS if name not in state]
    if state and missing:
        raise ConfigError(f"the state of parameter {label} has no {', '.join(missing)}: not an Adam state")


def boxed_state_dict(_optimizer: Optimizer, state_dict: StateDict) -> StateDict:
    """Check a state dict and box its values (a load_state_dict pre-hook)."""
    for group in state_dict["param_groups"]:
        refuse_unsupported(group)
    numbers = numbers_of(state_dict)
    boxed = dict(state_dict["state"])
    for key in boxed.keys() & numbers:
        require_complete(boxed[key], str(key))
        boxed[key] = {name: _Box(value) for name, value in boxed[key].items()}
    return {**state_dict, "state": boxed}


def numbers_of(state_dict: StateDict) -> set[Any]:
    """Return the numbers of the parameters of a state dict; other keys of its state are the user's."""
    return {number for group in state_dict["param_groups"] for number in group["params"]}


def unboxed_state(state: Mapping[Any, Any], state_format: StateFormat) -> defaultdict[Any, Any]:
    """Return the states in our format; boxed ones, which have fp32 moments, are converted and copied."""
    result: defaultdict[Any, Any] = defaultdict(dict)
    for param, values in state.items():
        if not isinstance(param, torch.Tensor):
            result[param] = values
            continue
        if not any(isinstance(value, _Box) for value in values.values()):
            result[param] = dict(values)
            continue
        plain = {name: box.value for name, box in values.items()}
        result[param] = {
            "step": step_count(plain["step"]),
            **_others(plain),
            **state_format.imported(plain, param),
        }
    return result


def complete_groups(groups: list[dict[str, Any]], defaults: Mapping[str, Any]) -> None:
    """Give groups that torch made our keys, and take away those that have no meaning here."""
    for group in groups:
        decoupled = group.get("decoupled_weight_decay", defaults["adamw_mode"])
        group.setdefault("adamw_mode", decoupled)
        for name, value in defaults.items():
            group.setdefault(name, value)
        for name in _TORCH_ONLY:
            group.pop(name, None)


def _others(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of what a user keeps beside an Adam's state."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in state.items()
        if name != "step" and name not in ARRAYS
    }
