"""Resuming from a checkpoint, streamed one parameter at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from gemini.checkpoint import contents, plain_data, rng
from gemini.checkpoint.contents import Scheduler
from gemini.checkpoint.directory import check_files, latest_checkpoint, read_manifest
from gemini.ddp import GeminiDDP
from gemini.errors import CheckpointError
from gemini.optim.gemini_optimizer import GeminiOptimizer
from gemini.optim.state_exchange import write_state
from gemini.runtime import write_values

# A save in another process may remove the checkpoint that is being read; then the newer one is read instead.
_ATTEMPTS = 3


def load(
    directory: str | os.PathLike[str],
    model: GeminiDDP,
    optimizer: GeminiOptimizer,
    *,
    scheduler: Scheduler | None = None,
) -> dict[str, Any]:
    """Resume from the last complete checkpoint in ``directory``; return its ``extra``.

    Restores weights, masters, moments, step counts, parameter groups, loss scale, scheduler, buffers and
    random number generators, and gives pending gradients up. The budgets, policy, chunk size and precision
    may be others than when it was saved. Every file is read twice: its checksum is compared before anything
    changes. Extra memory: one parameter.

    Raises:
        CheckpointError: there is none, it is damaged, or it was made for another model or without a
            scheduler; nothing was changed.
        IoError: a chunk could not be read or written; repeat the load.
    """
    for attempt in range(_ATTEMPTS):
        checkpoint = latest_checkpoint(directory)
        try:
            return _load_once(directory, model, optimizer, scheduler)
        except CheckpointError:
            if attempt == _ATTEMPTS - 1 or latest_checkpoint(directory) == checkpoint:
                raise
    raise AssertionError("unreachable")


def is_complete(directory: str | os.PathLike[str]) -> bool:
    """Say whether ``directory`` holds a checkpoint whose files are all there, by name and size."""
    try:
        read_manifest(directory)
    except CheckpointError:
        return False
    return True


def _load_once(
    directory: str | os.PathLike[str],
    model: GeminiDDP,
    optimizer: GeminiOptimizer,
    scheduler: Scheduler | None,
) -> dict[str, Any]:
    checkpoint, manifest = read_manifest(directory)
    _check_model(checkpoint, manifest, model, optimizer)
    if scheduler is not None and not manifest["scheduler"]:
        raise CheckpointError(
            f"{checkpoint} was saved without a scheduler; pass the same to save() and load()"
        )
    check_files(checkpoint, manifest, content=True)
    objects = {name: plain_data.decode(data) for name, data in manifest["objects"].items()}
    optimizer.zero_grad()
    _load_weights(checkpoint, manifest, model)
    _load_plain_state(checkpoint, manifest, model, objects["extra_states"])
    _load_moments(checkpoint, manifest, model, optimizer)
    for group, saved in zip(optimizer.param_groups, objects["param_groups"], strict=True):
        group.update(saved)
    if optimizer.loss_scale is not None and manifest["loss_scale"] is not None:
        optimizer.loss_scale.load_state_dict(manifest["loss_scale"])
    if scheduler is not None:
        scheduler.load_state_dict(objects["scheduler"])
    optimizer.mark_complete()
    model.manager.step = int(manifest["step"])
    rng.restore(manifest["rng"])
    extra: dict[str, Any] = manifest["extra"]
    return extra


def _check_model(
    checkpoint: Path, manifest: Mapping[str, Any], model: GeminiDDP, optimizer: GeminiOptimizer
) -> None:
    _compare(checkpoint, "parameter", manifest["parameters"], contents.parameter_shapes(model))
    shapes = {name: list(value.shape) for name, value in contents.buffers(model).items()}
    _compare(checkpoint, "buffer", manifest["buffers"], shapes)
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


def _tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a file one at a time, mapped from it."""
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


@torch.no_grad()
def _load_weights(checkpoint: Path, manifest: Mapping[str, Any], model: GeminiDDP) -> None:
    for file in _files(manifest, "model-"):
        if file == contents.BUFFERS:
            continue
        for name, values in _tensors(checkpoint / file):
            write_values(model.storage.slots[name], values, model.manager)


def _load_plain_state(
    checkpoint: Path, manifest: Mapping[str, Any], model: GeminiDDP, extra_states: Mapping[str, Any]
) -> None:
    state = dict(extra_states)
    if contents.BUFFERS in manifest["files"]:
        state.update(_tensors(checkpoint / contents.BUFFERS))
    if state:
        model.module.load_state_dict(state, strict=False)


@torch.no_grad()
def _load_moments(
    checkpoint: Path, manifest: Mapping[str, Any], model: GeminiDDP, optimizer: GeminiOptimizer
) -> None:
    slots = model.storage.slots
    stale = optimizer.steps.keys() - {slots[name] for name in manifest["optimizer_steps"]}
    for slot in stale:  # it starts anew, as it had when this checkpoint was saved
        for kind in contents.MOMENTS.values():
            write_state(optimizer, slot, kind, torch.zeros(()))
    optimizer.steps = {slots[name]: int(count) for name, count in manifest["optimizer_steps"].items()}
    for moment, kind in contents.MOMENTS.items():
        # "exp_avg-" is no beginning of "exp_avg_sq-..."
        for file in _files(manifest, f"{moment}-"):
            for name, values in _tensors(checkpoint / file):
                write_state(optimizer, slots[name], kind, values)


def _files(manifest: Mapping[str, Any], prefix: str) -> list[str]:
    return sorted(
        name for name in manifest["files"] if name.startswith(prefix) and name.endswith(".safetensors")
    )
