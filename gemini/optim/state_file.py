"""Optimizer states of a fixed list of parameters in one file, streamed through a few buffers.

The file is a row of batches of at most 4 MiB, each read and written by one aligned request. A batch holds
segments: consecutive elements of one parameter, in its memory order, whole blocks but for its last, as one
array after the other of its state.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from gemini.errors import IoError
from gemini.offload.async_file import BLOCK_BYTES, AsyncFile, round_to_block

from .dense import flat
from .kernels import BLOCK_NUMEL
from .state_format import Part, StateFormat

BATCH_BYTES = 4 * 2**20
_LINE_BYTES = 64  # a cache line: where arrays start
_NUM_BUFFERS = 3  # one being read, one being updated, one being written

State = Mapping[str, torch.Tensor]


class Source(Enum):
    """Where states come from that are not given as tensors."""

    FILE = "file"
    ZERO = "zero"


@dataclass(frozen=True)
class Segment:
    """Elements ``start .. start + numel`` of a parameter; ``offsets``: of each array in the batch, bytes."""

    param: torch.Tensor
    start: int
    numel: int
    offsets: Mapping[str, int]


@dataclass(frozen=True)
class Batch:
    """One request's worth of segments."""

    offset: int
    nbytes: int
    segments: tuple[Segment, ...]


# update(segments, address of the buffer): the segments of one batch that are to be updated.
Update = Callable[[Sequence[Segment], int], None]


def lay_out(
    params: Sequence[torch.Tensor], state_format: StateFormat, batch_bytes: int = BATCH_BYTES
) -> list[Batch]:
    """Cut ``params`` into segments and pack them, in order, into batches."""
    batches: list[Batch] = []
    segments: list[Segment] = []
    used = 0

    def close_batch() -> None:
        nonlocal used, segments
        offset = batches[-1].offset + batches[-1].nbytes if batches else 0
        batches.append(Batch(offset, round_to_block(used), tuple(segments)))
        used, segments = 0, []

    for param in params:
        parts = state_format.parts(param)
        start = 0
        while start < param.numel():
            numel = _fitting(parts, param.numel() - start, batch_bytes - used)
            if numel == 0:
                close_batch()
                continue
            offsets = {}
            for part in parts:
                offsets[part.name] = used
                used += _padded(part.nbytes(numel))
            segments.append(Segment(param, start, numel, offsets))
            start += numel
    if segments:
        close_batch()
    return batches


