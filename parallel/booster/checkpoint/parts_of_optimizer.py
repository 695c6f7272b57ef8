"""Files of the optimizer of a model in parts. Whole states are written from each rank's part, and can be read
into another layout.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from gemini.checkpoint import contents, plain_data
from gemini.checkpoint.sealed_file import making_sense_of
from gemini.checkpoint.tensor_file import TensorSpec
from gemini.errors import CheckpointError, ConfigError, in_words
from gemini.optim.gemini_optimizer import GeminiOptimizer
from gemini.optim.kernels import SCALES
from gemini.optim.state_exchange import checked_state, counted_steps
from gemini.parallel.booster.checkpoint.optimizer_files import (
    OptimizerContents,
    begin_managed,
    managed_settings,
    managed_sources,
    read_document,
    restored_settings,
    save_contents,
    settings_of_sharded,
)
from gemini.parallel.booster.checkpoint.parts import Parts, stream
from gemini.parallel.booster.checkpoint.sources import Names, TensorFiles
from gemini.parallel.booster.checkpoint.tensor_source import TensorSource
from gemini.parallel.booster.checkpoint.writing import FileLayout
from gemini.parallel.booster.checkpoint.zero import state_sources
from gemini.parallel.booster.ranks import Ranks
from gemini.parallel.pipeline.stage_messages import StageMessages
from gemini.parallel.zero import LowLevelZeroOptimizer

Settings = tuple[list[dict[str, Any]], dict[str, Any]]


class StatesOfPart(Protocol):
    """The interface of an optimizer of a model in parts for saving and loading."""

    optimizer: torch.optim.Optimizer

    @property
    def groups(self) -> list[list[str]]:
        """The names of the parameters in each group."""
        ...

    @property
    def present(self) -> set[str]:
        """The names of all parameters on this rank, including those in no group."""
        ...

    def require_readable(self) -> None:
        """Raise if states cannot be loaded now; nothing has changed."""
        ...

    def contents(self) -> dict[str, tuple[list[TensorSource], Mapping[str, Any]]]:
        """Return for each parameter with a state its tensors, as sources named ``<name>/<state>``, and its
        other values. Collective over the ranks with the same part, which also run the sources together.
        """
        ...

    def settings(self) -> Settings:
        """Return the settings of the groups, and the further entries of the state dict."""
        ...

    def wanted(self, name: str, found: Sequence[str], *, is_cut: bool) -> list[str]:
        """Return the states to load among those ``found`` for a parameter."""
        ...

    def check(self, outline: dict[str, Any], checkpoint: object) -> None:
        """Raise CheckpointError if a state dict with tensors on ``meta`` cannot be loaded."""
        ...

    def load(self, state: dict[str, Any]) -> None:
        """Load a state dict of the groups. Collective over the ranks with the same part."""
        ...


def states_of_part(optimizer: torch.optim.Optimizer, names: Names) -> StatesOfPart:
    """Return the states of a boosted ``optimizer``; ``names``: those of its model's parameters here."""
    if isinstance(optimizer, GeminiOptimizer):
        return _InChunks(optimizer)
    assert isinstance(optimizer, LowLevelZeroOptimizer)
    return _OfReplicas(optimizer, names)


