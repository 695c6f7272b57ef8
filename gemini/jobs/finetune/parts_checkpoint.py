"""Checkpoints of a model that is divided among ranks. They have the format of :mod:`gemini.checkpoint` and
hold the whole model, so a run can resume from them in any layout.

The first rank writes whole tensors, one at a time. Each rank reads whole tensors and keeps its part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemini.checkpoint import CheckpointReader, contents, new_checkpoint, plain_data
from gemini.checkpoint.contents import Scheduler
from gemini.checkpoint.loading import agree_on_damage, with_newest
from gemini.checkpoint.saving import SHARD_BYTES, CheckpointWriter, checked_shard_bytes, file_shards
from gemini.checkpoint.sealed_file import DamagedError
from gemini.checkpoint.tensor_file import TensorFile, TensorSpec, require_holdable
from gemini.comm.ranks import Rank
from gemini.errors import CheckpointError, IoError
from gemini.jobs.finetune.tuning import CUT_INTO
from gemini.optim.kernels import MOMENTS, SCALES, StateFormat, step_count
from gemini.parallel.booster import Booster
from gemini.parallel.booster.checkpoint.optimizer_files import OptimizerContents
from gemini.parallel.booster.checkpoint.parts import WholeModel
from gemini.parallel.booster.checkpoint.parts_of_optimizer import StoredStates
from gemini.parallel.booster.checkpoint.sources import ModelContents
from gemini.parallel.booster.checkpoint.tensor_source import TensorSource
from gemini.parallel.booster.plugin.parts_plugin import PartsPlugin
from gemini.system import rng


@dataclass(frozen=True)
class PartOfModel:
    """This rank's part of a boosted model, and its Adam.

    Attributes:
        state_format: the format of the moments.
        sizes: the number of parts of one copy of the model, by axis.
    """

    booster: Booster
    plugin: PartsPlugin
    model: nn.Module
    optimizer: torch.optim.Optimizer
    state_format: StateFormat
    rank: Rank
    sizes: Mapping[str, int]


def save(directory: Path, part: PartOfModel, scheduler: Scheduler, extra: Mapping[str, Any]) -> None:
    """Write a checkpoint of the step that ``extra`` names, complete or not at all. All ranks call this.

    Raises:
        IoError: it cannot be written. The other ranks raise CheckpointError.
    """
    weights = part.plugin.whole_contents(part.model, part.optimizer)
    states = part.plugin.whole_states(part.model, part.optimizer)
    whole = part.plugin.parts[part.model].whole
    extra = {**extra, CUT_INTO: dict(part.sizes)}
    manifest = part.rank.together(lambda: _manifest(whole, weights, states, part, scheduler, extra))
    with new_checkpoint(directory, int(extra["step"]), rank=part.rank) as writer:
        writer.describe(manifest, rng.capture())
        files = _Files(writer, whole, weights, part.state_format, list(manifest["optimizer_steps"]))
        for source in weights.sources:
            source.stream(files.weight_sink(source))
        for source in states.sources:
            source.stream(files.state_sink(source))
        files.finish()


def load(directory: Path, part: PartOfModel, scheduler: Scheduler) -> dict[str, Any]:
    """Read the newest whole checkpoint in ``directory``, of a run with any layout; return its ``extra``.
    Collective: all ranks call it. If the layout is the one that saved it, random numbers continue as in that
    run. Otherwise they do not, because ranks along tp must draw equal numbers.

    Raises:
        CheckpointError: there is none, all are damaged, or it was made for another model.
    """

    def load_from(found: Path) -> dict[str, Any]:
        with ExitStack() as stack:
            opened: list[tuple[CheckpointReader, dict[str, Any], rng.States]] = []

            def check() -> None:
                reader = stack.enter_context(CheckpointReader(found))
                reader.verify(part.rank.index, part.rank.count)
                try:
                    generators = rng.parse(reader.rng(part.rank.index, part.rank.count))
                except CheckpointError as error:
                    raise DamagedError(f"{found} is damaged: {error}") from error
                opened.append((reader, reader.objects(), generators))

            agree_on_damage(part.rank, check)
            ((reader, objects, generators),) = opened
            part.booster.load_model(part.model, found)
            part.plugin.load_states(
                part.model, part.optimizer, lambda: _StatesOfCheckpoint(reader, objects), found
            )
            scheduler.load_state_dict(objects["scheduler"])
            extra = dict(reader.manifest["extra"])
            saved, ranks = extra.pop(CUT_INTO, dict.fromkeys(part.sizes, 1)), reader.manifest["ranks"]
            if saved == dict(part.sizes) and ranks == part.rank.count:
                rng.restore(generators)
            return extra

    return with_newest(directory, part.rank, load_from)


def _manifest(
    whole: WholeModel,
    weights: ModelContents,
    states: OptimizerContents,
    part: PartOfModel,
    scheduler: Scheduler,
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the entries of ``manifest.json`` other than its files (docs/notes/checkpoint.md)."""
    tensors = {source.spec.name: whole.tensors[source.spec.name] for source in weights.sources}
    require_holdable([source.spec for source in weights.sources], weights.aliases)
    params = {name: value for name, value in tensors.items() if name in whole.parameters}
    kept = part.state_format.parts_for(torch.float32)
    plain = part.state_format == StateFormat()
    arrays = {state.name: [state.type_name, state.per_block] for state in kept}
    return {
        "step": int(extra["step"]),
        "parameters": {
            name: {"shape": list(value.shape), "stride": list(value.stride())}
            for name, value in params.items()
        },
        "aliases": weights.aliases,
        "buffers": {name: list(value.shape) for name, value in tensors.items() if name not in params},
        "optimizer_steps": {name: int(values["step"]) for name, values in states.values.items()},
        "states": [state.name for state in kept],
        "state_arrays": {} if plain else dict.fromkeys(states.values, arrays),
        "group_members": [list(group) for group in whole.members],
        "loss_scale": states.rest.get("loss_scale"),
        "scheduler": True,
        "objects": {
            "param_groups": plain_data.encode(list(map(_settings, states.groups)), "a parameter group"),
            "scheduler": plain_data.encode(scheduler.state_dict(), "the scheduler's state"),
            "small_states": plain_data.encode({}, "the optimizer's state"),
            "extra_states": plain_data.encode(weights.extra, "a module's extra state"),
        },
        "extra": dict(extra),
    }


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group without those that torch's optimizer adds for itself."""
    return {name: value for name, value in group.items() if name != "decoupled_weight_decay"}