def _padded(nbytes: int) -> int:
    return -(-nbytes // _LINE_BYTES) * _LINE_BYTES


def _fitting(parts: Sequence[Part], wanted: int, room: int) -> int:
    """Return how many of ``wanted`` elements fit ``room`` bytes: all, or whole blocks."""

    def needed(numel: int) -> int:
        return sum(_padded(part.nbytes(numel)) for part in parts)

    if needed(wanted) <= room:
        return wanted
    numel = min(room * BLOCK_NUMEL // needed(BLOCK_NUMEL) + BLOCK_NUMEL, wanted) // BLOCK_NUMEL * BLOCK_NUMEL
    while numel > 0 and needed(numel) > room:
        numel -= BLOCK_NUMEL
    return numel


class StateFile:
    """Owns the file and its buffers; not thread-safe.

    After an IoError in ``stream`` its content is undefined.
    """

    def __init__(
        self, directory: str | None, params: Sequence[torch.Tensor], state_format: StateFormat
    ) -> None:
        """Reserve disk space for ``params``, of which there is at least one element.

        ``directory`` None is the system's directory for temporary files; nothing is ever left there.

        Raises:
            ConfigError: the directory is missing or read-only.
            IoError: the space cannot be had.
        """
        self._format = state_format
        self._batches = lay_out(params, state_format)
        last = self._batches[-1]
        self._file = _open(directory, last.offset + last.nbytes)
        self._made_for = {param: (param.numel(), param.dtype) for param in params}
        self._stored: dict[torch.Tensor, tuple[torch.Size, tuple[int, ...]]] = {}  # its extent then
        self._buffers: list[torch.Tensor] = []

    def holds(self, param: torch.Tensor) -> bool:
        """Say whether the file has the state of ``param``."""
        return param in self._stored

    def in_order(self, param: torch.Tensor) -> bool:
        """Say whether ``param``, whose state the file has, still has the memory order it had then."""
        return self._stored[param] == (param.shape, param.stride())

    def has_room(self, param: torch.Tensor) -> bool:
        """Say whether ``param`` has the number and type of elements that its place was made for."""
        return self._made_for[param] == (param.numel(), param.dtype)

    def stream(self, work: Mapping[torch.Tensor, Source | State], update: Update) -> None:
        """Read, update and write the states of every parameter in ``work``, overlapped.

        ``work`` says where each one's old state comes from; from then on it is in the file.

        Raises:
            IoError: a transfer failed: some states, and what ``update`` changed, are new, others old.
        """
        batches = [batch for batch in self._batches if any(part.param in work for part in batch.segments)]
        reads: dict[int, int] = {}
        writes: dict[int, int] = {}
        try:
            for index, batch in enumerate(batches):
                for ahead in range(index, min(index + 2, len(batches))):
                    if ahead not in reads:
                        self._wait(writes.pop(ahead - _NUM_BUFFERS, 0))
                        reads[ahead] = self._start_read(batches[ahead], self._buffer(ahead))
                self._wait(reads[index])
                self._update(batch, self._buffer(index), work, update)
                writes[index] = self._start_write(batch, self._buffer(index))
            for ticket in writes.values():
                self._wait(ticket)
        except BaseException:
            self._settle()
            raise
        self._stored.update((param, (param.shape, param.stride())) for param in work)

    def fetch(self, params: Collection[torch.Tensor]) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """Return copies of the states of ``params``, which the file holds, in the memory order it has them.

        Raises:
            IoError: a read failed; nothing has changed.
        """
        found = {
            param: self._format.empty(
                torch.empty_strided(*self._stored[param], dtype=self._made_for[param][1])
            )
            for param in params
        }
        for batch in self._batches:
            segments = [segment for segment in batch.segments if segment.param in found]
            if not segments:
                continue
            buffer = self._buffer(0)
            self._wait(self._file.read(buffer.data_ptr(), batch.nbytes, batch.offset))
            for segment in segments:
                for part in self._format.parts(segment.param):
                    whole = found[segment.param][part.name]
                    _piece(whole, part, segment).copy_(_stored(buffer, part, segment))
        return found

    def close(self) -> None:
        """Give the disk space and the buffers back. Idempotent."""
        self._file.close()
        self._buffers.clear()
        self._stored.clear()

    def _update(
        self,
        batch: Batch,
        buffer: torch.Tensor,
        work: Mapping[torch.Tensor, Source | State],
        update: Update,
    ) -> None:
        segments = [segment for segment in batch.segments if segment.param in work]
        for segment in segments:
            source = work[segment.param]
            if source is Source.FILE:
                continue
            for part in self._format.parts(segment.param):
                there = _stored(buffer, part, segment)
                if isinstance(source, Source):
                    there.zero_()
                else:
                    there.copy_(_piece(source[part.name], part, segment))
        update(segments, buffer.data_ptr())

    def _start_read(self, batch: Batch, buffer: torch.Tensor) -> int:
        if not any(segment.param in self._stored for segment in batch.segments):
            return 0
        return self._file.read(buffer.data_ptr(), batch.nbytes, batch.offset)

    def _start_write(self, batch: Batch, buffer: torch.Tensor) -> int:
        return self._file.write(buffer.data_ptr(), batch.nbytes, batch.offset)

    def _wait(self, ticket: int) -> None:
        if ticket != 0:  # 0: there was nothing to read or write
            self._file.wait(ticket)

    def _settle(self) -> None:
        """Let no thread touch the buffers any more; what failed is being raised already."""
        with contextlib.suppress(IoError):
            self._file.wait_all()

    def _buffer(self, index: int) -> torch.Tensor:
        """Return the buffer of the batch ``index``, bytes, aligned for O_DIRECT."""
        if not self._buffers:
            nbytes = max(batch.nbytes for batch in self._batches)
            count = min(_NUM_BUFFERS, len(self._batches))
            self._buffers = [_aligned(nbytes) for _ in range(count)]
        return self._buffers[index % len(self._buffers)]


def _stored(buffer: torch.Tensor, part: Part, segment: Segment) -> torch.Tensor:
    """View one array of a segment in its batch's buffer."""
    offset = segment.offsets[part.name]
    return buffer[offset : offset + part.nbytes(segment.numel)].view(part.dtype)


def _piece(whole: torch.Tensor, part: Part, segment: Segment) -> torch.Tensor:
    """View a segment's share of one whole array of its parameter's state."""
    first = segment.start // BLOCK_NUMEL if part.per_block else segment.start
    return flat(whole)[first : first + part.count(segment.numel)]


def _aligned(nbytes: int) -> torch.Tensor:
    raw = torch.zeros(nbytes + BLOCK_BYTES, dtype=torch.uint8)
    skip = -raw.data_ptr() % BLOCK_BYTES
    return raw[skip : skip + nbytes]


def _open(directory: str | None, nbytes: int) -> AsyncFile:
    if directory is not None:
        return AsyncFile(directory, nbytes)
    # The file has no name: its directory is needed only while it is opened.
    with tempfile.TemporaryDirectory(prefix="gemini-") as private:
        return AsyncFile(private, nbytes)
