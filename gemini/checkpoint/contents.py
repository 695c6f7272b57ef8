"""What a checkpoint holds: names of its files, what it says about the model it was made for, and which models
there can be one of."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from gemini.chunk.chunk import BLOCK_NUMEL, StateSpec, num_blocks
from gemini.comm.ranks import Rank
from gemini.errors import CheckpointError, ConfigError
from gemini.model.handle import ManagedModel, handle_of
from gemini.optim.gemini_optimizer import GeminiOptimizer
from gemini.optim.self_managed import driver_of
from gemini.runtime import ManagedParameter, ManagedSlot
from gemini.runtime.storage.model_storage import slot_of

BUFFERS = "model-buffers.safetensors"
MODEL_INDEX = "model.safetensors.index.json"
OPTIMIZER_INDEX = "optimizer.index.json"


class Scheduler(Protocol):
    """What a checkpoint needs of a learning-rate scheduler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def weights_file(number: int, count: int) -> str:
    """Return the name of a file with weights, as Hugging Face names it; ``number`` from 0."""
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def optimizer_file(rank: int, num_ranks: int, number: int) -> str:
    """Return the name of a file with optimizer states that a rank holds; ``number`` from 0."""
    return f"optimizer-rank-{rank:05d}-of-{num_ranks:05d}-{number + 1:05d}.safetensors"


def part_file(rank: int, num_ranks: int) -> str:
    """Return the name of the file in which a rank says what it wrote."""
    return f"rank-{rank:05d}-of-{num_ranks:05d}.json"


def part_of(rank: Rank) -> list[int] | None:
    """Return which part of a model ranks save or load, and of how many; None: the whole model."""
    return None if rank.parts is None else [rank.parts.index, rank.parts.count]


def range_name(param: str, state: str, start: int, stop: int) -> str:
    """Return the name, in its file, of elements ``[start, stop)`` of a parameter's optimizer state."""
    return f"{param}.{state}[{start}:{stop}]"


def weight_dtype(slot: ManagedSlot) -> torch.dtype:
    """Return the type in which a weight is saved: its fp32 master's, else its own but at least fp32."""
    own = slot.param_view.dtype
    return own if own.itemsize > 4 else torch.float32


def owned(slot: ManagedSlot) -> tuple[int, int]:
    """Return the elements ``[start, stop)`` of a parameter whose states this rank has."""
    start, stop = slot.start, slot.stop
    if slot.group.shard is not None:
        start, stop = slot.group.shard.clip(start, stop)
    return start - slot.start, stop - slot.start


def owned_span(slot: ManagedSlot, state: StateSpec) -> tuple[int, int]:
    """Return the values ``[start, stop)`` of a state of a parameter that this rank has: as :func:`owned`, or
    those of its blocks."""
    start, stop = owned(slot)
    if state.per_block and start < stop:
        return start // BLOCK_NUMEL, num_blocks(stop)
    return start, stop


def state_arrays(optimizer: GeminiOptimizer) -> dict[str, dict[str, list[Any]]]:
    """Return, of parameters of which something else is kept than fp32 values of all states, by the name of
    the state, of which type it is, and whether there is one for each block."""
    plain = tuple(map(StateSpec, optimizer.state_names))
    return {
        slot.name: {state.name: [state.type_name, state.per_block] for state in states}
        for slot in optimizer.steps
        if (states := optimizer.states_of(slot.group)) != plain
    }


def require_own_names(model: ManagedModel) -> None:
    """Raise CheckpointError where the module has another tensor under the name of a managed parameter, which
    was put there after wrapping: the file would hold one, and the model computes with the other."""
    slots = model.storage.slots
    state = model.module.state_dict(keep_vars=True)
    others = [name for name, value in state.items() if name in slots and _slot_of(value) is not slots[name]]
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise CheckpointError(
            f"the model's state has under {others[0]!r}{more} other tensors than at wrapping, so that "
            "their chunks are not what the model computes with: call gemini.handle_of(model).adopt() first, "
            "which manages what is new and lets go of what is gone. Weights alone are in model.state_dict() "
            "and Booster.save_model"
        )


def _slot_of(value: object) -> ManagedSlot | None:
    return slot_of(value) if isinstance(value, ManagedParameter) else None


def parameters(model: ManagedModel) -> dict[str, dict[str, list[int]]]:
    """Return shape and stride (in elements, of its memory order) of every parameter by name."""
    return {
        name: {"shape": list(slot.param_view.shape), "stride": list(slot.param_view.stride())}
        for name, slot in model.storage.slots.items()
    }


def group_members(optimizer: GeminiOptimizer) -> list[list[str]]:
    """Return the names of the parameters in each parameter group."""
    return [[param._slot.name for param in group["params"]] for group in optimizer.param_groups]


def buffers(model: ManagedModel) -> dict[str, torch.Tensor]:
    """Return the tensors of the module's state that are not managed."""
    state = model.module.state_dict(keep_vars=True)
    return {
        name: value
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and not isinstance(value, ManagedParameter)
    }


def extra_states(model: ManagedModel) -> dict[str, Any]:
    """Return what the module's ``get_extra_state`` methods add to its state."""
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
    """Return the handle of ``model``, and ``optimizer`` or, where it drives itself, its GeminiOptimizer.

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
    """Raise CheckpointError, on all of them, where ranks that hold different parts of a model name one
    directory: a checkpoint has one part, of the same names and shapes as the others."""
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
