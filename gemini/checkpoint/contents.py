"""The contents of a checkpoint: names of its files and its description of the model. They are checked before
a checkpoint is sealed, and before anything is loaded from it.

Checksums have no key, so an edited checkpoint can have right checksums and wrong contents. File names must be
the format's own, because others could lead out of the directory. Checks raise ValueError, or Python's own
error for data of another type (see ``making_sense_of`` in sealed_file.py).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from operator import eq
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from gemini.chunk.chunk import BLOCK_NUMEL, StateSpec, num_blocks
from gemini.comm.ranks import Rank
from gemini.errors import CheckpointError, ConfigError
from gemini.model.handle import ManagedModel, handle_of
from gemini.optim.gemini_optimizer import GeminiOptimizer
from gemini.optim.self_managed import driver_of
from gemini.runtime import ManagedParameter
from gemini.runtime.intercept.tensors import ManagedTensor
from gemini.runtime.storage.model_storage import ManagedSlot, slot_of

BUFFERS = "model-buffers.safetensors"
MODEL_INDEX = "model.safetensors.index.json"
OPTIMIZER_INDEX = "optimizer.index.json"


class Scheduler(Protocol):
    """The methods of a learning-rate scheduler that a checkpoint uses."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def weights_file(number: int, count: int) -> str:
    """Return the name of a file of weights, as in Hugging Face; ``number`` from 0."""
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def optimizer_file(rank: int, num_ranks: int, number: int) -> str:
    """Return the name of a file with a rank's optimizer states; ``number`` from 0."""
    return f"optimizer-rank-{rank:05d}-of-{num_ranks:05d}-{number + 1:05d}.safetensors"


def part_file(rank: int, num_ranks: int) -> str:
    """Return the name of the file in which a rank describes its files."""
    return f"rank-{rank:05d}-of-{num_ranks:05d}.json"


def part_of(rank: Rank) -> list[int] | None:
    """Return [index, count] of the part of a model that these ranks save or load; None for a whole model."""
    return None if rank.parts is None else [rank.parts.index, rank.parts.count]


def range_name(param: str, state: str, start: int, stop: int) -> str:
    """Return the name, in its file, of elements ``[start, stop)`` of a parameter's optimizer state."""
    return f"{param}.{state}[{start}:{stop}]"


def weight_dtype(slot: ManagedSlot) -> torch.dtype:
    """Return the dtype in which a weight is saved: at least fp32 for floats; uint8 for the bytes of a
    quantized weight.
    """
    own = slot.param_view.dtype
    return own if own.itemsize > 4 or not own.is_floating_point else torch.float32


def owned(slot: ManagedSlot) -> tuple[int, int]:
    """Return the elements ``[start, stop)`` of a parameter with states on this rank."""
    start, stop = slot.start, slot.stop
    if slot.group.shard is not None:
        start, stop = slot.group.shard.clip(start, stop)
    return start - slot.start, stop - slot.start


def owned_span(slot: ManagedSlot, state: StateSpec) -> tuple[int, int]:
    """Return the values ``[start, stop)`` of a parameter's state on this rank: elements as in :func:`owned`,
    or the blocks that contain them.
    """
    start, stop = owned(slot)
    if state.per_block and start < stop:
        return start // BLOCK_NUMEL, num_blocks(stop)
    return start, stop


def state_arrays(optimizer: GeminiOptimizer) -> dict[str, dict[str, list[Any]]]:
    """Return {parameter: {state: [dtype, per block]}} for parameters with other states than fp32 values of
    all states.
    """
    plain = tuple(map(StateSpec, optimizer.state_names))
    return {
        slot.name: {state.name: [state.type_name, state.per_block] for state in states}
        for slot in optimizer.steps
        if (states := optimizer.states_of(slot)) != plain
    }