class _InChunks:
    """States in chunks."""

    def __init__(self, optimizer: GeminiOptimizer) -> None:
        self.optimizer: torch.optim.Optimizer = optimizer
        self._optimizer = optimizer
        self._slots = {
            param._slot.name: param._slot for group in optimizer.param_groups for param in group["params"]
        }

    @property
    def groups(self) -> list[list[str]]:
        return [[param._slot.name for param in group["params"]] for group in self._optimizer.param_groups]

    @property
    def present(self) -> set[str]:
        return set(self._optimizer.model.storage.slots)

    def require_readable(self) -> None:
        contents.require_own_names(self._optimizer.model)

    def contents(self) -> dict[str, tuple[list[TensorSource], Mapping[str, Any]]]:
        begin_managed(self._optimizer)
        return {
            name: (managed_sources(self._optimizer, slot), counted_steps(self._optimizer, slot))
            for name, slot in self._slots.items()
            if slot in self._optimizer.steps
        }

    def settings(self) -> Settings:
        return managed_settings(self._optimizer)

    def wanted(self, name: str, found: Sequence[str], *, is_cut: bool) -> list[str]:
        states = self._optimizer.states_of(self._slots[name])
        return [state.name for state in states if state.name in found and not (is_cut and state.per_block)]

    def check(self, outline: dict[str, Any], checkpoint: object) -> None:
        try:
            checked_state(self._optimizer, outline)
        except (ConfigError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{checkpoint} does not fit GeminiOptimizer: {in_words(error)}") from error

    def load(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state)


class _OfReplicas:
    """States that low-level ZeRO shards, or keeps whole on every rank."""

    def __init__(self, optimizer: LowLevelZeroOptimizer, names: Names) -> None:
        self.optimizer: torch.optim.Optimizer = optimizer
        self._optimizer, self._names = optimizer, names

    @property
    def groups(self) -> list[list[str]]:
        return [[self._names[shard.param] for shard in group] for group in self._optimizer.sharded.groups]

    @property
    def present(self) -> set[str]:
        return set(self._names.values())

    def require_readable(self) -> None:
        pass

    def contents(self) -> dict[str, tuple[list[TensorSource], Mapping[str, Any]]]:
        sources, values = state_sources(self._optimizer, self._names)
        found: dict[str, tuple[list[TensorSource], Mapping[str, Any]]] = {
            name: ([], value) for name, value in values.items()
        }
        for source in sources:
            found.setdefault(source.spec.name.rpartition("/")[0], ([], {}))[0].append(source)
        return found

    def settings(self) -> Settings:
        return settings_of_sharded(self._optimizer)

    def wanted(self, name: str, found: Sequence[str], *, is_cut: bool) -> list[str]:
        return [key for key in found if key not in SCALES]

    def check(self, outline: dict[str, Any], checkpoint: object) -> None:
        pass  # shapes and groups were compared with those of the whole model before

    def load(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state)


_Path = str | os.PathLike[str]


def save_parts_of_optimizer(
    states: StatesOfPart, parts: Parts, checkpoint: _Path, layout: FileLayout, ranks: Ranks
) -> None:
    """Write the states of the whole model, with one tensor at a time in memory. Collective; the first rank
    writes. Raises as :func:`gemini.parallel.booster.checkpoint.writing.save_tensors`.
    """
    save_contents(whole_states(states, parts, ranks), parts.whole.members, checkpoint, layout, ranks)


def whole_states(states: StatesOfPart, parts: Parts, ranks: Ranks) -> OptimizerContents:
    """Return the states of the whole model. All ranks call this, and run the streams of all sources in their
    order; on the first rank these hand out whole tensors."""
    own: dict[str, tuple[str, TensorSource]] = {}

    def describe() -> str:
        _require_members(states, parts)
        return json.dumps(_described(states, parts, own))

    said: dict[str, dict[str, Any]] = {}
    for text in ranks.collect(describe):
        said.update(json.loads(text))
    messages = StageMessages(parts.axis) if parts.axis is not None else None
    sources, values = [], {}
    for name in parts.whole.tensors:  # the same order on all ranks
        if name not in said:
            continue
        values[name] = plain_data.decode(said[name]["values"])
        for key, dtype, shape in said[name]["states"]:
            spec = TensorSpec(f"{name}/{key}", getattr(torch, dtype), tuple(shape))
            run = partial(stream, parts, messages, (name, spec), own.get(spec.name))
            sources.append(TensorSource(spec, run))
    return OptimizerContents(sources, values, *states.settings())


class StoredStates(Mapping[str, torch.Tensor], ABC):
    """States of the whole model by ``<parameter>/<state>``, moments in fp32, each read when it is asked
    for."""

    @abstractmethod
    def outline(self, name: str) -> torch.Tensor:
        """Return a tensor on ``meta`` of the type and the shape of one of them."""

    @abstractmethod
    def document(self, members: Sequence[Sequence[str]]) -> dict[str, Any]:
        """Return the fields of :class:`OptimizerContents`, ``sources`` aside, by name. Raises CheckpointError
        where its groups do not have these ``members``."""


class _InFiles(StoredStates):
    """States in files of :meth:`Booster.save_optimizer`."""

    def __init__(self, files: TensorFiles, checkpoint: _Path) -> None:
        self._files, self._checkpoint = files, checkpoint

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._files[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def outline(self, name: str) -> torch.Tensor:
        return self._files[name].to("meta")

    def document(self, members: Sequence[Sequence[str]]) -> dict[str, Any]:
        return read_document(self._files, members, self._checkpoint)


def load_parts_of_optimizer(states: StatesOfPart, parts: Parts, checkpoint: _Path, ranks: Ranks) -> None:
    """Read this rank's part of the states of the whole model, one tensor at a time. Collective.

    Raises:
        CheckpointError: it is damaged, or made for other parameters, here or on another rank; nothing was
            changed.
    """
    with ExitStack() as stack:

        def opened() -> StoredStates:
            return _InFiles(stack.enter_context(TensorFiles(checkpoint)), checkpoint)

        load_own_states(states, parts, opened, checkpoint, ranks)


def load_own_states(
    states: StatesOfPart, parts: Parts, opened: Callable[[], StoredStates], checkpoint: _Path, ranks: Ranks
) -> None:
    """Read this rank's part of what ``opened`` returns, of ``checkpoint``. All ranks call it. Raises as
    :func:`load_parts_of_optimizer`."""

    def read() -> dict[str, Any]:
        states.require_readable()
        _require_members(states, parts)
        with making_sense_of(Path(checkpoint)):
            state, outline = _own_states(states, parts, opened(), checkpoint)
        states.check(outline, checkpoint)  # on all stages, before any of them changes anything
        return state

    state = ranks.together(read)
    ranks.together(lambda: states.load(state))


def _groups(states: StatesOfPart, parts: Parts) -> list[dict[str, str]]:
    """Return, for each group, this rank's parameters: first name in the whole model -> name here."""
    return [{parts.staged.names_of(name)[0]: name for name in group} for group in states.groups]


def _require_members(states: StatesOfPart, parts: Parts) -> None:
    """Raise ConfigError if groups have changed since the model was cut: those of other stages are unknown."""
    groups = _groups(states, parts)
    present = {parts.staged.names_of(name)[0] for name in states.present}
    before = [[name for name in group if name in present] for group in parts.whole.members]
    if [list(group) for group in groups] != before:
        raise ConfigError(
            f"the optimizer has groups of {[len(group) for group in groups]} parameters on this rank, but "
            f"{[len(group) for group in before]} when the model was boosted; make all groups before boost()"
        )


def _described(
    states: StatesOfPart, parts: Parts, own: dict[str, tuple[str, TensorSource]]
) -> dict[str, Any]:
    """Put this rank's parts of states into ``own``, by name in the files, each with its parameter's name
    here. Return the description of the states that this rank saves, to send to the others.
    """
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
                        continue  # scales of blocks, which the whole tensor has in another form
                    shape = cuts[param].shape
                arrays.append([key, str(spec.dtype).removeprefix("torch."), list(shape)])
                own[f"{name}/{key}"] = (param, source)
            if parts.is_first_column:
                encoded = plain_data.encode(dict(values), "the optimizer's state")
                found[name] = {"values": encoded, "states": arrays}
    return found


def _own_states(
    states: StatesOfPart, parts: Parts, files: StoredStates, checkpoint: _Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return this rank's state dict, with tensors that are cut from the files' when they are read, and the
    same with tensors on ``meta``. Raises CheckpointError if the checkpoint belongs to another model.
    """
    document = files.document(parts.whole.members)
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

        entries[number] = _ParameterState(read, values, arrays)
        outlines[number] = {**values, **{key: own.outline(f"{name}/{key}", param) for key in arrays}}
    settings = restored_settings(states.optimizer, document, [len(group) for group in groups])
    return {"state": entries, **settings}, {"state": outlines, **settings}


def _require_known(files: StoredStates, parts: Parts, checkpoint: _Path) -> None:
    """Raise CheckpointError if a tensor belongs to no parameter, or has another shape than its parameter."""
    known = {name for group in parts.whole.members for name in group}
    for key in files:
        name, _, state = key.rpartition("/")
        if name not in known:
            raise CheckpointError(f"{checkpoint} was made for another model: {key!r} is of no parameter here")
        found, shape = tuple(files.outline(key).shape), tuple(parts.whole.tensors[name].shape)
        if state not in SCALES and found != shape:
            raise CheckpointError(
                f"{checkpoint} was made for another model: {state} of {name!r} has shape {found} in the "
                f"checkpoint and {shape} in the model"
            )


class _OwnParts:
    """This rank's parts of the tensors of a checkpoint. Only the last one read is kept."""

    def __init__(self, files: StoredStates, parts: Parts) -> None:
        self._files, self._partition = files, parts.partition
        self._last: tuple[str, torch.Tensor] | None = None

    def part(self, stored: str, param: str) -> torch.Tensor:
        """Return the part of the tensor ``stored``, cut like this rank's parameter ``param``."""
        if self._last is None or self._last[0] != stored:
            self._last = None
            self._last = (stored, self._cut(self._files[stored], param))
        return self._last[1]

    def outline(self, stored: str, param: str) -> torch.Tensor:
        """Return the same part on ``meta``."""
        return self._cut(self._files.outline(stored), param)

    def _cut(self, whole: torch.Tensor, param: str) -> torch.Tensor:
        part: torch.Tensor = self._partition.cut_state({param: whole})[param]
        return part


class _ParameterState(Mapping[str, Any]):
    """The state of one parameter in a state dict: plain ``values``, and ``arrays`` read on demand."""

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
