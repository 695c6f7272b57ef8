"""States of an optimizer whose model is in stages and parts: files have whole tensors, by parameter name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gemini.checkpoint import plain_data
from gemini.checkpoint.sealed_file import making_sense_of
from gemini.checkpoint.tensor_file import TensorSpec
from gemini.errors import CheckpointError, ConfigError
from gemini.optim.kernels import SCALES
from gemini.parallel.booster.checkpoint.layout import Layout
from gemini.parallel.booster.checkpoint.optimizer_files import (
    OptimizerContents,
    read_document,
    restored_settings,
    save_contents,
)
from gemini.parallel.booster.checkpoint.parts import Parts, stream
from gemini.parallel.booster.checkpoint.reading import TensorFiles
from gemini.parallel.booster.checkpoint.states_of_part import StatesOfPart
from gemini.parallel.booster.checkpoint.tensor_source import TensorSource
from gemini.parallel.booster.ranks import Ranks
from gemini.parallel.pipeline.passing import Passing

_Path = str | os.PathLike[str]


def save_parts_of_optimizer(
    states: StatesOfPart, parts: Parts, checkpoint: _Path, layout: Layout, ranks: Ranks
) -> None:
    """Write the states of the whole model, a tensor at a time in memory; all ranks call it and the first one
    writes. Raises as :func:`gemini.parallel.booster.checkpoint.writing.save_tensors`."""
    own: dict[str, tuple[str, TensorSource]] = {}

    def describe() -> str:
        _require_members(states, parts)
        return json.dumps(_described(states, parts, own))

    said: dict[str, dict[str, Any]] = {}
    for text in ranks.collect(describe):
        said.update(json.loads(text))
    passing = Passing(parts.axis) if parts.axis is not None else None
    sources, values = [], {}
    for name in parts.whole.tensors:  # in an order that all ranks have
        if name not in said:
            continue
        values[name] = plain_data.decode(said[name]["values"])
        for key, dtype, shape in said[name]["states"]:
            spec = TensorSpec(f"{name}/{key}", getattr(torch, dtype), tuple(shape))
            run = partial(stream, parts, passing, (name, spec), own.get(spec.name))
            sources.append(TensorSource(spec, run))
    held = OptimizerContents(sources, values, *states.settings())
    save_contents(held, parts.whole.members, checkpoint, layout, ranks)


def load_parts_of_optimizer(states: StatesOfPart, parts: Parts, checkpoint: _Path, ranks: Ranks) -> None:
    """Read this rank's part of the states of the whole model, a tensor at a time; all ranks call it.

    Raises:
        CheckpointError: it is damaged, or made for other parameters, here or on another rank; nothing was
            changed.
    """
    with ExitStack() as stack:

        def read() -> dict[str, Any]:
            states.require_readable()
            _require_members(states, parts)
            files = stack.enter_context(TensorFiles(checkpoint))
            with making_sense_of(Path(checkpoint)):
                state, outline = _own_states(states, parts, files, checkpoint)
            states.check(outline, checkpoint)  # on all stages, before one of them changes anything
            return state

        state = ranks.together(read)
        ranks.together(lambda: states.load(state))


def _groups(states: StatesOfPart, parts: Parts) -> list[dict[str, str]]:
    """Return the names of the parameters of this rank in each group, by their first names in the whole
    model."""
    return [{parts.staged.names_of(name)[0]: name for name in group} for group in states.groups]


def _require_members(states: StatesOfPart, parts: Parts) -> None:
    """Raise ConfigError where groups have changed since ranks took their parts: nobody knows those of other
    stages."""
    groups = _groups(states, parts)
    present = {parts.staged.names_of(name)[0] for name in states.present}
    before = [[name for name in group if name in present] for group in parts.whole.members]
    if [list(group) for group in groups] != before:
        raise ConfigError(
            f"the optimizer has groups of {[len(group) for group in groups]} parameters on this rank, and "
            f"had {[len(group) for group in before]} of those when the model was boosted; make all groups "
            "before boost()"
        )


def _described(
    states: StatesOfPart, parts: Parts, own: dict[str, tuple[str, TensorSource]]
) -> dict[str, Any]:
    """Put this rank's parts of states into ``own``, by their names in files, each with its parameter's name
    here; return what is to be saved of the parameters that this rank speaks for."""
    found, cuts, held = {}, parts.partition.cuts, states.contents()
    here = dict(parts.staged.module.named_parameters(remove_duplicate=False))
    for group in _groups(states, parts):
        for name, param in group.items():
            if param not in held or parts.owner_of(name) != parts.place:
                continue
            sources, values = held[param]
            arrays = []
            for source in sources:
                spec, shape = source.spec, source.spec.shape
                key = spec.name.rpartition("/")[2]
                if param in cuts:
                    if shape != tuple(here[param].shape):
                        continue  # scales of blocks, which are others in the whole
                    shape = cuts[param].shape
                arrays.append([key, str(spec.dtype).removeprefix("torch."), list(shape)])
                own[f"{name}/{key}"] = (param, source)
            if parts.is_first_column:
                encoded = plain_data.encode(dict(values), "the optimizer's state")
                found[name] = {"values": encoded, "states": arrays}
    return found


def _own_states(
    states: StatesOfPart, parts: Parts, files: TensorFiles, checkpoint: _Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a state dict of this rank's parameters, whose tensors are cut from those of the files when they
    are asked for, and the same with tensors on ``meta``. Raises CheckpointError where it is of another
    model."""
    document = read_document(files, parts.whole.members, checkpoint)
    _require_known(files, parts, checkpoint)
    own, groups, cuts = _OwnParts(files, parts), _groups(states, parts), parts.partition.cuts
    stored: dict[str, list[str]] = {}
    for key in files:
        name, _, state = key.rpartition("/")
        stored.setdefault(name, []).append(state)
    entries, outlines = {}, {}
    for number, (name, param) in enumerate(item for group in groups for item in group.items()):
        values = document["values"].get(name, {})
        arrays = states.wanted(param, stored.get(name, []), is_cut=param in cuts)

        def read(key: str, name: str = name, param: str = param) -> torch.Tensor:
            return own.part(f"{name}/{key}", param)

        entries[number] = _Entry(read, values, arrays)
        outlines[number] = {**values, **{key: own.outline(f"{name}/{key}", param) for key in arrays}}
    settings = restored_settings(states.optimizer, document, [len(group) for group in groups])
    return {"state": entries, **settings}, {"state": outlines, **settings}