def require_own_names(model: ManagedModel) -> None:
    """Raise CheckpointError if the module has another tensor under the name of a managed parameter, put there
    after wrapping. The file would have one tensor, but the model computes with the other.
    """
    slots = model.storage.slots
    state = model.module.state_dict(keep_vars=True)
    others = [name for name, value in state.items() if name in slots and _slot_of(value) is not slots[name]]
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise CheckpointError(
            f"the model's state has other tensors under {others[0]!r}{more} than those that were wrapped, so "
            "their chunks do not hold the values of the model: first call "
            "gemini.handle_of(model).adopt(), which manages new parameters and releases removed "
            "ones. To save only weights, use model.state_dict() or Booster.save_model"
        )


def _slot_of(value: object) -> ManagedSlot | None:
    return slot_of(value) if isinstance(value, ManagedParameter) else None


def parameters(model: ManagedModel) -> dict[str, dict[str, Any]]:
    """Return shape and stride (in elements) of every parameter by name. A quantized parameter, saved as
    bytes, also has its quantization format.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, slot in model.storage.slots.items():
        found[name] = {"shape": list(slot.param_view.shape), "stride": list(slot.param_view.stride())}
        if slot.form is not None:
            found[name]["quantized"] = str(slot.form)
    return found


def group_members(optimizer: GeminiOptimizer) -> list[list[str]]:
    """Return the names of the parameters in each parameter group."""
    return [[param._slot.name for param in group["params"]] for group in optimizer.param_groups]


def buffers(model: ManagedModel) -> dict[str, torch.Tensor]:
    """Return the unmanaged tensors of the module's state. Tensors that bitsandbytes adds for a quantized
    weight, under names that begin with its name, are left out: they are part of its bytes.
    """
    state = model.module.state_dict(keep_vars=True)
    quantized = tuple(f"{name}." for name, slot in model.storage.slots.items() if slot.form is not None)
    return {
        name: value
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
        and not isinstance(value, (ManagedParameter, ManagedTensor))
        and not name.startswith(quantized)
    }


def extra_states(model: ManagedModel) -> dict[str, Any]:
    """Return the entries that ``get_extra_state`` methods add to the module's state."""
    state = model.module.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if not isinstance(value, torch.Tensor)}


def aliases(model: ManagedModel) -> dict[str, str]:
    """Return the further names of tied parameters, each with the name under which the parameter is stored."""
    state = model.module.state_dict(keep_vars=True)
    managed = {name: value._slot.name for name, value in state.items() if isinstance(value, ManagedParameter)}
    return {name: stored for name, stored in managed.items() if name != stored}


def checked_model(
    model: nn.Module | ManagedModel, optimizer: torch.optim.Optimizer
) -> tuple[ManagedModel, GeminiOptimizer]:
    """Return the handle of ``model``, and ``optimizer`` or, if it drives itself, its GeminiOptimizer.

    Raises:
        ConfigError: they are not a managed model and its optimizer.
    """
    handle, optimizer = handle_of(model), driver_of(optimizer)
    if not isinstance(optimizer, GeminiOptimizer):
        raise ConfigError(
            f"optimizer is a {type(optimizer).__name__}, not a GeminiOptimizer: a checkpoint has the chunks "
            "of a managed model; save plain ones with torch.save, or pass what was wrapped"
        )
    if optimizer.model is not handle:
        raise ConfigError("the optimizer updates another model than the one given")
    return handle, optimizer


def refuse_shared_directory(model: ManagedModel, directory: str | os.PathLike[str]) -> None:
    """Raise CheckpointError on all ranks if ranks with different parts of a model use the same directory: a
    checkpoint has one part, and all parts use the same names.
    """
    part = model.manager.part
    if part is None:
        return
    said = part.peers.say(str(Path(os.fsdecode(directory)).resolve()))
    if len(set(said)) < len(said):
        mine = said[part.peers.share.place]
        raise CheckpointError(
            f"{len(said)} ranks hold different parts of the model, and several name {mine}; give each a "
            "directory of its own, for example with mesh['tp'].get_local_rank() in its name"
        )


_MAX_DIMS = 64  # torch's limit
_STATES = re.compile(r"optimizer-rank-\d{5,}-of-\d{5,}-\d{5,}\.safetensors", re.ASCII)
_WEIGHTS = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors", re.ASCII)
_RANKS = re.compile(r"rank-\d{5,}-of-\d{5,}\.json", re.ASCII)
_OTHERS = (BUFFERS, MODEL_INDEX, OPTIMIZER_INDEX)

