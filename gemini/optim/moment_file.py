"""Adam's moments of a fixed list of parameters in one file, streamed through a few buffers.

The file is a row of batches of at most 4 MiB, each read and written by one aligned request. A batch holds
segments: consecutive elements of one parameter, in its memory order, as ``[exp_avg | exp_avg_sq]``.
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

BATCH_BYTES = 4 * 2**20
_LINE_NUMEL = 16  # fp32 elements of a cache line: where segments start
_NUM_BUFFERS = 3  # one being read, one being updated, one being written

# update(param, start, numel, address of exp_avg, address of exp_avg_sq): elements in memory order.
Update = Callable[[torch.Tensor, int, int, int, int], None]


class Source(Enum):
    """Where moments come from that are not given as tensors."""

    FILE = "file"
    ZERO = "zero"


Moments = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Segment:
    """Elements ``start .. start + numel`` of a parameter; offsets count fp32 elements in the batch."""

    param: torch.Tensor
    start: int
    numel: int
    exp_avg: int
    exp_avg_sq: int


@dataclass(frozen=True)
class Batch:
    """One request's worth of segments."""

    offset: int
    nbytes: int
    segments: tuple[Segment, ...]


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """View a dense tensor's elements in memory order."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def lay_out(params: Sequence[torch.Tensor], batch_bytes: int = BATCH_BYTES) -> list[Batch]:
    """Cut ``params`` into segments and pack them, in order, into batches."""
    capacity = batch_bytes // 4
    batches: list[Batch] = []
    segments: list[Segment] = []
    used = 0

    def close_batch() -> None:
        nonlocal used, segments
        offset = batches[-1].offset + batches[-1].nbytes if batches else 0
        batches.append(Batch(offset, round_to_block(4 * used), tuple(segments)))
        used, segments = 0, []

    for param in params:
        start = 0
        while start < param.numel():
            fits = (capacity - used) // 2 // _LINE_NUMEL * _LINE_NUMEL
            if fits == 0:
                close_batch()
                continue
            numel = min(fits, param.numel() - start)
            padded = -(-numel // _LINE_NUMEL) * _LINE_NUMEL
            segments.append(Segment(param, start, numel, used, used + padded))
            used += 2 * padded
            start += numel
    if segments:
        close_batch()
    return batches


class MomentFile:
    """Owns the file and its buffers; not thread-safe.

    After an IoError in ``stream`` its content is undefined.
    """

    def __init__(self, directory: str | None, params: Sequence[torch.Tensor]) -> None:
        """Reserve disk space for ``params``, of which there is at least one element.

        ``directory`` None is the system's directory for temporary files; nothing is ever left there.

        Raises:
            ConfigError: the directory is missing or read-only.
            IoError: the space cannot be had.
        """
        self._batches = lay_out(params)
        last = self._batches[-1]
        self._file = _open(directory, last.offset + last.nbytes)
        self._stored: set[torch.Tensor] = set()
        self._buffers: list[torch.Tensor] = []

    def holds(self, param: torch.Tensor) -> bool:
        """Say whether the file has moments of ``param``."""
        return param in self._stored

    def stream(self, work: Mapping[torch.Tensor, Source | Moments], update: Update) -> None:
        """Read, update and write the moments of every parameter in ``work``, overlapped.

        ``work`` says where each one's old moments come from; from then on they are in the file.

        Raises:
            IoError: a transfer failed: some moments, and what ``update`` changed, are new, others old.
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
        self._stored.update(work)

    def fetch(self, params: Collection[torch.Tensor]) -> dict[torch.Tensor, Moments]:
        """Return copies of the moments of ``params``, which the file holds, in each one's memory order.

        Raises:
            IoError: a read failed; nothing has changed.
        """
        found = {param: (_like(param), _like(param)) for param in params}
        for batch in self._batches:
            parts = [part for part in batch.segments if part.param in found]
            if not parts:
                continue
            buffer = self._buffer(0)
            self._wait(self._file.read(buffer.data_ptr(), batch.nbytes, batch.offset))
            for part in parts:
                exp_avg, exp_avg_sq = found[part.param]
                where = slice(part.start, part.start + part.numel)
                flat(exp_avg)[where] = buffer[part.exp_avg : part.exp_avg + part.numel]
                flat(exp_avg_sq)[where] = buffer[part.exp_avg_sq : part.exp_avg_sq + part.numel]
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
        work: Mapping[torch.Tensor, Source | Moments],
        update: Update,
    ) -> None:
        for part in batch.segments:
            if part.param not in work:
                continue
            exp_avg = buffer[part.exp_avg : part.exp_avg + part.numel]
            exp_avg_sq = buffer[part.exp_avg_sq : part.exp_avg_sq + part.numel]
            source = work[part.param]
            if source is Source.ZERO:
                exp_avg.zero_()
                exp_avg_sq.zero_()
            elif isinstance(source, tuple):
                where = slice(part.start, part.start + part.numel)
                exp_avg.copy_(flat(source[0])[where])
                exp_avg_sq.copy_(flat(source[1])[where])
            update(part.param, part.start, part.numel, exp_avg.data_ptr(), exp_avg_sq.data_ptr())

    def _start_read(self, batch: Batch, buffer: torch.Tensor) -> int:
        if not any(part.param in self._stored for part in batch.segments):
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
        """Return the fp32 buffer of the batch ``index``, aligned for O_DIRECT."""
        if not self._buffers:
            nbytes = max(batch.nbytes for batch in self._batches)
            count = min(_NUM_BUFFERS, len(self._batches))
            self._buffers = [_aligned(nbytes) for _ in range(count)]
        return self._buffers[index % len(self._buffers)]


def _aligned(nbytes: int) -> torch.Tensor:
    raw = torch.zeros(nbytes + BLOCK_BYTES, dtype=torch.uint8)
    skip = -raw.data_ptr() % BLOCK_BYTES
    return raw[skip : skip + nbytes].view(torch.float32)


def _like(param: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(param.size(), param.stride(), dtype=torch.float32)


def _open(directory: str | None, nbytes: int) -> AsyncFile:
    if directory is not None:
        return AsyncFile(directory, nbytes)
    # The file has no name: its directory is needed only while it is opened.
    with tempfile.TemporaryDirectory(prefix="gemini-") as private:
        return AsyncFile(private, nbytes)