class _Files:
    """The files of the first rank; other ranks have none. An error is raised by :meth:`finish`: until then
    the rank takes part in the streams, so that no other rank waits for it."""

    def __init__(
        self,
        writer: CheckpointWriter,
        whole: WholeModel,
        weights: ModelContents,
        state_format: StateFormat,
        stepped: Sequence[str],
    ) -> None:
        """``stepped``: the parameters that have states."""
        self._format, self._shapes = state_format, whole.tensors
        self._weights: dict[str, TensorFile] = {}
        self._states: dict[str, TensorFile] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self._writer = writer
        # A parameter, and those of its states that have arrived.
        self._entry: tuple[str, dict[str, torch.Tensor]] = ("", {})
        self._error: BaseException | None = None
        self._leads = writer.rank.index == 0
        self._attempt(lambda: self._open(whole, weights, stepped))

    def _open(self, whole: WholeModel, weights: ModelContents, stepped: Sequence[str]) -> None:
        most = checked_shard_bytes(SHARD_BYTES)
        specs = [source.spec for source in weights.sources if source.spec.name in whole.parameters]
        shards = file_shards(specs, most)
        for number, shard in enumerate(shards):
            stored = {spec.name for spec in shard}
            metadata = {alias: kept for alias, kept in weights.aliases.items() if kept in stored}
            file = self._writer.add_weights(contents.weights_file(number, len(shards)), shard, metadata)
            self._weights.update(dict.fromkeys(stored, file))
        owners: dict[str, tuple[str, str]] = {}
        ranges = []
        for name in stepped:
            for state in self._format.parts_for(torch.float32):
                count = state.count(self._shapes[name].numel())
                spec = TensorSpec(contents.range_name(name, state.name, 0, count), state.dtype, (count,))
                if count:
                    ranges.append(spec)
                    owners[spec.name] = (state.name, name)
        for number, shard in enumerate(file_shards(ranges, most)):
            label = contents.optimizer_file(self._writer.rank.index, self._writer.rank.count, number)
            file = self._writer.add_file(label, shard)
            for spec in shard:
                self._states[spec.name] = file
                state_name, name = owners[spec.name]
                found = self._writer.states.setdefault(state_name, {})
                found[name] = [(0, math.prod(spec.shape), label, spec.name)]

    def weight_sink(self, source: TensorSource) -> Callable[[torch.Tensor], None]:
        """Return a function that writes the whole tensor of ``source``."""
        name = source.spec.name

        def take(whole: torch.Tensor) -> None:
            file = self._weights.get(name)
            if file is None:
                self._buffers[name] = whole.reshape(source.spec.shape).clone()
            else:
                file.write(name, 0, whole)

        return lambda whole: self._attempt(lambda: take(whole))

    def state_sink(self, source: TensorSource) -> Callable[[torch.Tensor], None]:
        """Return a function that writes a whole state."""
        name, _, state = source.spec.name.rpartition("/")

        def take(whole: torch.Tensor) -> None:
            if self._entry[0] != name:
                self._write_entry()
                self._entry = (name, {})
            self._entry[1][state] = whole.reshape(source.spec.shape).clone()

        return lambda whole: self._attempt(lambda: take(whole))

    def _write_entry(self) -> None:
        """Write the states of a parameter in the format of the moments, once all of them have arrived."""
        name, entry = self._entry
        if not entry:
            return
        like = torch.empty(self._shapes[name].shape, device="cpu")
        for state, values in self._format.imported(entry, like).items():
            range_name = contents.range_name(name, state, 0, values.numel())
            if values.numel():
                self._states[range_name].write(range_name, 0, values.reshape(-1))

    def finish(self) -> None:
        """Write the remaining states. Raises the error of an earlier write."""
        self._attempt(self._write_entry)
        if self._buffers:
            self._attempt(lambda: self._writer.add_buffers(contents.BUFFERS, self._buffers))
        if isinstance(self._error, OSError) and not isinstance(self._error, IoError):
            reason = self._error.strerror or str(self._error)
            name = str(self._error.filename or self._writer.path)
            raise IoError(self._error.errno or 0, f"cannot save a checkpoint: {reason}", name)
        if self._error is not None:
            raise self._error

    def _attempt(self, action: Callable[[], object]) -> None:
        """Do something on the first rank, unless something failed before."""
        if not self._leads or self._error is not None:
            return
        try:
            action()
        except (OSError, CheckpointError) as error:
            self._error = error


