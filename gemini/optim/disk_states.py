"""Optimizer states in files, and the steps over them.

A file is a sequence of batches of at most 4 MiB; one aligned request reads or writes a batch. A batch
contains segments: consecutive elements of one parameter, in its memory order, in whole blocks except at its
end, stored as one state array after another. The file may have only the first elements of a parameter; the
states of the others form a batch that stays in memory.

A pass visits extents in order, through a ring of buffers. While one is updated, the next ones are read and
the last ones are written, so the disk is always busy. Passes are cyclic: at the end of a pass the first
extents of the next pass are already read, and its last writes continue after it has returned.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import repeat
from typing import Any

import numpy as np
import torch

from gemini import _C
from gemini.chunk.chunk import BLOCK_NUMEL, StateSpec
from gemini.chunk.layout import flat
from gemini.errors import IoError, StateError
from gemini.offload.async_file import AsyncFile, direct_memory, round_to_block
from gemini.optim.kernels import ARRAYS, AdamHyper, AdamRow, AdamStep, GradScale, KeptAdamTable, StateFormat
from gemini.optim.step_rows import TENSOR_EXCHANGE, Member
from gemini.system.threads import usable_processors

NUM_BUFFERS = 8
_MAX_AHEAD = NUM_BUFFERS // 2 + 1  # half are being read, one is being updated, the others are being written


@dataclass(frozen=True, eq=False)
class Extent:
    """A file range that fits one buffer, in blocks of 4096 bytes."""

    file: AsyncFile
    offset: int
    nbytes: int


@dataclass(eq=False)
class _Transfer:
    """A buffer in use until its transfer has ended. Ticket 0: nothing is being read into it."""

    extent: Extent
    slot: int
    buffer: torch.Tensor
    ticket: int = 0

    def read(self) -> None:
        """Start reading the extent into the buffer."""
        self.ticket = self.extent.file.read(self.buffer.data_ptr(), self.extent.nbytes, self.extent.offset)

    def write(self) -> None:
        """Start writing the extent from the buffer."""
        self.ticket = self.extent.file.write(self.buffer.data_ptr(), self.extent.nbytes, self.extent.offset)

    def wait(self) -> None:
        if self.ticket != 0:
            self.extent.file.wait(self.ticket)


# visit(index of the extent, its buffer): reads or changes the extent's bytes.
Visit = Callable[[int, torch.Tensor], None]


class StateRing:
    """The ring of buffers. Owns them, and the files, which it closes; usable in the process that added the
    first file. Not thread-safe.
    """

    def __init__(self) -> None:
        """Make an empty ring: memory is allocated with the first file."""
        self._memory: torch.Tensor | None = None
        self._buffers: list[torch.Tensor] = []
        self._ahead: deque[_Transfer] = deque()  # the next extents of a pass, in order
        self._behind: deque[_Transfer] = deque()  # oldest first
        self._files: list[AsyncFile] = []
        self._owner: int | None = None

    def add(self, file: AsyncFile, extent_bytes: int) -> None:
        """Take ownership of ``file``, with extents of at most ``extent_bytes``."""
        if self._owner is None:
            self._owner = os.getpid()
            # Requests must end before the buffers are freed, even if close() is never called.
            weakref.finalize(self, _close, self._files, self._owner)
        self.settle()
        self._forget()
        if self._memory is None or self._memory.nbytes < NUM_BUFFERS * extent_bytes:
            memory = direct_memory(NUM_BUFFERS * extent_bytes)
            for other in self._files:
                if self._memory is not None:
                    other.unregister(self._memory.data_ptr())
                other.register(memory.data_ptr(), memory.nbytes)
            self._memory, self._buffers = memory, list(memory.split(extent_bytes))
        self._files.append(file)
        file.register(self._memory.data_ptr(), self._memory.nbytes)

    @property
    def nbytes(self) -> int:
        """The bytes of the buffers."""
        return 0 if self._memory is None else self._memory.nbytes

    def update(self, extents: Sequence[Extent], old: Sequence[bool], visit: Visit) -> None:
        """Read (if ``old``; else the buffer's bytes are arbitrary), visit and write every extent.

        On return the last writes may still run, and the first extents are being read for the next pass over
        the same extents: see ``settle``.

        Raises:
            IoError: a transfer failed; some extents are new, others old.
            StateError: this is a forked child.
        """
        self._pass(extents, old, visit, writes=True)

    def read(self, extents: Sequence[Extent], visit: Visit) -> None:
        """Read and visit every extent. Raises like ``update``; the files are unchanged."""
        self._pass(extents, [True] * len(extents), visit, writes=False)

    def settle(self) -> None:
        """Wait for the writes that the last pass started.

        Raises:
            IoError: a write failed; the content of its extent is undefined.
            StateError: this is a forked child.
        """
        self._require_owner()
        while self._behind:
            self._end_oldest_write()

    def close(self) -> None:
        """End all requests, ignoring their errors, and close the files. Idempotent."""
        if self._owner is not None:
            _close(self._files, self._owner)
        self._files.clear()
        for transfers in (self._ahead, self._behind):
            transfers.clear()
        self._memory, self._buffers = None, []

    def _pass(self, extents: Sequence[Extent], old: Sequence[bool], visit: Visit, *, writes: bool) -> None:
        self.settle()
        try:
            if any(one.extent is not other for one, other in zip(self._ahead, extents, strict=False)):
                self._forget()
            for index in range(len(extents)):
                self._read_ahead(extents, index, old, cyclic=writes)
                transfer = self._ahead[0]
                transfer.wait()
                visit(index, transfer.buffer)
                self._ahead.popleft()
                if writes:
                    transfer.write()
                    self._behind.append(transfer)
        except BaseException:
            self._abandon()
            raise

    def _read_ahead(
        self, extents: Sequence[Extent], index: int, old: Sequence[bool], *, cyclic: bool
    ) -> None:
        """Start reads until enough extents after ``index`` are in flight; past the end, those that begin the
        next pass.
        """
        while len(self._ahead) < _MAX_AHEAD:
            at = index + len(self._ahead)
            has_content = at >= len(extents) or old[at]
            if at >= len(extents):
                at -= len(extents)
                if not cyclic or at >= index or self._is_being_written(extents[at]):
                    return
            slot = self._free_slot()
            transfer = _Transfer(extents[at], slot, self._buffers[slot])
            if has_content:
                transfer.read()
            self._ahead.append(transfer)

    def _is_being_written(self, extent: Extent) -> bool:
        return any(transfer.extent is extent for transfer in self._behind)

    def _free_slot(self) -> int:
        used = {transfer.slot for transfer in (*self._ahead, *self._behind)}
        if len(used) == NUM_BUFFERS:
            used.remove(self._end_oldest_write())
        return next(slot for slot in range(NUM_BUFFERS) if slot not in used)

    def _end_oldest_write(self) -> int:
        """Wait for the oldest write and return the index of its buffer, now free."""
        self._behind[0].wait()
        return self._behind.popleft().slot

    def _forget(self) -> None:
        """Discard extents that were read ahead. Errors of these reads are ignored: the reads will be
        repeated.
        """
        while self._ahead:
            with contextlib.suppress(IoError):
                self._ahead[0].wait()
            self._ahead.popleft()

    def _abandon(self) -> None:
        """Wait until no request uses the buffers. Errors are ignored: the first one is already
        being raised.
        """
        for file in self._files:
            with contextlib.suppress(IoError):
                file.wait_all()
        self._ahead.clear()
        self._behind.clear()

    def _require_owner(self) -> None:
        if self._owner not in (None, os.getpid()):
            raise StateError(
                f"these optimizer states are in a file of process {self._owner}; a forked child cannot use "
                "them: give it state_dict() and an optimizer of its own"
            )


def _close(files: Sequence[AsyncFile], owner: int) -> None:
    if os.getpid() == owner:  # in a forked child the files belong to the parent
        for file in files:
            file.close()


MAX_BATCH_BYTES = 4 * 2**20
_MIN_BATCH_BYTES = 64 * 2**10
_RING_SHARE = 40  # the buffers take at most 1/40 of the file's size, unless the file is very small
_LINE_BYTES = 64  # arrays start at cache lines

State = Mapping[str, torch.Tensor]


class Source(Enum):
    """The origin of states that are not given as tensors."""

    FILE = "file"
    ZERO = "zero"


@dataclass(frozen=True)
class StateSegment:
    """Elements ``start .. start + numel`` of a parameter. ``offsets``: bytes of each state array in the
    batch.
    """

    param: torch.Tensor
    start: int
    numel: int
    offsets: Mapping[str, int]


@dataclass(frozen=True)
class SegmentBatch:
    """The segments that one request reads or writes."""

    offset: int
    nbytes: int
    segments: tuple[StateSegment, ...]


def lay_out(
    params: Sequence[torch.Tensor],
    state_format: StateFormat,
    batch_bytes: int | None = None,
    *,
    numels: Mapping[torch.Tensor, int] | None = None,
) -> list[SegmentBatch]:
    """Split ``params``, or the first ``numels`` elements of each, into segments and pack these in order into
    batches.

    ``batch_bytes`` None chooses a size that suits a ring of buffers.
    """
    counts = [param.numel() if numels is None else numels[param] for param in params]
    if batch_bytes is None:
        batch_bytes = _batch_bytes(sum(map(state_bytes, params, counts, repeat(state_format))))
    batches: list[SegmentBatch] = []
    segments: list[StateSegment] = []
    used = 0

    def close_batch() -> None:
        nonlocal used, segments
        offset = batches[-1].offset + batches[-1].nbytes if batches else 0
        batches.append(SegmentBatch(offset, round_to_block(used), tuple(segments)))
        used, segments = 0, []

    for param, count in zip(params, counts, strict=True):
        parts = state_format.parts(param)
        start = 0
        while start < count:
            numel = _fitting(parts, count - start, batch_bytes - used)
            if numel == 0:
                close_batch()
                continue
            segment, used = _place(parts, param, start, numel, used)
            segments.append(segment)
            start += numel
    if segments:
        close_batch()
    return batches


def state_bytes(param: torch.Tensor, numel: int, state_format: StateFormat) -> int:
    """Return the bytes of the states of ``numel`` elements of ``param``."""
    return sum(part.nbytes(numel) for part in state_format.parts(param))


def _batch_bytes(nbytes: int) -> int:
    share = round_to_block(nbytes // (_RING_SHARE * NUM_BUFFERS))
    return min(max(share, _MIN_BATCH_BYTES), MAX_BATCH_BYTES)


def _place(
    parts: Sequence[StateSpec], param: torch.Tensor, start: int, numel: int, used: int
) -> tuple[StateSegment, int]:
    """Return a segment with its arrays behind the first ``used`` bytes, and the new number of used bytes."""
    offsets = {}
    for part in parts:
        offsets[part.name] = used
        used += _padded(part.nbytes(numel))
    return StateSegment(param, start, numel, offsets), used


def _padded(nbytes: int) -> int:
    return -(-nbytes // _LINE_BYTES) * _LINE_BYTES


def _fitting(parts: Sequence[StateSpec], wanted: int, room: int) -> int:
    """Return how many of ``wanted`` elements fit ``room`` bytes: all, or a multiple of whole blocks."""

    def needed(numel: int) -> int:
        return sum(_padded(part.nbytes(numel)) for part in parts)

    if needed(wanted) <= room:
        return wanted
    numel = min(room * BLOCK_NUMEL // needed(BLOCK_NUMEL) + BLOCK_NUMEL, wanted) // BLOCK_NUMEL * BLOCK_NUMEL
    while numel > 0 and needed(numel) > room:
        numel -= BLOCK_NUMEL
    return numel


class StateFile:
    """Knows the places of states in one file, which a ring owns, and has the states of these parameters'
    other elements in memory.
    """

    def __init__(
        self,
        directories: Sequence[str] | None,
        numels: Mapping[torch.Tensor, int],
        state_format: StateFormat,
        ring: StateRing,
        *,
        checksums: bool = False,
    ) -> None:
        """Reserve disk space for the states of the first ``numels`` elements of one or more parameters.

        ``directories`` None: the system's directory for temporary files; nothing ever remains there.

        Raises:
            ConfigError: a directory is missing or read-only.
            IoError: the space cannot be reserved.
        """
        self._format = state_format
        self.batches = lay_out(list(numels), state_format, numels=numels)
        last = self.batches[-1]
        file = _open(directories, last.offset + last.nbytes, checksums)
        ring.add(file, max(batch.nbytes for batch in self.batches))
        self.extents = [Extent(file, batch.offset, batch.nbytes) for batch in self.batches]
        self._made_for = {param: (param.numel(), param.dtype) for param in numels}
        self._stored: dict[
            torch.Tensor, tuple[torch.Size, tuple[int, ...]]
        ] = {}  # shape and strides when stored
        cut = {param: start for param, start in numels.items() if start < param.numel()}
        self.rests = [_rest(param, start, state_format) for param, start in cut.items()]

    def holds(self, param: torch.Tensor) -> bool:
        """Return whether the state of ``param`` is stored here."""
        return param in self._stored

    def in_order(self, param: torch.Tensor) -> bool:
        """Return whether ``param``, with its state stored here, still has the memory order that it
        had then.
        """
        return self._stored[param] == (param.shape, param.stride())

    def has_room(self, param: torch.Tensor) -> bool:
        """Return whether ``param`` still has the number of elements and the dtype for which its place was
        made.
        """
        return self._made_for[param] == (param.numel(), param.dtype)

    def has_any_of(self, batch: SegmentBatch) -> bool:
        """Return whether a state in ``batch`` has been stored."""
        return any(segment.param in self._stored for segment in batch.segments)

    def keep(self, param: torch.Tensor) -> None:
        """Record that the state of ``param`` is stored here now, in the parameter's current memory order."""
        self._stored[param] = (param.shape, param.stride())

    def empty(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return uninitialized arrays for a stored state, in its stored order, to be filled by ``take``."""
        return self._format.empty(
            torch.empty_strided(*self._stored[param], dtype=self._made_for[param][1], device="cpu")
        )

    def put(
        self, batch: SegmentBatch, buffer: torch.Tensor, work: Mapping[torch.Tensor, Source | State]
    ) -> None:
        """Write the states in ``work`` that do not come from the file into ``buffer``, which contains
        ``batch``.
        """
        for segment in batch.segments:
            source = work.get(segment.param, Source.FILE)
            if source is Source.FILE:
                continue
            for part in self._format.parts(segment.param):
                there = _stored(buffer, part, segment)
                if isinstance(source, Source):
                    there.zero_()
                else:
                    there.copy_(_piece(source[part.name], part, segment))

    def take(self, batch: SegmentBatch, buffer: torch.Tensor, found: Mapping[torch.Tensor, State]) -> None:
        """Copy the states in ``buffer``, which contains ``batch``, to the arrays in ``found``."""
        for segment in batch.segments:
            if segment.param in found:
                for part in self._format.parts(segment.param):
                    whole = found[segment.param][part.name]
                    _piece(whole, part, segment).copy_(_stored(buffer, part, segment))


def _rest(param: torch.Tensor, start: int, state_format: StateFormat) -> tuple[SegmentBatch, torch.Tensor]:
    """Return the zeroed states of the elements from ``start`` on, as a batch and its memory."""
    segment, nbytes = _place(state_format.parts(param), param, start, param.numel() - start, 0)
    return SegmentBatch(0, nbytes, (segment,)), torch.zeros(nbytes, dtype=torch.uint8, device="cpu")


def _stored(buffer: torch.Tensor, part: StateSpec, segment: StateSegment) -> torch.Tensor:
    """Return a view of one state array of a segment in its batch's buffer."""
    offset = segment.offsets[part.name]
    return buffer[offset : offset + part.nbytes(segment.numel)].view(part.dtype)


def _piece(whole: torch.Tensor, part: StateSpec, segment: StateSegment) -> torch.Tensor:
    """Return a view of a segment's range of one complete state array."""
    first = segment.start // BLOCK_NUMEL if part.per_block else segment.start
    return flat(whole)[first : first + part.count(segment.numel)]


def _open(directories: Sequence[str] | None, nbytes: int, checksums: bool) -> AsyncFile:
    if directories is not None:
        return AsyncFile(directories, nbytes, checksums=checksums)
    # The file is unlinked once it is open: its directory may go away.
    with tempfile.TemporaryDirectory(prefix="gemini-") as private:
        return AsyncFile(private, nbytes, checksums=checksums)


@dataclass(frozen=True)
class StreamedUpdate:
    """One parameter's inputs to a step, checked; nothing has changed yet.

    ``group``: its index in ``param_groups``. ``grad``: in its memory order. ``source``: the origin of its
    states.
    """

    group: int
    grad: torch.Tensor
    source: Source | dict[str, Any]


def choose_for_disk(
    params: Sequence[torch.Tensor], nbytes: float, state_format: StateFormat
) -> dict[torch.Tensor, int]:
    """Choose CPU parameters in order until their states take ``nbytes``; the last one may be chosen in part.

    Return the number of elements of each, counted from its start. The total exceeds ``nbytes`` by less than a
    block of 256 elements.
    """
    chosen: dict[torch.Tensor, int] = {}
    for param in params:
        if nbytes <= 0:
            break
        if param.device.type != "cpu":
            continue
        blocks = math.ceil(nbytes / state_bytes(param, BLOCK_NUMEL, state_format))
        chosen[param] = min(blocks * BLOCK_NUMEL, param.numel())
        nbytes -= state_bytes(param, chosen[param], state_format)
    return chosen


class DiskStates:
    """Owns the ring and one file for each time that parameters were added. Not thread-safe."""

    def __init__(
        self, directories: Sequence[str] | None, state_format: StateFormat, *, checksums: bool = False
    ) -> None:
        """Make no file yet; arguments as for :class:`StateFile`."""
        self._directories = directories
        self._format = state_format
        self._checksums = checksums
        self._ring = StateRing()
        self._files: list[StateFile] = []
        self._file_of: dict[torch.Tensor, StateFile] = {}
        self._numels: dict[torch.Tensor, int] = {}  # elements with a place in a file

    def __contains__(self, param: torch.Tensor) -> bool:
        return param in self._file_of

    @property
    def nbytes(self) -> int:
        """The bytes of states with a place in a file."""
        return sum(state_bytes(param, numel, self._format) for param, numel in self._numels.items())

    @property
    def state_format(self) -> StateFormat:
        """How the moments are stored."""
        return self._format

    @property
    def ring(self) -> StateRing:
        """The ring of buffers."""
        return self._ring

    def file_of(self, param: torch.Tensor) -> StateFile | None:
        """Return the file with a place for the state of ``param``; None if there is none."""
        return self._file_of.get(param)

    def reserve(self, params: Sequence[torch.Tensor], fraction: float) -> None:
        """Reserve disk space until ``fraction`` of the state bytes of ``params`` has a place.

        Raises:
            IoError: the space cannot be reserved; nothing has changed.
        """
        wanted = fraction * sum(map(self._format.nbytes, params))
        without = [param for param in params if param not in self._file_of]
        numels = choose_for_disk(without, wanted - self.nbytes, self._format)
        if numels:
            file = StateFile(self._directories, numels, self._format, self._ring, checksums=self._checksums)
            self._files.append(file)
            self._file_of.update(dict.fromkeys(numels, file))
            self._numels.update(numels)

    def batches_of(
        self, params: Collection[torch.Tensor]
    ) -> tuple[
        list[tuple[StateFile, SegmentBatch, Extent]], list[tuple[StateFile, SegmentBatch, torch.Tensor]]
    ]:
        """Return the batches that contain states of ``params``: those in files, and those in memory."""

        def has_any(batch: SegmentBatch) -> bool:
            return any(segment.param in params for segment in batch.segments)

        stored, held = [], []
        for file in self._files:
            pairs = zip(file.batches, file.extents, strict=True)
            stored += [(file, batch, extent) for batch, extent in pairs if has_any(batch)]
            held += [(file, batch, memory) for batch, memory in file.rests if has_any(batch)]
        return stored, held

    def keep(self, params: Sequence[torch.Tensor]) -> None:
        """Record that the states of ``params`` are stored here now, in their current memory order."""
        for param in params:
            self._file_of[param].keep(param)

    def settle(self) -> None:
        """Wait for the writes of the last step. Raises IoError if some of its states are lost."""
        self._ring.settle()

    def fetch(self, states: Mapping[torch.Tensor, Any]) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """Return copies of the arrays that are stored here and are not in ``states``. Raises IoError."""
        found = {
            param: file.empty(param)
            for param, file in self._file_of.items()
            if file.holds(param) and states.get(param) and "exp_avg" not in states[param]
        }
        if not found:
            return {}
        stored, held = self.batches_of(found)

        def take(index: int, buffer: torch.Tensor) -> None:
            file, batch, _extent = stored[index]
            file.take(batch, buffer, found)

        self._ring.read([extent for _file, _batch, extent in stored], take)
        for file, batch, memory in held:
            file.take(batch, memory, found)
        return found

    def close(self) -> None:
        """Close the files; the states in them are lost. Idempotent."""
        self._ring.close()
        self._files.clear()
        self._file_of.clear()
        self._numels.clear()


def _num_threads() -> int:
    # Leave one processor to the file's own thread: delaying I/O costs more time than a smaller kernel pool.
    return max(1, min(torch.get_num_threads(), len(usable_processors()) - 1))


@dataclass(frozen=True)
class _BatchRows:
    """A batch, and the range of its rows in the table."""

    file: StateFile
    batch: SegmentBatch
    first: int
    last: int


class DiskRows:
    """Rows of parameters with states in files, and the batches that contain these states.

    Like :class:`StepRows`, including the counting of steps. A row is a segment. The address of a batch's
    buffer changes in every pass, so the table keeps offsets until the batch has been read.
    """

    def __init__(
        self,
        members: Sequence[Member],
        sources: Mapping[torch.Tensor, Source | State],
        disk: DiskStates,
        all_states: dict[torch.Tensor, Any],
    ) -> None:
        """Build the table of ``members``, at least one; all have been checked.

        Args:
            members: the parameters; their state dicts are entries of ``all_states``.
            sources: where the first run takes each state from. After it the states are in the files and no
                longer in ``all_states``.
            disk: the files.
            all_states: the optimizer's states by parameter.
        """
        self.device = torch.device("cpu")
        self.params = [member.param for member in members]
        self._members, self._disk, self._all_states = list(members), disk, all_states
        self._sources: Mapping[torch.Tensor, Source | State] | None = sources
        self._watch: _C.TensorWatch | None = None
        self._groups = np.array([member.group for member in members], dtype=np.int64)
        self._counts = np.array([int(member.state.get("step", 0)) for member in members], dtype=np.float32)
        self._make_table({member.param: index for index, member in enumerate(members)})

    def __len__(self) -> int:
        return len(self.params)

    def take_gradients(self, params: list[list[torch.Tensor]], all_states: dict[torch.Tensor, Any]) -> bool:
        """Take the gradients of ``params``, by group; see :meth:`StepRows.take_gradients`."""
        # The user put arrays into a state: they must be used, and the watch does not know them.
        if self._watch is None or any("exp_avg" in state for state in self._states):
            return False
        return self._table.take_gradients(self._watch, params, all_states)

    def let_gradients_go(self) -> None:
        """Release the gradients."""
        self._table.let_gradients_go()

    def run(self, hypers: Sequence[AdamHyper], scale: GradScale) -> None:
        """Update all rows and count the step; ``hypers`` by group.

        Raises:
            IoError: a transfer failed: some parameters and states are new, others old.
        """
        keys = self._groups + len(hypers) * (self._counts.astype(np.int64) + 1)
        distinct, indices = np.unique(keys, return_inverse=True)
        self._table.set_steps(indices[self._owners])
        steps = [AdamStep(hypers[key % len(hypers)], int(key // len(hypers)), scale) for key in distinct]
        self._options = [step.options() for step in steps]
        self._threads = _num_threads()
        self._disk.ring.update(self._extents, self._old, self._visit)
        for rows, memory in self._held:
            self._update_batch(rows, memory)
        self._counts += 1.0
        if self._sources is not None:
            self._settle_in()

    def _make_table(self, index_of: Mapping[torch.Tensor, int]) -> None:
        rows: list[AdamRow] = []
        owners: list[int] = []
        offsets: list[list[int]] = []

        def batch_rows(file: StateFile, batch: SegmentBatch) -> _BatchRows:
            first = len(rows)
            for segment in batch.segments:
                owner = index_of.get(segment.param)
                if owner is not None:
                    rows.append(self._row(owner, segment))
                    owners.append(owner)
                    offsets.append([segment.offsets.get(name, -1) for name in ARRAYS])
            return _BatchRows(file, batch, first, len(rows))

        stored, held = self._disk.batches_of(index_of.keys())
        self._stored = [batch_rows(file, batch) for file, batch, _extent in stored]
        self._held = [(batch_rows(file, batch), memory) for file, batch, memory in held]
        self._extents = [extent for _file, _batch, extent in stored]
        self._old = [file.has_any_of(batch) for file, batch, _extent in stored]
        self._owners = np.array(owners, dtype=np.int64)
        self._table = KeptAdamTable(rows, owners)
        by_name = zip(ARRAYS, np.array(offsets, dtype=np.int64).T, strict=True)
        self._offsets = {name: starts for name, starts in by_name if starts.max() >= 0}

    def _row(self, owner: int, segment: StateSegment) -> AdamRow:
        member = self._members[owner]
        return AdamRow(
            member.param,
            member.grad,
            dict.fromkeys(segment.offsets),  # addresses are known once the batch has been read
            state_dtype=self._disk.state_format.state_dtype,
            elements=slice(segment.start, segment.start + segment.numel),
        )

    def _visit(self, index: int, buffer: torch.Tensor) -> None:
        self._update_batch(self._stored[index], buffer)

    def _update_batch(self, rows: _BatchRows, memory: torch.Tensor) -> None:
        if self._sources is not None:
            rows.file.put(rows.batch, memory, self._sources)
        here = slice(rows.first, rows.last)
        self._table.place_states(here, self._offsets, memory)
        self._table.run_on_cpu(self._options, threads=self._threads, rows=here)

    def _settle_in(self) -> None:
        """Remove the states that are now in the files from memory, and watch the objects that the table
        relies on.
        """
        states = [member.state for member in self._members]
        for state, count in zip(states, torch.from_numpy(self._counts).unbind(), strict=True):
            others = {name: value for name, value in state.items() if name not in ("step", *ARRAYS)}
            state.clear()  # in place: other rows refer to this dict
            state.update({"step": count, **others})  # "step" comes first, as in torch's states
        self._disk.keep(self.params)
        all_states = list(self._all_states.values())
        # The watch compares identities and owns nothing: the objects must live as long as it does.
        self._states = states
        self._kept = ([list(state.values()) for state in states], all_states)
        self._watch = _C.TensorWatch(
            self.params,
            self._groups.tolist(),
            states,
            ["step"],
            [member.grad for member in self._members],
            all_states,
            TENSOR_EXCHANGE,
        )
        self._old = [True] * len(self._old)
        self._sources, self._members = None, []