_STATE_TYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int16": torch.int16,
}

Ranges = dict[str, dict[str, list[list[Any]]]]


class ExpectedTensor(NamedTuple):
    """A tensor that a file must contain; ``fits`` returns whether a dtype is allowed."""

    shape: tuple[int, ...]
    fits: Callable[[torch.dtype], bool]


def check_file_name(name: str) -> None:
    """Raise ValueError if no file of a checkpoint may have this name."""
    if name not in _OTHERS and not any(kind.fullmatch(name) for kind in (_STATES, _WEIGHTS, _RANKS)):
        raise ValueError(f"{name!r} is no name of a checkpoint's file")


def check_manifest(manifest: Mapping[str, Any]) -> None:
    """Check a manifest, except for ``files`` and the entries that :func:`check_values` checks."""
    whole_number(manifest["step"])
    whole_number(manifest["ranks"], 1)
    if type(manifest["scheduler"]) is not bool:
        raise ValueError(f"scheduler is {manifest['scheduler']!r:.200}")
    for alias, stored in table(manifest["aliases"]).items():
        known = alias in manifest["parameters"] or alias in manifest["buffers"]
        if known or stored not in manifest["parameters"]:
            raise ValueError(f"{alias!r} is another name of {stored!r:.200}")
    _check_part(manifest.get("part"))
    _check_members(manifest)
    _check_loss_scale(manifest["loss_scale"])
    table(manifest["objects"])
    table(manifest["extra"])
    files = _rank_files(manifest)
    if manifest["ranks"] != len(files) or files != {part_file(n, len(files)) for n in range(len(files))}:
        raise ValueError(f"it has {manifest['ranks']!r:.200} ranks, and not the files of so many")


def kept_states(manifest: Mapping[str, Any]) -> list[str]:
    """Return the names of the per-element states of the saved optimizer. Old checkpoints, without the entry,
    are Adam's.
    """
    names = manifest.get("states", ["exp_avg", "exp_avg_sq"])
    if type(names) is not list or not all(type(name) is str and name.isidentifier() for name in names):
        raise ValueError(f"states are {names!r:.200}")
    return names


class StateArray(NamedTuple):
    """A saved state of a parameter: its dtype, and whether it has one value per block."""

    dtype: torch.dtype
    per_block: bool

    def numel(self, numel: int) -> int:
        """Return the number of values for a parameter of ``numel`` elements."""
        return num_blocks(numel) if self.per_block else numel


def arrays_of(manifest: Mapping[str, Any], param: str) -> dict[str, StateArray]:
    """Return the saved states of a parameter by name; without an entry they are fp32 values of all states.
    Raises ValueError if the entry is invalid.
    """
    said = manifest.get("state_arrays", {}).get(param)
    names = kept_states(manifest)
    if said is None:
        return dict.fromkeys(names, StateArray(torch.float32, False))
    if not table(said).keys() <= set(names):
        raise ValueError(f"{param!r} has states {sorted(said)!r:.200}, not of {sorted(names)!r:.200}")
    found = {}
    for name, (dtype, per_block) in said.items():
        if dtype not in _STATE_TYPES or type(per_block) is not bool:
            raise ValueError(f"{name} of {param!r} would be of {dtype!r:.200}, {per_block!r:.200}")
        found[name] = StateArray(_STATE_TYPES[dtype], per_block)
    return found


