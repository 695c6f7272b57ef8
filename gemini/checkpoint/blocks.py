"""A model's values as blocks, each read while its chunks are pinned once, and the files they go to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from gemini.checkpoint import contents
from gemini.checkpoint.tensor_file import TensorFile, TensorSpec
from gemini.checkpoint.writer import CheckpointWriter
from gemini.chunk import ChunkKind
from gemini.ddp import GeminiDDP
from gemini.optim.gemini_optimizer import GeminiOptimizer
from gemini.runtime import ChunkGroup, ManagedSlot, StatePiece, read_values


@dataclass(frozen=True)
class Extent:
    """Elements that lie in one piece in memory and in a file: ``read`` returns them while they are pinned."""

    file: TensorFile
    tensor: str
    first: int
    nbytes: int
    read: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Block:
    """What pinning ``tensors`` once is enough for: a state piece, or a frozen parameter (``owner``)."""

    owner: StatePiece | ManagedSlot
    tensors: tuple[int, ...]
    extents: tuple[Extent, ...]

    @property
    def nbytes(self) -> int:
        return sum(extent.nbytes for extent in self.extents)


class CheckpointFiles:
    """The files of a checkpoint and what goes where. With one rank: all of it.

    Making it opens the files and writes what is in no block: buffers, and weights whose memory order is not
    that of rows.
    """

    def __init__(
        self, writer: CheckpointWriter, model: GeminiDDP, optimizer: GeminiOptimizer, shard_bytes: int
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._weights = _weight_files(writer, model, shard_bytes)
        self._states = _state_files(writer, optimizer, shard_bytes)
        tensors = contents.buffers(model)
        if tensors and writer.rank.index == 0:
            writer.add_buffers(contents.BUFFERS, tensors)
        for slot in model.storage.slots.values():
            if not self._in_blocks(slot):
                values = read_values(slot, model.manager)  # over ranks, by all of them
                if slot.name in self._weights:
                    self._weights[slot.name].write(slot.name, 0, values.to(contents.weight_dtype(slot)))

    def blocks(self) -> list[Block]:
        """Return all blocks, those of state pieces in the order in which they are updated."""
        found: list[Block] = []
        for group in self._model.storage.groups:
            found += [self._piece(group, piece) for piece in group.pieces]
            if not group.pieces:
                found += [self._frozen(slot) for slot in group.slots if self._in_blocks(slot)]
        return [block for block in found if block.extents]

    def _in_blocks(self, slot: ManagedSlot) -> bool:
        """Say whether a weight is written block by block: this rank has all of it, in the order of rows."""
        return self._model.peers is None and slot.param_view.is_contiguous()

    def _frozen(self, slot: ManagedSlot) -> Block:
        file = self._weights[slot.name]
        dtype = contents.weight_dtype(slot)
        read = partial(_param_values, slot.group, slot.start, slot.stop, dtype)
        extent = Extent(file, slot.name, 0, (slot.stop - slot.start) * dtype.itemsize, read)
        return Block(slot, tuple(slot.param_ref.tensors), (extent,))

    def _piece(self, group: ChunkGroup, piece: StatePiece) -> Block:
        tensors: dict[int, None] = {}  # a set that keeps its order
        extents = []
        for slot in group.slots:
            start, stop = slot.overlapping(piece)
            if start >= stop:
                continue
            read: Callable[[], torch.Tensor]
            if self._in_blocks(slot):
                dtype = contents.weight_dtype(slot)
                if piece.has(ChunkKind.MASTER):
                    tensors[piece.tensors[ChunkKind.MASTER]] = None
                    read = partial(piece.flat, ChunkKind.MASTER, start, stop)
                else:
                    tensors.update(dict.fromkeys(slot.param_ref.tensors))
                    read = partial(_param_values, group, start, stop, dtype)
                nbytes = (stop - start) * dtype.itemsize
                file = self._weights[slot.name]
                extents.append(Extent(file, slot.name, start - slot.start, nbytes, read))
            if slot in self._optimizer.steps:
                for state, kind in contents.MOMENTS.items():
                    tensors[piece.tensors[kind]] = None
                    name = _range_name(slot, state)
                    read = partial(piece.flat, kind, start, stop)
                    file, first = self._states[name], start - slot.start - _owned(slot)[0]
                    extents.append(Extent(file, name, first, 4 * (stop - start), read))
        return Block(piece, tuple(tensors), tuple(extents))


def _param_values(group: ChunkGroup, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    return group.param.tensor[start:stop].to(dtype)


def _owned(slot: ManagedSlot) -> tuple[int, int]:
    """Return the elements ``[start, stop)`` of a parameter whose states this rank has."""
    start, stop = slot.start, slot.stop
    if slot.group.shard is not None:
        start, stop = slot.group.shard.clip(start, stop)
    return start - slot.start, stop - slot.start


def _range_name(slot: ManagedSlot, state: str) -> str:
    return contents.range_name(slot.name, state, *_owned(slot))


def _weight_files(writer: CheckpointWriter, model: GeminiDDP, shard_bytes: int) -> dict[str, TensorFile]:
    """Open the files of the weights that this rank writes; return which weight is in which."""
    specs = [
        TensorSpec(slot.name, contents.weight_dtype(slot), tuple(slot.param_view.shape))
        for group in model.storage.groups
        for slot in group.slots
    ]
    tied = contents.aliases(model)
    files: dict[str, TensorFile] = {}
    rank = writer.rank
    shards = _shards(specs, min(shard_bytes, -(-sum(spec.nbytes for spec in specs) // rank.count)))
    for number, shard in enumerate(shards):
        if number % rank.count != rank.index:
            continue
        stored = {spec.name for spec in shard}
        # As safetensors.torch.save_model does it: its load_model ties them again.
        metadata = {alias: kept for alias, kept in tied.items() if kept in stored}
        file = writer.add_weights(contents.weights_file(number, len(shards)), shard, metadata)
        files.update(dict.fromkeys(stored, file))
    return files


def _state_files(
    writer: CheckpointWriter, optimizer: GeminiOptimizer, shard_bytes: int
) -> dict[str, TensorFile]:
    """Open the files of all moments; return which range is in which, and tell ``writer``."""
    specs, owners = [], {}
    for group in optimizer.model.storage.groups:
        for slot in group.slots:
            start, stop = _owned(slot)
            if slot in optimizer.steps and start < stop:
                for state in contents.MOMENTS:
                    specs.append(TensorSpec(_range_name(slot, state), torch.float32, (stop - start,)))
                    owners[specs[-1].name] = (slot, state)
    files: dict[str, TensorFile] = {}
    for number, shard in enumerate(_shards(specs, shard_bytes)):
        name = contents.optimizer_file(writer.rank.index, writer.rank.count, number)
        file = writer.add_file(name, shard)
        for spec in shard:
            slot, state = owners[spec.name]
            files[spec.name] = file
            writer.states[state][slot.name] = [(*_owned(slot), name, spec.name)]
    return files


def _shards(specs: Sequence[TensorSpec], shard_bytes: int) -> list[list[TensorSpec]]:
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
