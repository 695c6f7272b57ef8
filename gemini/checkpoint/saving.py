"""Saving everything, streamed chunk by chunk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gemini.checkpoint import contents, plain_data, rng
from gemini.checkpoint.contents import Scheduler
from gemini.checkpoint.directory import NewCheckpoint, new_checkpoint
from gemini.checkpoint.tensor_file import TensorSource, resident_source, write_tensors
from gemini.checkpoint.values import moment_source, weight_source
from gemini.ddp import GeminiDDP
from gemini.errors import CheckpointError
from gemini.optim.gemini_optimizer import GeminiOptimizer


def save(
    directory: str | os.PathLike[str],
    model: GeminiDDP,
    optimizer: GeminiOptimizer,
    *,
    scheduler: Scheduler | None = None,
    extra: dict[str, Any] | None = None,
) -> Path:
    """Write everything a bit-exact resume needs; return the checkpoint's directory below ``directory``.

    Call it between steps. Weights (fp32, masters where there are any) are safetensors with a Hugging Face
    index, readable without this library; moments are safetensors. Values pass from their chunk to the file:
    extra memory is at most one parameter. Only the user can read the files. The last checkpoint is kept,
    older ones are removed; a failure or a kill leaves the previous one.

    Args:
        extra: whatever else the training program needs: JSON data (numbers, text, lists, dicts with text
            keys).

    Raises:
        IoError: the directory cannot be written, or a chunk cannot be read.
        CheckpointError: gradients are pending, ``extra`` is not JSON data, the scheduler's state holds
            objects that cannot be saved, or another process is saving in ``directory``.
    """
    optimizer.require_complete("save")
    _refuse_pending_gradients(model)
    model.manager.recover()  # an operator that raised may have left chunks pinned
    extra = {} if extra is None else extra
    _check_json(extra, "extra")
    manifest = _manifest(model, optimizer, scheduler, extra)
    with new_checkpoint(directory, model.manager.step) as checkpoint:
        weight_map = _save_weights(checkpoint, model)
        _save_moments(checkpoint, model, optimizer)
        total = sum(source.nbytes for source in _weight_sources(model) + _buffer_sources(model))
        checkpoint.add_json(contents.INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        checkpoint.finish(manifest)
    return checkpoint.path.with_suffix("")


def _manifest(
    model: GeminiDDP, optimizer: GeminiOptimizer, scheduler: Scheduler | None, extra: dict[str, Any]
) -> dict[str, Any]:
    return {
        "step": model.manager.step,
        "parameters": contents.parameter_shapes(model),
        "buffers": {name: list(value.shape) for name, value in contents.buffers(model).items()},
        "optimizer_steps": {slot.name: count for slot, count in optimizer.steps.items()},
        "group_members": contents.group_members(optimizer),
        "loss_scale": optimizer.loss_scale.state_dict() if optimizer.loss_scale is not None else None,
        "scheduler": scheduler is not None,
        "rng": rng.capture(),
        "objects": _objects(model, optimizer, scheduler),
        "extra": extra,
    }


def _refuse_pending_gradients(model: GeminiDDP) -> None:
    pending = [name for name, slot in model.storage.slots.items() if slot.has_grad]
    if pending:
        raise CheckpointError(
            f"{len(pending)} parameters have gradients (first {pending[0]!r}) and a checkpoint holds none: "
            "save after optimizer.step(), or give the gradients up with optimizer.zero_grad()"
        )


def _save_weights(checkpoint: NewCheckpoint, model: GeminiDDP) -> dict[str, str]:
    """Write one file per parameter chunk, and one for buffers; return which file holds which name."""
    weight_map: dict[str, str] = {}
    tied = contents.aliases(model)
    for number, group in enumerate(model.storage.groups):
        name = contents.weights_file(number)
        sources = [weight_source(model, slot) for slot in group.slots]
        stored = {source.name for source in sources}
        # As safetensors.torch.save_model does it: its load_model ties them again.
        metadata = {alias: kept for alias, kept in tied.items() if kept in stored}
        with checkpoint.file(name) as file:
            write_tensors(file, sources, metadata)
        weight_map.update(dict.fromkeys(stored, name))
    sources = _buffer_sources(model)
    if sources:
        with checkpoint.file(contents.BUFFERS) as file:
            write_tensors(file, sources, {})
        weight_map.update(dict.fromkeys((source.name for source in sources), contents.BUFFERS))
    return weight_map


def _save_moments(checkpoint: NewCheckpoint, model: GeminiDDP, optimizer: GeminiOptimizer) -> None:
    for number, group in enumerate(model.storage.groups):
        slots = [slot for slot in group.slots if slot in optimizer.steps]
        if not slots:
            continue
        for moment, kind in contents.MOMENTS.items():
            with checkpoint.file(contents.moment_file(moment, number)) as file:
                write_tensors(file, [moment_source(model, slot, kind) for slot in slots], {})


def _weight_sources(model: GeminiDDP) -> list[TensorSource]:
    return [weight_source(model, slot) for slot in model.storage.slots.values()]


def _buffer_sources(model: GeminiDDP) -> list[TensorSource]:
    return [resident_source(name, value) for name, value in contents.buffers(model).items()]


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


def _objects(model: GeminiDDP, optimizer: GeminiOptimizer, scheduler: Scheduler | None) -> Any:
    """Return param groups and the scheduler's and modules' own states as JSON data that keeps their types."""
    groups = [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    return {
        "param_groups": plain_data.encode(groups, "a parameter group"),
        "scheduler": plain_data.encode(
            scheduler.state_dict() if scheduler is not None else None, "the scheduler's state"
        ),
        "extra_states": plain_data.encode(contents.extra_states(model), "a module's extra state"),
    }