def check_values(manifest: Mapping[str, Any], weights: Mapping[str, str], states: Ranges) -> None:
    """Check that the index has every weight and buffer, and that the ranges of every state cover each element
    once.
    """
    parameters, buffers = table(manifest["parameters"]), table(manifest["buffers"])
    for entry in parameters.values():
        _check_dense(_shape(entry["shape"]), entry["stride"])
    for shape in buffers.values():
        _shape(shape)
    both = parameters.keys() & buffers.keys()
    if both:
        raise ValueError(f"{min(both)!r} is a parameter and a buffer")
    different = table(weights).keys() ^ (parameters.keys() | buffers.keys())
    if different:
        raise ValueError(f"{min(different)!r} is in one of its index and its manifest")
    for name, file in weights.items():
        if file != BUFFERS and not _WEIGHTS.fullmatch(file):
            raise ValueError(f"{name!r} would be in {file!r:.200}, which is no file of weights")
    stepped = table(manifest["optimizer_steps"])
    for name, count in stepped.items():
        whole_number(count)
        if name not in parameters:
            raise ValueError(f"{name!r} has optimizer states and is no parameter")
    if states.keys() != set(kept_states(manifest)):
        raise ValueError(f"it has states {sorted(states)!r:.200}, not {sorted(kept_states(manifest))!r:.200}")
    for name in table(manifest.get("state_arrays", {})):
        if name not in stepped:
            raise ValueError(f"{name!r} has types of states and has none")
    counts: dict[str, dict[str, int]] = {state: {} for state in states}
    for name in stepped:
        for state, array in arrays_of(manifest, name).items():
            counts[state][name] = array.numel(math.prod(parameters[name]["shape"]))
    for state, ranges in states.items():
        _check_ranges(state, ranges, counts[state])


def check_files(manifest: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Check that the files are those of ``expected`` (from :func:`expected_tensors`) and the format's own."""
    wanted = expected.keys() | _rank_files(manifest) | {MODEL_INDEX, OPTIMIZER_INDEX}
    different = wanted ^ manifest["files"].keys()
    if different:
        raise ValueError(f"{min(different)!r} is in one of its indexes and its manifest")


def expected_tensors(
    manifest: Mapping[str, Any], weights: Mapping[str, str], states: Ranges
) -> dict[str, dict[str, ExpectedTensor]]:
    """Return {file: {tensor name: expected tensor}} for all files of tensors."""
    found: dict[str, dict[str, ExpectedTensor]] = {}
    for name, file in weights.items():
        if name in manifest["parameters"]:
            entry = manifest["parameters"][name]
            fits = partial(eq, torch.uint8) if "quantized" in entry else _is_wide
            tensor = ExpectedTensor(tuple(entry["shape"]), fits)
        else:
            tensor = ExpectedTensor(tuple(manifest["buffers"][name]), lambda _dtype: True)
        found.setdefault(file, {})[name] = tensor
    for state, ranges in states.items():
        for param, pieces in ranges.items():
            dtype = arrays_of(manifest, param)[state].dtype
            for start, stop, file, name in pieces:
                if name in found.setdefault(file, {}):
                    raise ValueError(f"{name!r} of {file} stands for two ranges")
                found[file][name] = ExpectedTensor((stop - start,), partial(eq, dtype))
    return found


def check_tensors(
    held: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], expected: Mapping[str, ExpectedTensor]
) -> None:
    """Check dtype and shape of all tensors in a file."""
    different = held.keys() ^ expected.keys()
    if different:
        raise ValueError(f"{min(different)!r} is in one of the file and its index")
    for name, (dtype, shape) in held.items():
        wanted = expected[name]
        if shape != wanted.shape:
            raise ValueError(f"{name!r} has shape {list(shape)}, not {list(wanted.shape)}")
        if not wanted.fits(dtype):
            raise ValueError(f"{name!r} is of {dtype}")


