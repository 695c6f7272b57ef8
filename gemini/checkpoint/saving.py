"""Saving everything, streamed chunk by chunk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemini.checkpoint import contents, plain_data
from gemini.checkpoint.arguments import checked_model, refuse_shared_directory
from gemini.checkpoint.blocks import CheckpointFiles
from gemini.checkpoint.contents import Scheduler
from gemini.checkpoint.tensor_file import TensorSpec, require_holdable, require_strided
from gemini.checkpoint.writer import new_checkpoint
from gemini.comm.rank import Rank
from gemini.errors import CheckpointError, ConfigError
from gemini.model.managed_model import ManagedModel
from gemini.optim.gemini_optimizer import GeminiOptimizer
from gemini.runtime import refresh_master
from gemini.system import rng
from gemini.system.config import parse_bytes
from gemini.system.profiling import shown_as

SHARD_BYTES = "4GiB"


@shown_as("save")
@torch.no_grad()
def save(
    directory: str | os.PathLike[str],
    model: nn.Module | ManagedModel,
    optimizer: GeminiOptimizer,
    *,
    scheduler: Scheduler | None = None,
    extra: dict[str, Any] | None = None,
    keep: int = 2,
    shard_bytes: int | str = SHARD_BYTES,
) -> Path:
    """Write everything a bit-exact resume needs; return the checkpoint's directory below ``directory``.

    Call it between steps. Weights (fp32, masters where there are any) are safetensors with a Hugging Face
    index, readable without this library; so are moments, as ranges of flat parameters. Large values are
    written from their chunks, others through 16 MiB of staging; a parameter whose memory is not in the order
    of rows is held whole for a moment. Only the user can read the files. A failure or a kill leaves the
    earlier checkpoints. Over several ranks all of them call it, with one directory that all see; each writes
    what it holds.

    Args:
        extra: whatever else the training program needs: JSON data (numbers, text, lists, dicts with text
            keys).
        keep: how many checkpoints stay, this one included: :func:`load` falls back to an older one where the
            newest is damaged. While this one is written there is one more.
        shard_bytes: the most that a file holds, but at least one tensor.

    Raises:
        IoError: the directory cannot be written, or a chunk cannot be read.
        CheckpointError: gradients are pending, ``extra`` is not JSON data, the scheduler's state holds
            objects that cannot be saved, a parameter was replaced after wrapping, or another process is
            saving in ``directory``.
    """
    model = checked_model(model, optimizer)
    refuse_shared_directory(model, directory)
    shard = checked_shard_bytes(shard_bytes)
    rank = model.rank()
    manifest = prepare(rank, model, optimizer, scheduler, extra)
    with new_checkpoint(directory, model.manager.step, rank=rank, keep=keep) as writer:
        writer.describe(manifest, rng.capture())
        for block in CheckpointFiles(writer, model, optimizer, shard).blocks():
            with model.manager.operator(block.tensors):
                block.write()
    return writer.final


def prepare(
    rank: Rank,
    model: ManagedModel,
    optimizer: GeminiOptimizer,
    scheduler: Scheduler | None,
    extra: dict[str, Any] | None,
) -> dict[str, Any]:
    """Bring the model into a state that can be saved, on all ranks; return the manifest. Raises as
    :func:`save`, on all where it cannot be done on one."""
    manifest: dict[str, Any] = {}

    def make() -> str:
        manifest.update(_prepared(model, optimizer, scheduler, extra))
        return ""

    rank.agree(make)
    return manifest


def _prepared(
    model: ManagedModel,
    optimizer: GeminiOptimizer,
    scheduler: Scheduler | None,
    extra: dict[str, Any] | None,
) -> dict[str, Any]:
    model.manager.snapshot.close(finish=True)
    optimizer.require_complete("save")
    _refuse_pending_gradients(model)
    model.manager.recover()  # an operator that raised may have left chunks pinned
    contents.require_own_names(model)
    extra = {} if extra is None else extra
    _check_json(extra, "extra")
    _check_tensors(model)
    for slot in model.storage.slots.values():
        refresh_master(slot, model.manager)
    if model.manager.sharding is not None:
        model.manager.sharding.write_all_back()
    return {
        "step": model.manager.step,
        "parameters": contents.parameters(model),
        "aliases": contents.aliases(model),
        "buffers": {name: list(value.shape) for name, value in contents.buffers(model).items()},
        "optimizer_steps": {slot.name: count for slot, count in optimizer.steps.items()},
        "states": list(optimizer.state_names),
        "state_arrays": contents.state_arrays(optimizer),
        "group_members": contents.group_members(optimizer),
        "loss_scale": optimizer.loss_scale.state_dict() if optimizer.loss_scale is not None else None,
        "scheduler": scheduler is not None,
        "objects": _objects(model, optimizer, scheduler),
        "extra": extra,
    }


def checked_shard_bytes(shard_bytes: int | str) -> int:
    """Return bytes. Raises ConfigError."""
    found = parse_bytes(shard_bytes, name="shard_bytes")
    if not found or found < 1:
        raise ConfigError(f"shard_bytes is {shard_bytes!r}; a file holds 1 byte or more, as in '4GiB'")
    return found


def _refuse_pending_gradients(model: ManagedModel) -> None:
    pending = [name for name, slot in model.storage.slots.items() if slot.has_grad]
    if pending:
        raise CheckpointError(
            f"{len(pending)} parameters have gradients (first {pending[0]!r}) and a checkpoint holds none: "
            "save after optimizer.step(), or give the gradients up with optimizer.zero_grad()"
        )


def _check_tensors(model: ManagedModel) -> None:
    """Raise CheckpointError for what no file can hold, before anything is written."""
    tensors = [
        TensorSpec(slot.name, contents.weight_dtype(slot), tuple(slot.param_view.shape))
        for slot in model.storage.slots.values()
    ]
    for name, value in contents.buffers(model).items():
        require_strided(name, value)
        tensors.append(TensorSpec(name, value.dtype, tuple(value.shape)))
    require_holdable(tensors, contents.aliases(model))


def _check_json(value: object, where: str) -> None:
    """Raise CheckpointError unless JSON gives ``value`` back as it is (tuples become lists)."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check_json(item, f"{where}[{index}]")
        return
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{where} is a {type(value).__name__}; it must be numbers, text, lists or dicts"
        )
    for key, item in value.items():
        if not isinstance(key, str):
            raise CheckpointError(f"{where} has the key {key!r}; keys must be text")
        _check_json(item, f"{where}[{key!r}]")


def _objects(model: ManagedModel, optimizer: GeminiOptimizer, scheduler: Scheduler | None) -> Any:
    """Return param groups and the scheduler's and modules' own states as JSON data that keeps their types."""
    groups = [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    return {
        "param_groups": plain_data.encode(groups, "a parameter group"),
        "scheduler": plain_data.encode(
            scheduler.state_dict() if scheduler is not None else None, "the scheduler's state"
        ),
        "small_states": plain_data.encode(
            {slot.name: state for slot, state in optimizer.small.items()}, "the optimizer's state"
        ),
        "extra_states": plain_data.encode(contents.extra_states(model), "a module's extra state"),
    }
