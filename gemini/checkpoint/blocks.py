"""What this rank has of a model as blocks, each read while its chunks are pinned once, and their files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from gemini.checkpoint import contents
from gemini.checkpoint.tensor_file import TensorFile, TensorSpec, settled
from gemini.checkpoint.writer import CheckpointWriter
from gemini.chunk.state_spec import StateSpec
from gemini.errors import IoError
from gemini.model.managed_model import ManagedModel
from gemini.optim.gemini_optimizer import GeminiOptimizer
from gemini.runtime import MASTER, ChunkGroup, ManagedSlot, StatePiece, read_values


@dataclass(frozen=True)
class Extent:
    """Elements that lie in one piece in memory and in a file: ``read`` returns them while they are pinned,
    where ``in_place`` as a view of their chunk in host memory."""

    file: TensorFile
    tensor: str
    first: int
    nbytes: int
    read: Callable[[], torch.Tensor]
    in_place: bool


@dataclass(frozen=True)
class Block:
    """What pinning ``tensors`` once is enough for: a state piece, or a frozen parameter (``owner``)."""

    owner: StatePiece | ManagedSlot
    tensors: tuple[int, ...]
    extents: tuple[Extent, ...]

    @property
    def nbytes(self) -> int:
        return sum(extent.nbytes for extent in self.extents)

    def write(self) -> None:
        """Write the values, which are pinned, and which nobody changes until this returns."""
        with settled(extent.file for extent in self.extents):
            for extent in self.extents:
                write = extent.file.lend if extent.in_place else extent.file.write
                write(extent.tensor, extent.first, extent.read())


class CheckpointFiles:
    """The files of a checkpoint, and which of this rank's values go where. Of several copies of a model
    (hybrid sharding) the first is written.

    Making it opens the files and writes what is in no block: buffers, and weights whose memory order is not
    that of rows, which ranks have to put together.
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
        # Ranks go on together, or not at all: what follows is theirs together.
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
        """Write a weight; return what failed."""
        try:
            self._weights[slot.name].write(slot.name, 0, values.to(contents.weight_dtype(slot)))
        except IoError as error:
            return error
        return None

    def blocks(self) -> list[Block]:
        """Return all blocks, those of state pieces in the order in which they are updated."""
        found: list[Block] = []
        for group in self._model.storage.groups if self._is_written else ():
            found += [self._piece(group, piece) for piece in group.pieces]
            if not group.pieces:
                found += [self._frozen(slot) for slot in group.slots if slot.param_view.is_contiguous()]
        return [block for block in found if block.extents]

    def _frozen(self, slot: ManagedSlot) -> Block:
        first, last = contents.owned(slot)
        if first == last:
            return Block(slot, (), ())
        file = self._weights[slot.name]
        dtype = contents.weight_dtype(slot)
        read = partial(_param_values, slot.group, slot.start + first, slot.start + last, dtype)
        in_place = self._viewed and slot.group.param.spec.dtype == dtype
        extent = Extent(file, slot.name, first, (last - first) * dtype.itemsize, read, in_place)
        return Block(slot, tuple(slot.group.value_tensors([slot])), (extent,))

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
                for state in self._optimizer.states_of(group):
                    tensors[piece.tensors[state.key]] = None
                    name = _range_name(slot, state)
                    read = partial(slot.state_in, piece, state)
                    nbytes = state.nbytes(stop - start)
                    first = slot.span_in(piece, state).start - contents.owned_span(slot, state)[0]
                    extents.append(Extent(self._states[name], name, first, nbytes, read, self._viewed))
        return Block(piece, tuple(tensors), tuple(extents))


def blocks_of_tensors(model: ManagedModel, blocks: Iterable[Block]) -> Mapping[int, Sequence[Block]]:
    """Return by tensor of the chunk table the blocks with values of it, for a parameter that is whole at
    times also those of its shard."""
    found: defaultdict[int, list[Block]] = defaultdict(list)
    for block in blocks:
        for tensor in block.tensors:
            found[tensor].append(block)
    for slot in model.storage.slots.values():
        (whole,) = slot.param_ref.tensors
        found[whole] = [block for tensor in slot.group.value_tensors([slot]) for block in found[tensor]]
    return found


def _param_values(group: ChunkGroup, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    return group.values(start, stop).to(dtype)


def _range_name(slot: ManagedSlot, state: StateSpec) -> str:
    return contents.range_name(slot.name, state.name, *contents.owned_span(slot, state))


def _weight_files(writer: CheckpointWriter, model: ManagedModel, shard_bytes: int) -> dict[str, TensorFile]:
    """Open the files of the weights, to which all ranks write; return which weight is in which."""
    specs = [
        TensorSpec(slot.name, contents.weight_dtype(slot), tuple(slot.param_view.shape))
        for group in model.storage.groups
        for slot in group.slots
    ]
    tied = contents.aliases(model)
    files: dict[str, TensorFile] = {}
    shards = _shards(specs, shard_bytes)
    for number, shard in enumerate(shards):
        stored = {spec.name for spec in shard}
        # As safetensors.torch.save_model does it: its load_model ties them again.
        metadata = {alias: kept for alias, kept in tied.items() if kept in stored}
        name = contents.weights_file(number, len(shards))
        file = writer.add_weights(name, shard, metadata, leads=writer.rank.index == 0)
        files.update(dict.fromkeys(stored, file))
    return files


def _state_files(
    writer: CheckpointWriter, optimizer: GeminiOptimizer, shard_bytes: int
) -> dict[str, TensorFile]:
    """Open the files of all moments; return which range is in which, and tell ``writer``."""
    specs, owners = [], {}
    for group in optimizer.model.storage.groups:
        for slot in group.slots:
            for state in optimizer.states_of(group) if slot in optimizer.steps else ():
                start, stop = contents.owned_span(slot, state)
                if start < stop:
                    specs.append(TensorSpec(_range_name(slot, state), state.dtype, (stop - start,)))
                    owners[specs[-1].name] = (slot, state)
    files: dict[str, TensorFile] = {}
    for number, shard in enumerate(_shards(specs, shard_bytes)):
        name = contents.optimizer_file(writer.rank.index, writer.rank.count, number)
        file = writer.add_file(name, shard)
        for spec in shard:
            slot, state = owners[spec.name]
            files[spec.name] = file
            ranges = writer.states.setdefault(state.name, {})
            ranges[slot.name] = [(*contents.owned_span(slot, state), name, spec.name)]
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
