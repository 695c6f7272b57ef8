"""Parts of files and their checksums, from which follow those of a file's blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gemini.checkpoint.checksum import combined, crc32c

# Every so many bytes of a file have a checksum of their own: what is read at a time is compared at once.
BLOCK_BYTES = 4 * 2**20


class Part(NamedTuple):
    """Bytes of one block of a file that one process has written, one after the other from ``offset`` on."""

    offset: int
    num_bytes: int
    crc32c: int


def parts_of(data: memoryview, offset: int) -> list[Part]:
    """Return what ``data`` is, written at ``offset``: a part for each block that it has bytes of."""
    parts = []
    while data:
        piece = data[: BLOCK_BYTES - offset % BLOCK_BYTES]
        parts.append(Part(offset, piece.nbytes, crc32c(piece)))
        data, offset = data[piece.nbytes :], offset + piece.nbytes
    return parts


def joined(parts: Iterable[Part]) -> list[Part]:
    """Return ``parts`` in order of their offsets, those that adjoin in a block as one."""
    runs: list[list[Part]] = []
    for part in sorted(parts):
        if runs and sum(runs[-1][-1][:2]) == part.offset and part.offset % BLOCK_BYTES:
            runs[-1].append(part)
        else:
            runs.append([part])
    return [
        Part(run[0].offset, sum(part.num_bytes for part in run), combined(part[1:] for part in run))
        for run in runs
    ]