def check_objects(objects: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
    """Check the decoded parameter groups, scheduler state and extra states."""
    groups = objects["param_groups"]
    if not isinstance(groups, list) or len(groups) != len(manifest["group_members"]):
        raise ValueError("it has other parameter groups than members of them")
    for group in groups:
        if "params" in table(group):
            raise ValueError("a parameter group has its parameters among its settings")
    if not manifest["scheduler"]:
        if objects["scheduler"] is not None:
            raise ValueError("it has a scheduler's state and no scheduler")
    elif not isinstance(objects["scheduler"], dict):
        raise ValueError("the scheduler's state is no dict")
    for name, state in table(objects.get("small_states", {})).items():
        if name not in manifest["optimizer_steps"]:
            raise ValueError(f"{name!r} has small states and has made no step")
        table(state)
    table(objects.get("attributes", {}))
    named = manifest["parameters"].keys() | manifest["buffers"].keys() | manifest["aliases"].keys()
    twice = table(objects["extra_states"]).keys() & named
    if twice:
        raise ValueError(f"{min(twice)!r} is a tensor and an extra state")


def table(value: Any) -> dict[str, Any]:
    """Return ``value`` if it is a dict with text keys. Raises ValueError."""
    if not isinstance(value, dict):
        raise ValueError(f"expected names, found {value!r:.200}")
    for name in value:
        if not isinstance(name, str) or not is_text(name):
            raise ValueError(f"{name!r:.200} is no name")
    return value


def is_text(name: str) -> bool:
    """Return whether a file can contain ``name``: unpaired surrogates cannot be encoded."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def whole_number(value: Any, least: int = 0) -> int:
    """Return ``value`` if it is an int from ``least`` to 2**63 - 1. Raises ValueError."""
    if type(value) is not int or not least <= value < 2**63:
        raise ValueError(f"expected a number, found {value!r:.200}")
    return value


def _is_wide(dtype: torch.dtype) -> bool:
    """Return whether a weight can be saved as ``dtype``: a float or complex type of at least 4 bytes."""
    return dtype.itemsize >= 4 and (dtype.is_floating_point or dtype.is_complex)


def _rank_files(manifest: Mapping[str, Any]) -> set[str]:
    return {name for name in manifest["files"] if _RANKS.fullmatch(name)}


def _check_part(part: Any) -> None:
    if part is not None:
        place, count = part
        whole_number(count, 2)
        if whole_number(place) >= count:
            raise ValueError(f"it is part {place} of {count}")


def _check_members(manifest: Mapping[str, Any]) -> None:
    members = [name for group in manifest["group_members"] for name in group]
    once = set(members)
    if len(once) != len(members) or not manifest["optimizer_steps"].keys() <= once:
        raise ValueError("a parameter is in no group, or in two")
    if not once <= manifest["parameters"].keys():
        raise ValueError("a parameter group has members that are no parameters")


def _check_loss_scale(value: Any) -> None:
    if value is None:
        return
    scale = value["scale"]
    if type(scale) not in (int, float) or not 0 < scale < math.inf:
        raise ValueError(f"the loss scale is {scale!r:.200}")
    whole_number(value["clean_steps"])
    whole_number(value["forgiven"], -(2**63))


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > _MAX_DIMS:
        raise ValueError(f"expected a shape, found {value!r:.200}")
    whole_number(math.prod(whole_number(size) for size in value))
    return tuple(value)


def _check_dense(shape: tuple[int, ...], stride: Any) -> None:
    """Raise ValueError unless ``stride`` is a permutation of a parameter's memory order, without holes."""
    if not isinstance(stride, list) or len(stride) != len(shape):
        raise ValueError(f"{stride!r:.200} is no stride of shape {list(shape)}")
    end = 1
    for step, size in sorted((whole_number(step), size) for step, size in zip(stride, shape, strict=True)):
        if size > 1 and step != end and 0 not in shape:
            raise ValueError(f"{stride!r:.200} is no order of the elements of shape {list(shape)}")
        end *= size


def _check_ranges(state: str, ranges: Mapping[str, list[list[Any]]], numel: Mapping[str, int]) -> None:
    """Raise ValueError unless the ranges of a state cover the elements of these parameters in order, each
    once.
    """
    unknown = table(ranges).keys() - numel.keys()
    if unknown:
        raise ValueError(f"{state} of {min(unknown)!r}: it has no states")
    for param, count in numel.items():
        end = 0
        for start, stop, file, name in ranges.get(param, ()):
            if whole_number(start) != end or whole_number(stop) <= start:
                raise ValueError(f"{state} of {param!r}: elements {end} to {start} are not there once")
            if not _STATES.fullmatch(file) or not isinstance(name, str):
                raise ValueError(f"{state} of {param!r} would be in {file!r:.200}: no file of states")
            end = stop
        if end != count:
            raise ValueError(f"{state} of {param!r} ends at element {end} of {count}")
