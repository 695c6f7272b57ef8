"""Files of an optimizer and of a learning-rate scheduler."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gemini.checkpoint import contents, plain_data
from gemini.checkpoint.contents import Scheduler
from gemini.checkpoint.sealed_file import making_sense_of
from gemini.errors import CheckpointError, ConfigError, in_words
from gemini.optim.gemini_optimizer import GeminiOptimizer
from gemini.optim.state_exchange import counted_steps, exported_state, present_states
from gemini.parallel.booster.checkpoint.sources import OWN_METADATA, Names, TensorFiles
from gemini.parallel.booster.checkpoint.tensor_source import TensorSource, copied_source, whole_source
from gemini.parallel.booster.checkpoint.writing import FileLayout, save_tensors, save_text
from gemini.parallel.booster.checkpoint.zero import state_sources
from gemini.parallel.booster.data_parallel import like
from gemini.parallel.booster.ranks import Ranks
from gemini.parallel.zero import LowLevelZeroOptimizer
from gemini.runtime.storage.model_storage import ManagedSlot
from gemini.system.files import KEY, Format, parse_json, read_regular

_METADATA = OWN_METADATA + "optimizer"


@dataclass(frozen=True)
class OptimizerContents:
    """The contents of an optimizer's files.

    Attributes:
        sources: states that are tensors, named ``<parameter>/<state>``.
        values: the other states, by parameter and name.
        groups: the settings of the groups, without their parameters.
        rest: further entries of the state dict.
    """

    sources: list[TensorSource]
    values: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]
    rest: dict[str, Any]


def save_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Names,
    checkpoint: str | os.PathLike[str],
    layout: FileLayout,
    ranks: Ranks,
) -> None:
    """Write an optimizer; see :meth:`Booster.save_optimizer`."""
    members = group_members(optimizer, names)
    if isinstance(optimizer, GeminiOptimizer):
        held = _managed_contents(optimizer)
    elif isinstance(optimizer, LowLevelZeroOptimizer):
        held = _sharded_contents(optimizer, names)
    else:
        held = _contents(optimizer, members)
    save_contents(held, members, checkpoint, layout, ranks)


def save_contents(
    held: OptimizerContents,
    members: Sequence[Sequence[str]],
    checkpoint: str | os.PathLike[str],
    layout: FileLayout,
    ranks: Ranks,
) -> None:
    """Write the contents of an optimizer with groups of these ``members``. Collective."""
    document = {
        "members": members,
        "groups": plain_data.encode(held.groups, "a parameter group"),
        "values": plain_data.encode(held.values, "the optimizer's state"),
        "rest": plain_data.encode(held.rest, "the optimizer's state"),
    }
    save_tensors(checkpoint, "optimizer", held.sources, {_METADATA: json.dumps(document)}, layout, ranks)


def load_optimizer(
    optimizer: torch.optim.Optimizer, names: Names, checkpoint: str | os.PathLike[str], ranks: Ranks
) -> None:
    """Read an optimizer; see :meth:`Booster.load_optimizer`."""
    members = group_members(optimizer, names)
    with ExitStack() as stack:

        def read() -> dict[str, Any]:
            files = stack.enter_context(TensorFiles(checkpoint))
            with making_sense_of(Path(checkpoint)):
                return _state_for(optimizer, members, files, checkpoint)

        state = ranks.together(read)  # collective, as in load_model
        try:
            optimizer.load_state_dict(state)
        except (ConfigError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{checkpoint} does not fit {type(optimizer).__name__}: {in_words(error)}"
            ) from error


def group_members(optimizer: torch.optim.Optimizer, names: Names) -> list[list[str]]:
    """Return the names of the parameters in each group.

    Raises:
        ConfigError: a parameter does not belong to the model, or has the name of a parameter that it
            replaced.
        CheckpointError: the tensors of a managed model were exchanged.
    """
    if isinstance(optimizer, GeminiOptimizer):
        contents.require_own_names(optimizer.model)
    groups: Iterable[Iterable[torch.Tensor]] = [group["params"] for group in optimizer.param_groups]
    if isinstance(optimizer, LowLevelZeroOptimizer):  # its groups hold parts of the parameters
        groups = [[shard.param for shard in group] for group in optimizer.sharded.groups]
    try:
        members = [[names[param] for param in group] for group in groups]
    except KeyError:
        raise ConfigError(
            "the optimizer holds a parameter that the model boosted with it does not have, so its state "
            "cannot be stored by name; make the optimizer from model.parameters()"
        ) from None
    counts = Counter(name for group in members for name in group)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise ConfigError(
            f"the optimizer holds two parameters for the name {twice[0]!r}, because the model's parameter "
            "was replaced; remove the old one from param_groups"
        )
    return members


def begin_managed(optimizer: GeminiOptimizer) -> None:
    """Run pending updates so that states in chunks can be read. Raises StateError if states are incomplete,
    CheckpointError if the model's tensors were exchanged.
    """
    contents.require_own_names(optimizer.model)
    optimizer.require_complete("save_optimizer")
    optimizer.model.manager.recover()


def _managed_contents(optimizer: GeminiOptimizer) -> OptimizerContents:
    begin_managed(optimizer)
    sources: list[TensorSource] = []
    values: dict[str, dict[str, Any]] = {}
    for slot in optimizer.model.storage.slots.values():  # the same order on all ranks
        if slot not in optimizer.steps:
            continue
        # In the format of torch's optimizer, which may load this state.
        values[slot.name] = dict(counted_steps(optimizer, slot))
        sources += managed_sources(optimizer, slot)
    return OptimizerContents(sources, values, *managed_settings(optimizer))


def managed_settings(optimizer: GeminiOptimizer) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the settings of the groups, and the further entries of the state dict."""
    groups = [
        {**_settings(group), "decoupled_weight_decay": group["adamw_mode"]}
        if "adamw_mode" in group
        else _settings(group)
        for group in optimizer.param_groups
    ]
    return groups, {} if optimizer.loss_scale is None else {"loss_scale": optimizer.loss_scale.state_dict()}


