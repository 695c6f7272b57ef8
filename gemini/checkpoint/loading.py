"""Resuming from a checkpoint, streamed one parameter at a time."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gemini.checkpoint import contents, rng
from gemini.checkpoint.contents import Scheduler
from gemini.checkpoint.directory import complete_checkpoints, latest, no_checkpoint
from gemini.checkpoint.rank import Rank, rank_of
from gemini.checkpoint.reader import CheckpointReader
from gemini.checkpoint.sealed_file import DamagedError
from gemini.ddp import GeminiDDP
from gemini.errors import CheckpointError
from gemini.optim.gemini_optimizer import GeminiOptimizer
from gemini.optim.state_exchange import write_state, write_state_range
from gemini.runtime import write_range, write_values

logger = logging.getLogger(__name__)


def load(
    directory: str | os.PathLike[str],
    model: GeminiDDP,
    optimizer: GeminiOptimizer,
    *,
    scheduler: Scheduler | None = None,
) -> dict[str, Any]:
    """Resume from the newest whole checkpoint in ``directory``; return its ``extra``.

    Restores weights, masters, moments, step counts, parameter groups, loss scale, scheduler, buffers and
    random number generators, and gives pending gradients up. The budgets, policy, chunk size, precision and
    number of ranks may be others than when it was saved. Every file is read twice: its checksum is compared
    before anything changes. Where that finds damage, the checkpoint before is taken, with a warning in the
    log. ``directory`` may also be one checkpoint. Extra memory: 16 MiB, or one parameter where its memory is
    not in the order of rows.

    Raises:
        CheckpointError: there is none, all are damaged (the message says what is wrong with the newest), or
            it was made for another model or without a scheduler; nothing was changed.
        IoError: a chunk could not be read or written; repeat the load.
    """
    rank = rank_of(model)
    damaged: dict[Path, DamagedError] = {}
    while True:
        found = _newest_whole(directory, damaged, rank)
        try:
            return _load_once(found, model, optimizer, scheduler)
        except DamagedError as error:  # a save in another process may have removed it
            if rank.count > 1:
                raise
            damaged[found] = error


def _newest_whole(directory: str | os.PathLike[str], damaged: dict[Path, DamagedError], rank: Rank) -> Path:
    """Return the newest checkpoint whose files have their checksums; add to ``damaged`` what is not whole.

    All ranks return the same one, which rank 0 has found; each has read a part of the files.
    """

    def candidate() -> str:
        if rank.index:
            return ""
        left = [path for path in complete_checkpoints(directory) if path not in damaged]
        if not left:
            raise next(iter(damaged.values()), no_checkpoint(directory))
        return str(left[0])

    def damage() -> str:
        try:
            with CheckpointReader(found) as reader:
                reader.verify(rank.index, rank.count)
        except DamagedError as error:
            return str(error)
        return ""

    while True:
        found = Path(rank.agree(candidate))
        reasons = [text for text in rank.collect(damage) if text]
        if not reasons:
            return found
        damaged[found] = DamagedError(reasons[0])
        logger.warning("%s; looking for another checkpoint", reasons[0])


def is_complete(directory: str | os.PathLike[str]) -> bool:
    """Say whether ``directory`` holds a checkpoint whose files are all there, by name and size."""
    try:
        latest(directory)
    except CheckpointError:
        return False
    return True


def _load_once(
    checkpoint: Path, model: GeminiDDP, optimizer: GeminiOptimizer, scheduler: Scheduler | None
) -> dict[str, Any]:
    with CheckpointReader(checkpoint) as reader:
        manifest = reader.manifest
        _check_model(checkpoint, manifest, model, optimizer)
        if scheduler is not None and not manifest["scheduler"]:
            raise CheckpointError(
                f"{checkpoint} was saved without a scheduler; pass the same to save() and load()"
            )
        rank = rank_of(model)
        objects, generators = reader.objects(), reader.rng(rank.index, rank.count)
        model.manager.snapshot.before_write()
        optimizer.zero_grad()
        _load_weights(reader, model, objects["extra_states"])
        _load_moments(reader, model, optimizer)
    for group, saved in zip(optimizer.param_groups, objects["param_groups"], strict=True):
        group.update(saved)
    if optimizer.loss_scale is not None and manifest["loss_scale"] is not None:
        optimizer.loss_scale.load_state_dict(manifest["loss_scale"])
    if scheduler is not None:
        scheduler.load_state_dict(objects["scheduler"])
    optimizer.mark_complete()
    model.manager.step = int(manifest["step"])
    rng.restore(generators)
    extra: dict[str, Any] = manifest["extra"]
    return extra


def _check_model(
    checkpoint: Path, manifest: Mapping[str, Any], model: GeminiDDP, optimizer: GeminiOptimizer
) -> None:
    shapes = {name: entry["shape"] for name, entry in manifest["parameters"].items()}
    own_shapes = {name: entry["shape"] for name, entry in contents.parameters(model).items()}
    _compare(checkpoint, "parameter", shapes, own_shapes)
    buffers = {name: list(value.shape) for name, value in contents.buffers(model).items()}
    _compare(checkpoint, "buffer", manifest["buffers"], buffers)
    frozen = [name for name in manifest["optimizer_steps"] if model.storage.slots[name].group.grad is None]
    if frozen:
        raise CheckpointError(
            f"{checkpoint} holds optimizer states of {frozen[0]!r} and {len(frozen) - 1} more parameters "
            "that are frozen here"
        )
    saved, own = manifest["group_members"], contents.group_members(optimizer)
    if saved != own:
        raise CheckpointError(
            f"{checkpoint} has parameter groups of {[len(group) for group in saved]} parameters, the "
            f"optimizer of {[len(group) for group in own]}, or in another order; build it as it was then"
        )


def _compare(
    checkpoint: Path, what: str, saved: Mapping[str, list[int]], own: Mapping[str, list[int]]
) -> None:
    different = sorted(name for name in own.keys() | saved.keys() if own.get(name) != saved.get(name))
    if different:
        name = different[0]
        raise CheckpointError(
            f"{checkpoint} was made for another model: {len(different)} {what}s differ, first {name!r} with "
            f"shape {saved.get(name)} there and {own.get(name)} here"
        )


@torch.no_grad()
def _load_weights(reader: CheckpointReader, model: GeminiDDP, extra_states: Mapping[str, Any]) -> None:
    """Copy weights into their chunks, and buffers and extra states into the module."""
    others = dict(extra_states)
    slots = model.storage.slots  # in their order in the files, if it was saved with this layout
    for name in (*slots, *(reader.weights.keys() - slots.keys())):
        if name in slots and slots[name].param_view.is_contiguous():
            for first, values in reader.weight_pieces(name):
                write_range(slots[name], first, values, model.manager)
        elif name in slots:
            write_values(slots[name], reader.weight(name), model.manager)
        else:
            others[name] = reader.weight(name)
    if others:
        model.module.load_state_dict(others, strict=False)


@torch.no_grad()
def _load_moments(reader: CheckpointReader, model: GeminiDDP, optimizer: GeminiOptimizer) -> None:
    slots = model.storage.slots
    counts = {slots[name]: int(count) for name, count in reader.manifest["optimizer_steps"].items()}
    for slot in optimizer.steps.keys() - counts.keys():
        for kind in contents.MOMENTS.values():  # it starts anew, as it had when this checkpoint was saved
            write_state(optimizer, slot, kind, torch.zeros(()))
    optimizer.steps = counts
    for slot in (slot for slot in slots.values() if slot in counts):
        for state, kind in contents.MOMENTS.items():
            if reader.stride(slot.name) == slot.param_view.stride():
                for first, values in reader.state_pieces(state, slot.name, *contents.owned(slot)):
                    write_state_range(optimizer, slot, kind, first, values)
            else:
                write_state(optimizer, slot, kind, reader.state(state, slot.name))
