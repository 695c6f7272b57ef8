"""Optimizer states of a fixed list of parameters in one file.

The file is a row of batches of at most 4 MiB, each read and written by one aligned request. A batch holds
segments: consecutive elements of one parameter, in its memory order, whole blocks but for its last, as one
array after the other of its state. Of a parameter the file may have the first elements only: the rest of its
state is a batch that stays in memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import repeat

import torch

from gemini.chunk.chunk import BLOCK_NUMEL, StateSpec
from gemini.chunk.dense import flat
from gemini.offload.async_file import AsyncFile, round_to_block
from gemini.optim.state_format import StateFormat
from gemini.optim.state_ring import NUM_BUFFERS, Extent, StateRing

MAX_BATCH_BYTES = 4 * 2**20
_MIN_BATCH_BYTES = 64 * 2**10
_RING_SHARE = 40  # the buffers take at most this part of what is in the file, if that is not very little
_LINE_BYTES = 64  # a cache line: where arrays start

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


def lay_out(
    params: Sequence[torch.Tensor],
    state_format: StateFormat,
    batch_bytes: int | None = None,
    *,
    numels: Mapping[torch.Tensor, int] | None = None,
) -> list[Batch]:
    """Cut ``params``, or the first ``numels`` of each, into segments and pack them, in order, into batches.

    ``batch_bytes`` None is a size that suits a ring of buffers.
    """
    counts = [param.numel() if numels is None else numels[param] for param in params]
    if batch_bytes is None:
        batch_bytes = _batch_bytes(sum(map(state_bytes, params, counts, repeat(state_format))))
    batches: list[Batch] = []
    segments: list[Segment] = []
    used = 0

    def close_batch() -> None:
        nonlocal used, segments
        offset = batches[-1].offset + batches[-1].nbytes if batches else 0
        batches.append(Batch(offset, round_to_block(used), tuple(segments)))
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
    """Return the bytes of the state of ``numel`` elements of ``param``."""
    return sum(part.nbytes(numel) for part in state_format.parts(param))


def _batch_bytes(nbytes: int) -> int:
    share = round_to_block(nbytes // (_RING_SHARE * NUM_BUFFERS))
    return min(max(share, _MIN_BATCH_BYTES), MAX_BATCH_BYTES)


def _place(
    parts: Sequence[StateSpec], param: torch.Tensor, start: int, numel: int, used: int
) -> tuple[Segment, int]:
    """Return a segment whose arrays follow ``used`` bytes, and the bytes then used."""
    offsets = {}
    for part in parts:
        offsets[part.name] = used
        used += _padded(part.nbytes(numel))
    return Segment(param, start, numel, offsets), used


def _padded(nbytes: int) -> int:
    return -(-nbytes // _LINE_BYTES) * _LINE_BYTES


def _fitting(parts: Sequence[StateSpec], wanted: int, room: int) -> int:
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
    """Knows where states are in one file, which a ring owns, and what else of them is in memory."""

    def __init__(
        self,
        directories: Sequence[str] | None,
        numels: Mapping[torch.Tensor, int],
        state_format: StateFormat,
        ring: StateRing,
        *,
        checksums: bool = False,
    ) -> None:
        """Reserve disk space for the first ``numels`` elements of parameters, of which there is at least one.

        ``directories`` None is the system's directory for temporary files; nothing is ever left there.

        Raises:
            ConfigError: a directory is missing or read-only.
            IoError: the space cannot be had.
        """
        self._format = state_format
        self.batches = lay_out(list(numels), state_format, numels=numels)
        last = self.batches[-1]
        file = _open(directories, last.offset + last.nbytes, checksums)
        ring.add(file, max(batch.nbytes for batch in self.batches))
        self.extents = [Extent(file, batch.offset, batch.nbytes) for batch in self.batches]
        self._made_for = {param: (param.numel(), param.dtype) for param in numels}
        self._stored: dict[torch.Tensor, tuple[torch.Size, tuple[int, ...]]] = {}  # its extent then
        cut = {param: start for param, start in numels.items() if start < param.numel()}
        self.rests = [_rest(param, start, state_format) for param, start in cut.items()]

    def holds(self, param: torch.Tensor) -> bool:
        """Say whether the state of ``param`` is here."""
        return param in self._stored

    def in_order(self, param: torch.Tensor) -> bool:
        """Say whether ``param``, whose state is here, still has the memory order it had then."""
        return self._stored[param] == (param.shape, param.stride())

    def has_room(self, param: torch.Tensor) -> bool:
        """Say whether ``param`` has the number and type of elements that its place was made for."""
        return self._made_for[param] == (param.numel(), param.dtype)

    def has_any_of(self, batch: Batch) -> bool:
        """Say whether there is something to read in ``batch``."""
        return any(segment.param in self._stored for segment in batch.segments)

    def keep(self, param: torch.Tensor) -> None:
        """Note that the state of ``param`` is here now, in the order that the parameter has."""
        self._stored[param] = (param.shape, param.stride())

    def empty(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the arrays of a state that is here, to be filled by ``take``, in the order it has here."""
        return self._format.empty(
            torch.empty_strided(*self._stored[param], dtype=self._made_for[param][1], device="cpu")
        )

    def put(self, batch: Batch, buffer: torch.Tensor, work: Mapping[torch.Tensor, Source | State]) -> None:
        """Write to ``buffer``, which has ``batch``, the states in ``work`` that do not come from the file."""
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

    def take(self, batch: Batch, buffer: torch.Tensor, found: Mapping[torch.Tensor, State]) -> None:
        """Copy what ``buffer``, which has ``batch``, has of the states in ``found`` to them."""
        for segment in batch.segments:
            if segment.param in found:
                for part in self._format.parts(segment.param):
                    whole = found[segment.param][part.name]
                    _piece(whole, part, segment).copy_(_stored(buffer, part, segment))


def _rest(param: torch.Tensor, start: int, state_format: StateFormat) -> tuple[Batch, torch.Tensor]:
    """Return the state of the elements from ``start`` on, zeros, as a batch and its memory."""
    segment, nbytes = _place(state_format.parts(param), param, start, param.numel() - start, 0)
    return Batch(0, nbytes, (segment,)), torch.zeros(nbytes, dtype=torch.uint8, device="cpu")


def _stored(buffer: torch.Tensor, part: StateSpec, segment: Segment) -> torch.Tensor:
    """View one array of a segment in its batch's buffer."""
    offset = segment.offsets[part.name]
    return buffer[offset : offset + part.nbytes(segment.numel)].view(part.dtype)


def _piece(whole: torch.Tensor, part: StateSpec, segment: Segment) -> torch.Tensor:
    """View a segment's share of one whole array of its parameter's state."""
    first = segment.start // BLOCK_NUMEL if part.per_block else segment.start
    return flat(whole)[first : first + part.count(segment.numel)]


def _open(directories: Sequence[str] | None, nbytes: int, checksums: bool) -> AsyncFile:
    if directories is not None:
        return AsyncFile(directories, nbytes, checksums=checksums)
    # The file has no name: its directory is needed only while it is opened.
    with tempfile.TemporaryDirectory(prefix="gemini-") as private:
        return AsyncFile(private, nbytes, checksums=checksums)