def managed_sources(optimizer: GeminiOptimizer, slot: ManagedSlot) -> list[TensorSource]:
    """Return sources of the states of a parameter, as its state dict has them."""
    numel, shape = slot.param_view.numel(), tuple(slot.param_view.shape)
    states = present_states(optimizer, slot)
    moments = optimizer.rule.required(states) if optimizer.rule.converts else ()

    def read(name: str) -> torch.Tensor:
        return exported_state(optimizer, slot, only=name)[name]

    return [
        whole_source(
            f"{slot.name}/{state.name}",
            torch.float32 if state.name in moments else state.dtype,
            (state.count(numel),) if state.per_block else shape,
            partial(read, state.name),
        )
        for state in states
    ]


def _sharded_contents(optimizer: LowLevelZeroOptimizer, names: Names) -> OptimizerContents:
    sources, values = state_sources(optimizer, names)
    return OptimizerContents(sources, values, *settings_of_sharded(optimizer))


def settings_of_sharded(
    optimizer: LowLevelZeroOptimizer,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the settings as :func:`managed_settings` does."""
    groups = [_settings(group) for group in optimizer.exported_groups()]
    return groups, {} if optimizer.loss_scale is None else {"loss_scale": optimizer.loss_scale.state_dict()}


def _contents(optimizer: torch.optim.Optimizer, members: list[list[str]]) -> OptimizerContents:
    state = optimizer.state_dict()
    sources: list[TensorSource] = []
    values: dict[str, dict[str, Any]] = {}
    for index, name in enumerate(name for group in members for name in group):
        for key, value in state["state"].get(index, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                sources.append(copied_source(f"{name}/{key}", value))
            else:
                values.setdefault(name, {})[key] = value
    rest = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
    return OptimizerContents(sources, values, [_settings(group) for group in state["param_groups"]], rest)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _state_for(
    optimizer: torch.optim.Optimizer,
    members: list[list[str]],
    files: TensorFiles,
    checkpoint: str | os.PathLike[str],
) -> dict[str, Any]:
    """Return the state dict in a checkpoint. Raises CheckpointError if it belongs to another model."""
    return _state_dict(optimizer, read_document(files, members, checkpoint), files)


def read_document(
    files: TensorFiles, members: Sequence[Sequence[str]], checkpoint: str | os.PathLike[str]
) -> dict[str, Any]:
    """Return the metadata of a checkpoint: ``members``, and the fields of :class:`OptimizerContents` except
    the tensors. Raises CheckpointError if its groups have other members.
    """
    try:
        document = parse_json(files.metadata[_METADATA])
        document = {
            "members": document["members"],
            **{key: plain_data.decode(document[key]) for key in ("groups", "values", "rest")},
        }
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"{checkpoint} was not written by save_optimizer: {in_words(error)}") from error
    if document["members"] != [list(group) for group in members]:
        raise CheckpointError(
            f"{checkpoint} has parameter groups of {[len(group) for group in document['members']]} "
            f"parameters, the optimizer of {[len(group) for group in members]}, or their names or order "
            "differ; make the optimizer with the groups that it had when it was saved"
        )
    return document


def _state_dict(
    optimizer: torch.optim.Optimizer, document: dict[str, Any], files: TensorFiles
) -> dict[str, Any]:
    """Return a state dict in torch's format. Its tensors are mapped from the files if the optimizer copies
    them on load, and copies if it keeps them.
    """
    keeps = not isinstance(optimizer, (GeminiOptimizer, LowLevelZeroOptimizer))
    entries = {name: dict(values) for name, values in document["values"].items()}
    numbers = {name: i for i, name in enumerate(name for group in document["members"] for name in group)}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for key in files:
        name, _, state = key.rpartition("/")
        value = files[key]
        entries.setdefault(name, {})[state] = like(params[numbers[name]], value.clone()) if keeps else value
    lengths = [len(members) for members in document["members"]]
    states = {numbers[name]: entry for name, entry in entries.items()}
    return {"state": states, **restored_settings(optimizer, document, lengths)}


def restored_settings(
    optimizer: torch.optim.Optimizer, document: Mapping[str, Any], lengths: Sequence[int]
) -> dict[str, Any]:
    """Return the groups of a state dict and its further entries. The groups have ``lengths`` parameters,
    numbered in order.
    """
    groups, first = [], 0
    for own, saved, length in zip(optimizer.param_groups, document["groups"], lengths, strict=True):
        groups.append({**_settings(own), **saved, "params": list(range(first, first + length))})
        first += length
    rest = dict(document["rest"])
    own_scale = getattr(optimizer, "loss_scale", None)
    if "loss_scale" in rest and own_scale is not None:
        rest["loss_scale"] = {**own_scale.state_dict(), **rest["loss_scale"]}
    return {"param_groups": groups, **rest}


_FORMAT = Format("gemini-scheduler", 1)
_MAX_BYTES = 2**26  # the text of a 16 MiB tensor has 32 MiB


def save_scheduler(scheduler: Scheduler, checkpoint: str | os.PathLike[str], ranks: Ranks) -> None:
    """Write a scheduler; see :meth:`Booster.save_lr_scheduler`."""
    state = plain_data.encode(scheduler.state_dict(), "the scheduler's state")
    save_text(checkpoint, json.dumps({KEY: str(_FORMAT), "state": state}, indent=1) + "\n", ranks)


def load_scheduler(scheduler: Scheduler, checkpoint: str | os.PathLike[str], ranks: Ranks) -> None:
    """Read a scheduler; see :meth:`Booster.load_lr_scheduler`."""
    scheduler.load_state_dict(ranks.together(lambda: _state_in(checkpoint)))


def _state_in(checkpoint: str | os.PathLike[str]) -> dict[str, Any]:
    path = Path(checkpoint)
    try:
        document = parse_json(read_regular(path, _MAX_BYTES))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not _FORMAT.is_read(document):
        raise CheckpointError(_FORMAT.refusal(document, path))
    state = plain_data.decode(document.get("state"))
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is damaged: its state is not a dict")
    return state
