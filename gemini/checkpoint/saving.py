"""Saves a model and its optimizer, streamed block by block; each block's chunks are pinned once.

Every rank writes its own states, all ranks together write the weights, and rank 0 writes the manifest last.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemini.checkpoint import contents, plain_data
from gemini.checkpoint.contents import (
    Ranges,
    Scheduler,
    check_values,
    checked_model,
    kept_states,
    refuse_shared_directory,
)
from gemini.checkpoint.directory import (
    SAVE_CHARACTERS,
    Keep,
    check_keep,
    encoded,
    found_in,
    new_save,
    partial_checkpoint,
    prune,
    publish,
    read_json,
    saving_in,
    seal,
)
from gemini.checkpoint.sealed_file import Part, Staging, parts_of, sealed, write_sealed
from gemini.checkpoint.tensor_file import (
    TensorFile,
    TensorSpec,
    require_holdable,
    require_strided,
    settled,
    write_tensors,
)
from gemini.chunk import Chunk
from gemini.chunk.chunk import CutChunk, StateSpec
from gemini.comm.ranks import Rank
from gemini.errors import CheckpointError, ConfigError, IoError
from gemini.model.handle import ManagedModel
from gemini.optim.gemini_optimizer import GeminiOptimizer
from gemini.runtime.adopt import read_values, refresh_master
from gemini.runtime.gate.gradients import MASTER, StatePiece
from gemini.runtime.storage.model_storage import ChunkGroup, ManagedSlot
from gemini.system import rng
from gemini.system.config import parse_bytes
from gemini.system.process import shown_as

Range = tuple[int, int, str, str]  # first and last element, file, name of the tensor in it


class CheckpointWriter:
    """Writes one rank's files. Fill the files that :meth:`add_file` returns; :func:`new_checkpoint` seals
    them.

    ``states[state][parameter]``: the ranges of flat states in this rank's files. ``weights[name]``: the file
    of a whole weight.
    """

    def __init__(self, path: Path, rank: Rank, save: str) -> None:
        """``save``: the identity of this save, equal on all ranks and parts."""
        self.path = path
        self.rank = rank
        self.save = save
        self.final = path
        self.manifest: Mapping[str, Any] = {}
        self.rng: Mapping[str, Any] = {}
        self.weights: dict[str, str] = {}
        self.states: dict[str, dict[str, list[Range]]] = {}
        self._weight_bytes = 0
        self._staging = Staging()
        self._open: dict[str, TensorFile] = {}
        self._written: dict[str, list[Part]] = {}

    def describe(self, manifest: Mapping[str, Any], rng: Mapping[str, Any]) -> None:
        """Set the manifest without files (rank 0's is used), and this rank's random generator states."""
        self.manifest, self.rng = manifest, rng

    def add_file(
        self, name: str, tensors: Sequence[TensorSpec], metadata: Mapping[str, str] | None = None
    ) -> TensorFile:
        """Return a new file with room for ``tensors``; every element must be written."""
        self._open[name] = TensorFile(self.path / name, tensors, metadata or {}, self._staging)
        return self._open[name]

    def add_weights(
        self, name: str, tensors: Sequence[TensorSpec], metadata: Mapping[str, str], *, leads: bool = True
    ) -> TensorFile:
        """Return a file with room for whole weights. Several ranks write it, each other elements; the one
        that ``leads`` records its contents.
        """
        if leads:
            self.weights.update((tensor.name, name) for tensor in tensors)
            self._weight_bytes += sum(tensor.nbytes for tensor in tensors)
        self._open[name] = TensorFile(
            self.path / name,
            tensors,
            metadata,
            self._staging,
            shared=True,
            leads=leads,
            several_hosts=self.rank.several_hosts,
        )
        return self._open[name]

    def add_buffers(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a file of unmanaged tensors of the model's state."""
        self.weights.update(dict.fromkeys(tensors, name))
        self._weight_bytes += sum(tensor.nbytes for tensor in tensors.values())
        self._written[name] = write_tensors(self.path / name, tensors, self._staging)

    def finish_part(self) -> str:
        """Make all files durable and write this rank's description of them."""
        for name in list(self._open):
            self._written[name] = self._open.pop(name).finish()
        document = {
            "files": self._written,
            "weights": self.weights,
            "weight_bytes": self._weight_bytes,
            "states": self.states,
            "rng": self.rng,
        }
        write_sealed(self.path / contents.part_file(self.rank.index, self.rank.count), encoded(document))
        return ""

    def close(self) -> None:
        """Close files that are still open, unfinished. Idempotent."""
        for file in self._open.values():
            file.close()
        self._open.clear()
        self._staging.close()


@contextmanager
def new_checkpoint(
    directory: str | os.PathLike[str], step: int, *, rank: Rank | None = None, keep: int = 2
) -> Iterator[CheckpointWriter]:
    """Yield the writer of this rank's files; when the block ends the checkpoint is complete. Collective.

    If the block raises on one rank it raises on all, the new files are removed and earlier checkpoints stay.
    For parts of a model, one directory each: all parts are complete before one is renamed, and all are
    renamed before an old one is removed.

    Raises:
        IoError: the directory cannot be written.
        CheckpointError: another process is saving there, or another rank failed.
    """
    check_keep(keep)
    rank = rank or Rank()
    rank.require_same_directory(directory)
    stays = _kept(rank, Path(directory), keep)
    with ExitStack() as stack:

        def begin() -> str:
            if rank.index:
                return ""
            return new_save() + str(stack.enter_context(partial_checkpoint(directory, step, stays)))

        begun = [texts[0] for texts in rank.collect_parts(begin)]
        path = Path(begun[rank.part][SAVE_CHARACTERS:])
        writer = CheckpointWriter(path, rank, begun[0][:SAVE_CHARACTERS])
        try:
            yield writer
        except BaseException as error:
            rank.tell_failure(error)
            raise
        else:
            rank.agree(writer.finish_part)
        finally:
            writer.close()
        _lead(rank, lambda: _seal(writer))
        writer.final = Path(_lead(rank, lambda: publish(path)))
        stays = _kept(rank, path.parent, keep)
        _lead(rank, lambda: prune(path.parent, stays))


def _lead(rank: Rank, action: Callable[[], object]) -> str:
    """Run ``action`` on rank 0. Return its result, as text, on all ranks once it has succeeded.
    Collective.
    """
    return rank.agree(lambda: "" if rank.index else str(action()))


def _kept(rank: Rank, root: Path, number: int) -> Keep:
    """Return which checkpoints stay here, given the directories of the other parts. Collective."""
    if rank.parts is None:
        return Keep(number)

    def saves() -> str:
        with saving_in(root):
            return "" if rank.index else json.dumps([found.save for found in found_in(root) if found.save])

    held = [set(json.loads(texts[0])) for texts in rank.collect_parts(saves)]
    return Keep(number, frozenset(set.intersection(*held)))


def _seal(writer: CheckpointWriter) -> None:
    """Merge the descriptions of all ranks and seal the checkpoint."""
    written: dict[str, list[Part]] = {}
    weights: dict[str, str] = {}
    states: Ranges = {state: {} for state in kept_states(writer.manifest)}
    total = 0
    for index in range(writer.rank.count):
        name = contents.part_file(index, writer.rank.count)
        part = read_json(writer.path / name)
        raw = (writer.path / name).read_bytes()
        for file, runs in part["files"].items():
            written.setdefault(file, []).extend(Part(*run) for run in runs)
        written[name] = parts_of(memoryview(raw), 0)
        weights.update(part["weights"])
        total += part["weight_bytes"]
        for state, ranges in part["states"].items():
            for param, found in ranges.items():
                states[state].setdefault(param, []).extend(found)
    _check(writer.manifest, weights, states)
    files = {name: sealed(writer.path / name, parts) for name, parts in written.items()}
    for name, document in (
        (contents.MODEL_INDEX, {"metadata": {"total_size": total}, "weight_map": weights}),
        (contents.OPTIMIZER_INDEX, {"states": states}),
    ):
        files[name] = write_sealed(writer.path / name, encoded(document))
    manifest = {**writer.manifest, "ranks": writer.rank.count, "files": files}
    if writer.rank.parts is not None:
        manifest["part"] = contents.part_of(writer.rank)
    seal(writer.path, manifest, writer.save)


def _check(manifest: Mapping[str, Any], weights: Mapping[str, str], states: Ranges) -> None:
    """Sort the ranges. Raises CheckpointError unless every weight, and every element of every state exactly
    once, is there.
    """
    for ranges in states.values():
        for found in ranges.values():
            found.sort()
    try:
        check_values(manifest, weights, states)
    except ValueError as error:
        raise CheckpointError(f"the checkpoint would be incomplete: {error}") from error


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
    """Write everything that a bit-exact resume needs; return the checkpoint's directory below ``directory``.
    Collective.

    Call it between steps. Weights (fp32, from masters if there are any) are safetensors with a Hugging Face
    index, readable without this library; moments are safetensors too, as ranges of flat parameters. Large
    values are written directly from their chunks, others through 16 MiB of staging; a parameter with a memory
    order other than that of rows is briefly copied whole. Only the user can read the files. A failure or kill
    leaves the earlier checkpoints. All ranks use one directory that all of them see; each writes its own
    values. Ranks with other parts of the model (``model_ranks``) also call it together, each with its own
    directory: all parts are saved, or none.

    Args:
        directory: the directory of checkpoints.
        model, optimizer: the managed model and its optimizer.
        scheduler: a learning-rate scheduler to save, too.
        extra: JSON data of the training program (numbers, text, lists, dicts with text keys).
        keep: the number of checkpoints that stay, including this one: :func:`load` falls back to an older one
            if the newest is damaged. While this one is being written there is one more.
        shard_bytes: the most bytes of a file, but at least one tensor.

    Raises:
        IoError: the directory cannot be written, or a chunk cannot be read.
        CheckpointError: gradients are pending, ``extra`` is not JSON data, the scheduler's state has
            objects that cannot be saved, a parameter was replaced after wrapping, or another process is
            saving in ``directory``.
    """
    model, optimizer = checked_model(model, optimizer)
    refuse_shared_directory(model, directory)
    shard = checked_shard_bytes(shard_bytes)
    rank = model.rank_of_parts()
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
    """Prepare the model for saving on all ranks; return the manifest. Raises like :func:`save`, on all ranks
    if one fails.
    """
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
    """Return ``shard_bytes`` as a number. Raises ConfigError."""
    found = parse_bytes(shard_bytes, name="shard_bytes")
    if not found or found < 1:
        raise ConfigError(f"shard_bytes is {shard_bytes!r}; a file holds 1 byte or more, as in '4GiB'")
    return found


def _refuse_pending_gradients(model: ManagedModel) -> None:
    pending = [name for name, slot in model.storage.slots.items() if slot.has_grad]
    if pending:
        raise CheckpointError(
            f"{len(pending)} parameters have gradients (first {pending[0]!r}) and a checkpoint does "
            "not store gradients: save after optimizer.step(), or discard the gradients with "
            "optimizer.zero_grad()"
        )


def _check_tensors(model: ManagedModel) -> None:
    """Raise CheckpointError for tensors that no file can hold, before anything is written."""
    tensors = [
        TensorSpec(slot.name, contents.weight_dtype(slot), tuple(slot.param_view.shape))
        for slot in model.storage.slots.values()
    ]
    for name, value in contents.buffers(model).items():
        require_strided(name, value)
        tensors.append(TensorSpec(name, value.dtype, tuple(value.shape)))
    require_holdable(tensors, contents.aliases(model))


def _check_json(value: object, where: str) -> None:
    """Raise CheckpointError unless JSON preserves ``value`` (except that tuples become lists)."""
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
    """Return parameter groups and the states of scheduler, optimizer and modules as JSON data that preserves
    types.
    """
    groups = [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    attributes = optimizer.rule.attributes() if optimizer.rule.shares else {}
    changed = {"attributes": plain_data.encode(attributes, "the optimizer")} if attributes else {}
    return {
        **changed,
        "param_groups": plain_data.encode(groups, "a parameter group"),
        "scheduler": plain_data.encode(
            scheduler.state_dict() if scheduler is not None else None, "the scheduler's state"
        ),
        "small_states": plain_data.encode(
            {slot.name: state for slot, state in optimizer.small.items()}, "the optimizer's state"
        ),
        "extra_states": plain_data.encode(contents.extra_states(model), "a module's extra state"),
    }


@dataclass(frozen=True)
class Extent:
    """Elements that are contiguous in memory and in a file. ``read`` returns them while they are pinned; with
    ``in_place`` as a view of their chunk in host memory.
    """

    file: TensorFile
    tensor: str
    first: int
    nbytes: int
    read: Callable[[], torch.Tensor]
    in_place: bool


@dataclass(frozen=True)
class Block:
    """Values that can be read with ``tensors`` pinned once. ``owner``: a state piece, or a frozen parameter
    or part of one.
    """

    owner: StatePiece | ManagedSlot | Chunk
    tensors: tuple[int, ...]
    extents: tuple[Extent, ...]

    @property
    def nbytes(self) -> int:
        return sum(extent.nbytes for extent in self.extents)

    def write(self) -> None:
        """Write the values, which must be pinned and must not change until this returns."""
        with settled(extent.file for extent in self.extents):
            for extent in self.extents:
                write = extent.file.lend if extent.in_place else extent.file.write
                write(extent.tensor, extent.first, extent.read())


class CheckpointFiles:
    """The files of a checkpoint, and where this rank's values go. Of several copies of a model (hybrid
    sharding) the first one is written.

    The constructor opens the files. It also writes everything outside the blocks: buffers, and weights with a
    memory order other than that of rows, which ranks must gather.
    """

    def __init__(
        self, writer: CheckpointWriter, model: ManagedModel, optimizer: GeminiOptimizer, shard_bytes: int
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._viewed = not model.device.has_own_memory
        self._is_written = model.peers is None or model.peers.share.replica == 0
        self._weights: dict[str, TensorFile] = {}
        self._states: dict[str, TensorFile] = {}
        # All ranks must get past this point or none: the reads below are collective.
        writer.rank.agree(partial(self._open, writer, shard_bytes))
        error: IoError | None = None
        for slot in model.storage.slots.values():
            if not slot.param_view.is_contiguous():
                values = read_values(slot, model.manager)  # over ranks, by all of them
                if writer.rank.index == 0 and error is None:
                    error = self._write_whole(slot, values)
        if error is not None:
            raise error

    def _open(self, writer: CheckpointWriter, shard_bytes: int) -> str:
        if self._is_written:
            self._weights = _weight_files(writer, self._model, shard_bytes)
            self._states = _state_files(writer, self._optimizer, shard_bytes)
        tensors = contents.buffers(self._model)
        if tensors and writer.rank.index == 0:
            writer.add_buffers(contents.BUFFERS, tensors)
        return ""

    def _write_whole(self, slot: ManagedSlot, values: torch.Tensor) -> IoError | None:
        """Write a weight; return the error if it failed."""
        try:
            self._weights[slot.name].write(slot.name, 0, values.to(contents.weight_dtype(slot)))
        except IoError as error:
            return error
        return None

    def blocks(self) -> list[Block]:
        """Return all blocks; those of state pieces come in the order of their updates."""
        found: list[Block] = []
        for group in self._model.storage.groups if self._is_written else ():
            found += [self._piece(group, piece) for piece in group.pieces]
            if not group.pieces:
                dense = [slot for slot in group.slots if slot.param_view.is_contiguous()]
                found += [block for slot in dense for block in self._frozen(slot)]
        return [block for block in found if block.extents]

    def _frozen(self, slot: ManagedSlot) -> Iterator[Block]:
        first, last = contents.owned(slot)
        if first == last:
            return
        file = self._weights[slot.name]
        dtype = contents.weight_dtype(slot)
        in_place = self._viewed and slot.group.param.spec.dtype == dtype
        param = slot.group.param
        for start, stop, tensors in slot.group.stretches(slot, slot.start + first, slot.start + last):
            read = partial(_param_values, slot.group, start, stop, dtype)
            nbytes = (stop - start) * dtype.itemsize
            extent = Extent(file, slot.name, start - slot.start, nbytes, read, in_place)
            owner = param.at(start) if isinstance(param, CutChunk) else slot
            yield Block(owner, tuple(tensors), (extent,))

    def _piece(self, group: ChunkGroup, piece: StatePiece) -> Block:
        tensors: dict[int, None] = {}  # a set that keeps its order
        extents = []
        for slot in group.slots:
            start, stop = slot.overlapping(piece)
            if start >= stop:
                continue
            read: Callable[[], torch.Tensor]
            in_place = self._viewed
            if slot.param_view.is_contiguous():
                dtype = contents.weight_dtype(slot)
                if piece.has_master:
                    tensors[piece.tensors[MASTER]] = None
                    read = partial(piece.master, start, stop)
                else:
                    tensors.update(dict.fromkeys(group.value_tensors([slot])))
                    read = partial(_param_values, group, start, stop, dtype)
                    in_place = self._viewed and group.param.spec.dtype == dtype
                nbytes = (stop - start) * dtype.itemsize
                file = self._weights[slot.name]
                extents.append(Extent(file, slot.name, start - slot.start, nbytes, read, in_place))
            if slot in self._optimizer.steps:
                for state in self._optimizer.states_of(slot):
                    tensors[piece.tensors[state.key]] = None
                    name = _range_name(slot, state)
                    read = partial(slot.state_in, piece, state)
                    nbytes = state.nbytes(stop - start)
                    first = slot.span_in(piece, state).start - contents.owned_span(slot, state)[0]
                    extents.append(Extent(self._states[name], name, first, nbytes, read, self._viewed))
        return Block(piece, tuple(tensors), tuple(extents))


def blocks_of_tensors(model: ManagedModel, blocks: Iterable[Block]) -> Mapping[int, Sequence[Block]]:
    """Return for each tensor of the chunk table the blocks with its values; for a parameter that is gathered
    at times, also the blocks of its shard.
    """
    found: defaultdict[int, list[Block]] = defaultdict(list)
    for block in blocks:
        for tensor in block.tensors:
            found[tensor].append(block)
    for slot in model.storage.slots.values():
        if slot.group.shard is not None:
            (whole,) = slot.param_ref.tensors
            found[whole] = [block for tensor in slot.group.value_tensors([slot]) for block in found[tensor]]
    return found


def _param_values(group: ChunkGroup, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    return group.values(start, stop).to(dtype)


def _range_name(slot: ManagedSlot, state: StateSpec) -> str:
    return contents.range_name(slot.name, state.name, *contents.owned_span(slot, state))


def _weight_files(writer: CheckpointWriter, model: ManagedModel, shard_bytes: int) -> dict[str, TensorFile]:
    """Open the files of the weights, which all ranks write; return each weight's file."""
    specs = [
        TensorSpec(slot.name, contents.weight_dtype(slot), tuple(slot.param_view.shape))
        for group in model.storage.groups
        for slot in group.slots
    ]
    tied = contents.aliases(model)
    files: dict[str, TensorFile] = {}
    shards = file_shards(specs, shard_bytes)
    for number, shard in enumerate(shards):
        stored = {spec.name for spec in shard}
        # The same metadata as safetensors.torch.save_model: its load_model restores the ties.
        metadata = {alias: kept for alias, kept in tied.items() if kept in stored}
        name = contents.weights_file(number, len(shards))
        file = writer.add_weights(name, shard, metadata, leads=writer.rank.index == 0)
        files.update(dict.fromkeys(stored, file))
    return files


def _state_files(
    writer: CheckpointWriter, optimizer: GeminiOptimizer, shard_bytes: int
) -> dict[str, TensorFile]:
    """Open the files of all moments; return each range's file, and record the ranges in ``writer``."""
    specs, owners = [], {}
    for group in optimizer.model.storage.groups:
        for slot in group.slots:
            for state in optimizer.states_of(slot) if slot in optimizer.steps else ():
                start, stop = contents.owned_span(slot, state)
                if start < stop:
                    specs.append(TensorSpec(_range_name(slot, state), state.dtype, (stop - start,)))
                    owners[specs[-1].name] = (slot, state)
    files: dict[str, TensorFile] = {}
    for number, shard in enumerate(file_shards(specs, shard_bytes)):
        name = contents.optimizer_file(writer.rank.index, writer.rank.count, number)
        file = writer.add_file(name, shard)
        for spec in shard:
            slot, state = owners[spec.name]
            files[spec.name] = file
            ranges = writer.states.setdefault(state.name, {})
            ranges[slot.name] = [(*contents.owned_span(slot, state), name, spec.name)]
    return files


def file_shards(specs: Sequence[TensorSpec], shard_bytes: int) -> list[list[TensorSpec]]:
    """Divide ``specs``, in order, among files of at most ``shard_bytes``, or of one tensor."""
    shards: list[list[TensorSpec]] = []
    left = 0
    for spec in specs:
        if not shards or spec.nbytes > left:
            shards.append([])
            left = shard_bytes
        shards[-1].append(spec)
        left -= spec.nbytes
    return shards
