"""Resuming from a checkpoint, streamed one parameter at a time: it is never in memory as a whole."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn

from gemini.checkpoint import contents, plain_data
from gemini.checkpoint.contents import (
    Ranges,
    Scheduler,
    StateArray,
    arrays_of,
    check_files,
    check_manifest,
    check_objects,
    check_tensors,
    check_values,
    checked_model,
    expected_tensors,
    kept_states,
    refuse_shared_directory,
    table,
)
from gemini.checkpoint.directory import (
    MANIFEST,
    check_contents,
    complete_checkpoints,
    identity_of,
    latest,
    no_checkpoint,
    read_json,
    read_manifest,
)
from gemini.checkpoint.sealed_file import DamagedError, Seal, UnreadableError, making_sense_of
from gemini.checkpoint.tensor_file import ReadAhead, StoredTensor, TensorReader, stored_tensors
from gemini.comm.ranks import Rank
from gemini.errors import CheckpointError, ConfigError
from gemini.model.handle import ManagedModel
from gemini.model.weights import import_others
from gemini.optim.gemini_optimizer import GeminiOptimizer
from gemini.optim.state_exchange import note_frozen, replace_step_counts, write_state, write_state_range
from gemini.runtime.adopt import write_range, write_values
from gemini.system import rng
from gemini.system.process import shown_as

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class CheckpointReader:
    """Weights, states and settings of the checkpoint in a directory. Use as a context manager.

    ``weights``: {name: file}, buffers included. ``states[state][parameter]``: the ranges that
    docs/notes/checkpoint.md describes. Values of a damaged block are never returned.

    Raises:
        DamagedError: a file is missing, has another size or is damaged in the range to be read, or the files
            contradict each other.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = read_manifest(path)
        with making_sense_of(path / contents.MODEL_INDEX):
            self.weights: dict[str, str] = self._json(contents.MODEL_INDEX)["weight_map"]
        with making_sense_of(path / contents.OPTIMIZER_INDEX):
            self.states: Ranges = self._json(contents.OPTIMIZER_INDEX)["states"]
        with making_sense_of(path):
            check_values(self.manifest, self.weights, self.states)
            check_manifest(self.manifest)
            self._expected = expected_tensors(self.manifest, self.weights, self.states)
            check_files(self.manifest, self._expected)
        self._files: dict[str, TensorReader] = {}
        self._ahead: ReadAhead | None = None

    def verify(self, index: int = 0, count: int = 1) -> None:
        """Read every file, or the ``index``-th of ``count`` shares of them, and compare it with its
        checksums, and the headers with the indexes. Raises DamagedError naming the first file that differs.
        """
        check_contents(self.path, self.manifest, index, count)
        self.check_headers(index, count)

    def check_headers(self, index: int = 0, count: int = 1) -> None:
        """Check the headers of files: of all files of weights, with the checksum of their first block; and of
        the ``index``-th of ``count`` shares of the other files, and of the files in which ranks describe
        theirs. Raises DamagedError.
        """
        weights = set(self.weights.values())
        for file in sorted(weights):
            self._file(file)
        for file in sorted(self._expected.keys() - weights)[index::count]:
            # No checksum here: each block is compared before its values are used, and a second read costs.
            self._check_tensors(file, stored_tensors(self.path / file, self._seal(file)))
        saved = self.manifest["ranks"]
        for rank in range(saved)[index::count]:
            self._json(contents.part_file(rank, saved))

    def objects(self) -> dict[str, Any]:
        """Return the parameter groups, the scheduler's state and extra states as they were saved."""
        with making_sense_of(self.path / MANIFEST):
            try:
                found = {name: plain_data.decode(data) for name, data in self.manifest["objects"].items()}
            except CheckpointError as error:
                raise ValueError(str(error)) from error
            check_objects(found, self.manifest)
        return found

    def rng(self, rank: int = 0, num_ranks: int = 1) -> dict[str, Any]:
        """Return the random generator states of a rank; those of rank 0 if the number of ranks differs from
        the save's.
        """
        saved = self.manifest["ranks"]
        file = contents.part_file(rank if saved == num_ranks else 0, saved)
        with making_sense_of(self.path / file):
            return table(self._json(file)["rng"])

    def weight(self, name: str) -> torch.Tensor:
        """Return a copy of a weight or buffer."""
        return self._file(self.weights[name]).whole(name)

    def weight_pieces(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first element, values) of a weight, flat, in row order. Values are valid until the next
        ones.
        """
        return self._file(self.weights[name]).pieces(name)

    def spec(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return dtype and shape of a weight or buffer."""
        stored = self._file(self.weights[name]).tensors[name]
        return stored.dtype, stored.shape

    def stride(self, param: str) -> tuple[int, ...]:
        """Return the stride, in elements, of the memory order of a parameter's flat states."""
        return tuple(self.manifest["parameters"][param]["stride"])

    def arrays(self, param: str) -> dict[str, StateArray]:
        """Return the saved states of a parameter: {name: dtype and per-block flag}."""
        return arrays_of(self.manifest, param)

    def state_pieces(
        self, state: str, param: str, start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (index of the first value, values) for values ``[start, stop)`` of a flat state, from the
        files of all ranks. Values are valid until the next ones.
        """
        for first, last, file, name in self.states[state].get(param, ()):  # none: it has no elements
            begin, end = max(start, first), last if stop is None else min(stop, last)
            if begin < end:
                for at, values in self._file(file).pieces(name, begin - first, end - begin):
                    yield first + at, values

    def state(self, state: str, param: str) -> torch.Tensor:
        """Return a copy of a parameter's state in the parameter's shape and memory order; for a per-block
        state its values, flat.
        """
        array = self.arrays(param)[state]
        shape = self.manifest["parameters"][param]["shape"]
        if array.per_block:
            full = torch.empty(array.numel(math.prod(shape)), dtype=array.dtype, device="cpu")
        else:
            full = torch.empty_strided(shape, self.stride(param), dtype=array.dtype, device="cpu")
        flat = torch.as_strided(full, (full.numel(),), (1,))
        for first, values in self.state_pieces(state, param):
            flat[first : first + values.numel()] = values
        return full

    def close(self) -> None:
        """Close all files. Idempotent."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _file(self, name: str) -> TensorReader:
        if name not in self._files:
            self._ahead = self._ahead or ReadAhead()
            file = TensorReader(self.path / name, self._seal(name), self._ahead)
            self._files[name] = file
            self._check_tensors(name, file.tensors)
        return self._files[name]

    def _check_tensors(self, name: str, held: Mapping[str, StoredTensor]) -> None:
        with making_sense_of(self.path / name):
            kinds = {tensor: (stored.dtype, stored.shape) for tensor, stored in held.items()}
            check_tensors(kinds, self._expected[name])

    def _json(self, name: str) -> dict[str, Any]:
        return read_json(self.path / name, self._seal(name))

    def _seal(self, name: str) -> Seal:
        if name not in self.manifest["files"]:
            raise DamagedError(f"{self.path} has no file {name!r}, which one of its indexes names")
        return Seal.read(self.manifest["files"][name])


@shown_as("load")
def load(
    directory: str | os.PathLike[str],
    model: nn.Module | ManagedModel,
    optimizer: GeminiOptimizer,
    *,
    scheduler: Scheduler | None = None,
    leave: Collection[str] = (),
) -> dict[str, Any]:
    """Resume from the newest complete checkpoint in ``directory``; return its ``extra``. Collective.

    Restores weights, masters, moments, step counts, parameter groups, loss scale, scheduler, buffers and
    random generators, and discards pending gradients. The budgets, policy, chunk size, precision and number
    of ranks may differ from those of the save. Every block of 4 MiB is read once and compared with its
    checksum before its values are used. If a rank finds damage, the next older checkpoint is loaded over the
    values that have changed, with a warning in the log. Loading hooks of modules see all names; their changes
    apply to buffers and extra states, but not to weights.

    Args:
        directory: the directory of checkpoints, or one checkpoint. If parts of a model have their own
            directories, the newest save with all parts complete is loaded.
        model, optimizer: the managed model and its optimizer. Loading takes 16 MiB of extra memory, or that
            of one parameter if its memory order is not that of rows.
        scheduler: a scheduler to restore, too.
        leave: the names of weights and buffers that keep their values.

    Raises:
        CheckpointError: there is none, all are damaged (the message describes the newest), it was made for
            another model or without a scheduler, or a parameter was replaced after wrapping. Nothing was
            changed unless the message says that a load failed half-way.
        IoError: a chunk could not be read or written; repeat the load.

    If one rank raises, all do: the others raise a CheckpointError that names it and says why. After a load
    that failed half-way the optimizer's ``step()`` raises StateError until a load succeeds.
    """
    model, optimizer = checked_model(model, optimizer)
    refuse_shared_directory(model, directory)
    rank = model.rank_of_parts()

    def load_from(found: Path) -> dict[str, Any]:
        return _load_once(found, model, optimizer, scheduler, rank, frozenset(leave))

    try:
        return with_newest(directory, rank, load_from)
    except CheckpointError as error:
        if not optimizer.incomplete:
            raise
        raise type(error)(
            f"{error}; {optimizer.incomplete}: load another checkpoint, or states of model and "
            "optimizer (load_state_dict), before you continue"
        ) from error


def with_newest(
    directory: str | os.PathLike[str], rank: Rank, load_from: Callable[[Path], _Result]
) -> _Result:
    """Return ``load_from(path)`` for the newest checkpoint in ``directory``. If it raises DamagedError on all
    ranks, try the checkpoint before, and so on. Collective.

    Raises:
        CheckpointError: there is none, all are damaged (the message says what is wrong with the newest), or
            ranks name different directories.
    """
    rank.require_same_directory(directory)
    damaged: dict[Path, str] = {}  # texts, not errors: an error's traceback keeps buffers alive
    while True:
        found = _newest_left(Path(directory), damaged, rank)
        try:
            return load_from(found)
        except DamagedError as error:  # also if a save in another process has removed it
            damaged[found] = str(error)
            logger.warning("%s; looking for another checkpoint", damaged[found])


def _newest_left(directory: Path, damaged: Mapping[Path, str], rank: Rank) -> Path:
    """Return the newest checkpoint that is not in ``damaged``, as rank 0 sees it; for parts of a model the
    newest that all parts have. Raises CheckpointError. Collective.
    """

    def held() -> str:
        if rank.index:
            return ""
        found = complete_checkpoints(directory, warn=not damaged)
        left = [path for path in found if path not in damaged]
        if not left:
            raise DamagedError(next(iter(damaged.values()))) if damaged else no_checkpoint(directory)
        if rank.parts is None:
            left = left[:1]
        return json.dumps([(str(path), identity_of(path)) for path in left])

    parts = [json.loads(texts[0]) for texts in rank.collect_parts(held)]
    if rank.parts is None:
        return Path(parts[0][0][0])
    return _newest_of_all(parts, rank)


def _newest_of_all(parts: Sequence[Sequence[tuple[str, str]]], rank: Rank) -> Path:
    """Return the path of the newest save that every part of the model has. ``parts``: for each part its
    (path, save identity) pairs, newest first. Raises CheckpointError.
    """
    saves = [{save: path for path, save in held if save} for held in parts]
    newest = ", ".join(f"part {part} {held[0][0]}" for part, held in enumerate(parts))
    common = next((save for save in saves[0] if all(save in held for held in saves)), None)
    if common is None:
        raise CheckpointError(
            f"no save has all {len(parts)} parts of the model: the newest checkpoints belong to "
            f"different saves ({newest}); give load() on each rank the directory that it gave "
            "save(), in the same run"
        )
    if any(held[0][1] != common for held in parts):
        logger.warning(
            "the newest checkpoints of the parts of the model belong to different saves (%s), "
            "because a save was interrupted; loading the newest save that all parts have, %s",
            newest,
            saves[rank.part][common],
        )
    return Path(saves[rank.part][common])


def agree_on_damage(rank: Rank, action: Callable[[], None]) -> None:
    """Run ``action`` on every rank. Raises DamagedError on all ranks if one raises it; other errors as in
    :meth:`Rank.collect_parts`.
    """

    def damage() -> str:
        try:
            action()
        except DamagedError as error:
            return str(error)
        return ""

    for found in itertools.chain(*rank.collect_parts(damage)):
        if found:
            raise DamagedError(found)


def is_complete(directory: str | os.PathLike[str]) -> bool:
    """Return whether ``directory`` has a checkpoint with all files, by name and size.

    Raises:
        CheckpointError: this user may not read the directory, or may not read the only checkpoint that may be
            complete.
    """
    try:
        latest(directory)
    except UnreadableError:
        raise
    except CheckpointError:
        return False
    return True


def _load_once(
    checkpoint: Path,
    model: ManagedModel,
    optimizer: GeminiOptimizer,
    scheduler: Scheduler | None,
    rank: Rank,
    leave: frozenset[str],
) -> dict[str, Any]:
    """Load one checkpoint, except for the names in ``leave``. Raises DamagedError on all ranks."""
    with ExitStack() as stack:
        opened: list[tuple[CheckpointReader, dict[str, Any], rng.States]] = []

        def check() -> None:
            reader = stack.enter_context(CheckpointReader(checkpoint))
            reader.check_headers(rank.index, rank.count)
            _check_part(checkpoint, reader.manifest, rank)
            _check_model(checkpoint, reader.manifest, model, optimizer)
            if scheduler is not None and not reader.manifest["scheduler"]:
                raise CheckpointError(
                    f"{checkpoint} was saved without a scheduler; pass the same to save() and load()"
                )
            objects = reader.objects()
            try:
                optimizer.refuse_changes(objects["param_groups"])
            except ConfigError as error:
                raise CheckpointError(f"{checkpoint} was saved with another optimizer: {error}") from error
            _check_states(checkpoint, reader.manifest, optimizer)
            try:
                _check_settings(objects, optimizer)
                generators = rng.parse(reader.rng(rank.index, rank.count))
            except (CheckpointError, ConfigError) as error:
                raise DamagedError(f"{checkpoint} is damaged: {error}") from error
            opened.append((reader, objects, generators))

        agree_on_damage(rank, check)
        agree_on_damage(rank, model.manager.snapshot.before_write)
        _discard_gradients(model, optimizer, rank)
        ((reader, objects, generators),) = opened

        def restore() -> None:
            _load_settings(reader.manifest, objects, optimizer, scheduler)
            model.manager.set_finished_steps(int(reader.manifest["step"]))
            rng.restore(generators)

        with optimizer.loading():
            _load_values(reader, model, optimizer, objects["extra_states"], rank, leave)
            agree_on_damage(rank, restore)
            _load_small(objects, optimizer)
            optimizer.rule.restore_attributes(objects.get("attributes", {}))
    optimizer.mark_complete()
    extra: dict[str, Any] = reader.manifest["extra"]
    return extra


def _discard_gradients(model: ManagedModel, optimizer: GeminiOptimizer, rank: Rank) -> None:
    """Discard all gradients. Ranks wait for each other in ``discard_passes``; the actions that may fail on
    one rank run before and after it.
    """
    agree_on_damage(rank, model.leave_passes)
    model.discard_passes()
    agree_on_damage(rank, optimizer.discard_gradients)


def _load_settings(
    manifest: Mapping[str, Any],
    objects: Mapping[str, Any],
    optimizer: GeminiOptimizer,
    scheduler: Scheduler | None,
) -> None:
    for group, saved in zip(optimizer.param_groups, objects["param_groups"], strict=True):
        group.update(saved)
    if optimizer.loss_scale is not None and manifest["loss_scale"] is not None:
        optimizer.loss_scale.load_state_dict(manifest["loss_scale"])
    if scheduler is not None:
        scheduler.load_state_dict(objects["scheduler"])


def _load_small(objects: Mapping[str, Any], optimizer: GeminiOptimizer) -> None:
    slots = optimizer.model.storage.slots
    optimizer.small.clear()
    optimizer.small.update(
        {
            slots[name]: dict(state)
            for name, state in objects.get("small_states", {}).items()
            if slots[name].grad is not None
        }
    )


def _check_settings(objects: Mapping[str, Any], optimizer: GeminiOptimizer) -> None:
    """Raise ConfigError if no step could be made with the saved group settings."""
    for group, saved in zip(optimizer.param_groups, objects["param_groups"], strict=True):
        optimizer.rule.hyper({**group, **saved})
    optimizer.rule.check_attributes(objects.get("attributes", {}))


def _check_part(checkpoint: Path, manifest: Mapping[str, Any], rank: Rank) -> None:
    """Raise CheckpointError if the checkpoint has another part of the model than this rank; the shapes may be
    equal.
    """
    saved, own = manifest.get("part"), contents.part_of(rank)
    if saved != own:
        there, here = ("the whole model" if of is None else f"part {of[0]} of {of[1]}" for of in (saved, own))
        raise CheckpointError(
            f"{checkpoint} has {there}, and this rank has {here} of the model; load it with the layout that "
            "saved it, on each rank from its own directory"
        )


def _check_model(
    checkpoint: Path, manifest: Mapping[str, Any], model: ManagedModel, optimizer: GeminiOptimizer
) -> None:
    contents.require_own_names(model)
    shapes = {name: _shape(entry) for name, entry in manifest["parameters"].items()}
    own_shapes = {name: _shape(entry) for name, entry in contents.parameters(model).items()}
    _compare(checkpoint, "parameter", shapes, own_shapes)
    buffers = {name: list(value.shape) for name, value in contents.buffers(model).items()}
    _compare(checkpoint, "buffer", manifest["buffers"], buffers)
    frozen = {name for name, slot in model.storage.slots.items() if slot.grad is None}
    note_frozen(str(checkpoint), [name for name in manifest["optimizer_steps"] if name in frozen])
    saved, own = manifest["group_members"], contents.group_members(optimizer)
    # Parameters that are frozen here may be missing from the groups.
    if [[name for name in group if name not in frozen] for group in saved] != [
        [name for name in group if name not in frozen] for group in own
    ]:
        raise CheckpointError(
            f"{checkpoint} has parameter groups of {[len(group) for group in saved]} parameters, the "
            f"optimizer of {[len(group) for group in own]}, or in another order; build it as it was then"
        )


def _check_states(checkpoint: Path, manifest: Mapping[str, Any], optimizer: GeminiOptimizer) -> None:
    """Raise CheckpointError if the optimizer keeps other states than the checkpoint has."""
    kept, names = kept_states(manifest), set(optimizer.state_names)
    if not names <= set(kept) <= names | optimizer.rule.unread(()):
        raise CheckpointError(
            f"{checkpoint} has of each parameter the states {list(kept)}, and the optimizer keeps "
            f"{list(optimizer.state_names)}; load it with an optimizer of the kind that saved it, with its "
            "state_dtype and master_remainders; its state_dict() leads from those to others"
        )
    _compare_arrays(checkpoint, manifest, optimizer)


def _shape(entry: Mapping[str, Any]) -> list[Any]:
    """Return the properties of a parameter that must match: its shape, and the format of a quantized one."""
    return [*entry["shape"], *([entry["quantized"]] if "quantized" in entry else [])]


def _compare_arrays(checkpoint: Path, manifest: Mapping[str, Any], optimizer: GeminiOptimizer) -> None:
    """Raise CheckpointError if saved states cannot be converted to this optimizer's. Floats convert to other
    floats; int8 codes only load with equal dtypes and memory order, because they depend on the scales of
    their blocks.
    """
    slots = optimizer.model.storage.slots
    for name in _states_wanted(manifest, optimizer):
        states = optimizer.states_of(slots[name])
        own = {state.name: StateArray(state.dtype, state.per_block) for state in states}
        unread = optimizer.rule.unread(states)
        saved = {state: array for state, array in arrays_of(manifest, name).items() if state not in unread}
        floats = all(array.dtype.is_floating_point for array in (*saved.values(), *own.values()))
        in_order = tuple(manifest["parameters"][name]["stride"]) == slots[name].param_view.stride()
        if saved.keys() == own.keys() and (floats or (saved == own and in_order)):
            continue
        kept, here = ({state: str(array.dtype) for state, array in each.items()} for each in (saved, own))
        raise CheckpointError(
            f"{checkpoint} has of {name!r} {kept}, and the optimizer keeps {here}, or in another order of "
            "memory; load it with the state_dtype and master_remainders that saved it: its "
            "state_dict() leads from one to another"
        )


def _states_wanted(manifest: Mapping[str, Any], optimizer: GeminiOptimizer) -> list[str]:
    """Return the names of parameters that have states in the checkpoint and train here."""
    slots = optimizer.model.storage.slots
    return [name for name in manifest["optimizer_steps"] if slots[name].grad is not None]


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


def _load_values(
    reader: CheckpointReader,
    model: ManagedModel,
    optimizer: GeminiOptimizer,
    extra_states: Mapping[str, Any],
    rank: Rank,
    leave: frozenset[str],
) -> None:
    """Load weights, buffers, extra states and moments. Raises DamagedError on all ranks."""
    others = {name: value for name, value in extra_states.items() if name not in leave}

    def load_weights() -> None:
        _load_weights(reader, model, leave)
        known = {*model.storage.slots, *leave}
        others.update((name, reader.weight(name)) for name in reader.weights if name not in known)

    def load_rest() -> None:
        if import_others(model, others):
            _load_weights(reader, model, leave)
        _load_moments(reader, model, optimizer)

    # Each rank writes its own values without the others, so one may fail alone; agree_on_damage tells the
    # others.
    agree_on_damage(rank, load_weights)
    agree_on_damage(rank, load_rest)


@torch.no_grad()
def _load_weights(reader: CheckpointReader, model: ManagedModel, leave: frozenset[str]) -> None:
    """Copy weights into their chunks. A tied weight keeps its value if all its names are in ``leave``."""
    names: dict[str, set[str]] = {name: {name} for name in model.storage.slots}
    for alias, stored in contents.aliases(model).items():
        names[stored].add(alias)
    # This is the order in the files if they were saved with the same layout.
    for slot in (each for each in model.storage.slots.values() if not names[each.name] <= leave):
        pieces = reader.weight_pieces(slot.name)
        if slot.param_view.is_contiguous():
            for first, values in pieces:
                write_range(slot, first, values, model.manager)
        else:
            whole = torch.empty(slot.param_view.shape, dtype=contents.weight_dtype(slot), device="cpu")
            for first, values in pieces:
                whole.view(-1)[first : first + values.numel()] = values
            write_values(slot, whole, model.manager)


@torch.no_grad()
def _load_moments(reader: CheckpointReader, model: ManagedModel, optimizer: GeminiOptimizer) -> None:
    """Copy this rank's optimizer states into their chunks."""
    slots = model.storage.slots
    saved = reader.manifest["optimizer_steps"]
    counts = {slots[name]: int(saved[name]) for name in _states_wanted(reader.manifest, optimizer)}
    replace_step_counts(optimizer, counts)
    for slot in (slot for slot in slots.values() if slot in counts):
        for state in optimizer.states_of(slot):
            if reader.stride(slot.name) == slot.param_view.stride():
                span = contents.owned_span(slot, state)
                for first, values in reader.state_pieces(state.name, slot.name, *span):
                    write_state_range(optimizer, slot, state, first, values)
            else:
                write_state(optimizer, slot, state, reader.state(state.name, slot.name))