def _require_known(files: TensorFiles, parts: Parts, checkpoint: _Path) -> None:
    """Raise CheckpointError where a tensor is a state of no parameter, or of one of another shape."""
    known = {name for group in parts.whole.members for name in group}
    for key in files:
        name, _, state = key.rpartition("/")
        if name not in known:
            raise CheckpointError(f"{checkpoint} was made for another model: {key!r} is of no parameter here")
        found, shape = tuple(files[key].shape), tuple(parts.whole.tensors[name].shape)
        if state not in SCALES and found != shape:
            raise CheckpointError(
                f"{checkpoint} was made for another model: {state} of {name!r} has shape {found} there and "
                f"{shape} here"
            )


class _OwnParts:
    """This rank's parts of the tensors of a checkpoint; the one that was asked for last is kept, and no
    other."""

    def __init__(self, files: TensorFiles, parts: Parts) -> None:
        self._files, self._partition = files, parts.partition
        self._last: tuple[str, torch.Tensor] | None = None

    def part(self, stored: str, param: str) -> torch.Tensor:
        """Return the part of the tensor ``stored``, cut as the parameter ``param`` of this rank is."""
        if self._last is None or self._last[0] != stored:
            self._last = None
            self._last = (stored, self._cut(self._files[stored], param))
        return self._last[1]

    def outline(self, stored: str, param: str) -> torch.Tensor:
        """Return the same on ``meta``."""
        return self._cut(self._files[stored].to("meta"), param)

    def _cut(self, whole: torch.Tensor, param: str) -> torch.Tensor:
        part: torch.Tensor = self._partition.cut_state({param: whole})[param]
        return part


class _Entry(Mapping[str, Any]):
    """The state of one parameter as a state dict has it; ``values`` is what is no array, ``arrays`` names
    what is read when it is asked for."""

    def __init__(
        self, read: Callable[[str], torch.Tensor], values: Mapping[str, Any], arrays: Sequence[str]
    ) -> None:
        self._read, self._values, self._arrays = read, dict(values), tuple(arrays)

    def __getitem__(self, key: str) -> Any:
        return self._read(key) if key in self._arrays else self._values[key]

    def __iter__(self) -> Iterator[str]:
        yield from self._values
        yield from self._arrays

    def __len__(self) -> int:
        return len(self._values) + len(self._arrays)