class _StatesOfCheckpoint(StoredStates):
    """The states in a checkpoint of :mod:`gemini.checkpoint`."""

    def __init__(self, reader: CheckpointReader, objects: Mapping[str, Any]) -> None:
        self._reader, self._objects = reader, objects
        self._steps: Mapping[str, int] = reader.manifest["optimizer_steps"]
        self._last: tuple[str, Mapping[str, torch.Tensor]] = ("", {})

    def __getitem__(self, name: str) -> torch.Tensor:
        param, _, state = name.rpartition("/")
        arrays = self._reader.arrays(param)
        if state in SCALES or arrays[state].dtype == torch.float32:
            return self._reader.state(state, param)
        if self._last[0] != param:
            self._last = ("", {})
            read = {each: self._reader.state(each, param) for each in arrays}
            saved = StateFormat("int8" if arrays[state].dtype.itemsize == 1 else "bf16")
            self._last = (param, saved.exported(read))
        return self._last[1][state]

    def __iter__(self) -> Iterator[str]:
        return (f"{param}/{state}" for param in self._steps for state in self._reader.arrays(param))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def outline(self, name: str) -> torch.Tensor:
        param, _, state = name.rpartition("/")
        array, shape = self._reader.arrays(param)[state], self._reader.manifest["parameters"][param]["shape"]
        if array.per_block:
            return torch.empty(array.numel(math.prod(shape)), dtype=array.dtype, device="meta")
        dtype = torch.float32 if state in MOMENTS else array.dtype
        return torch.empty(shape, dtype=dtype, device="meta")

    def document(self, members: Sequence[Sequence[str]]) -> dict[str, Any]:
        trained = {name for group in members for name in group}
        saved = self._reader.manifest["group_members"]
        if [[name for name in group if name in trained] for group in saved] != [list(m) for m in members]:
            raise CheckpointError(
                f"{self._reader.path} has parameter groups of {[len(group) for group in saved]} parameters, "
                f"the optimizer of {[len(group) for group in members]}, or with other names or in another "
                "order; go on with the options of the run that saved it"
            )
        scale = self._reader.manifest["loss_scale"]
        return {
            "members": members,
            "groups": self._objects["param_groups"],
            "values": {name: {"step": step_count(count)} for name, count in self._steps.items()},
            "rest": {} if scale is None else {"loss_scale": scale},
        }
