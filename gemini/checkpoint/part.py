"""Parts of files and their checksums, from which follows that of the whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gemini.checkpoint.checksum import combined, crc32c


class Part(NamedTuple):
    """Bytes of a file that one process has written, one after the other from ``offset`` on."""

    offset: int
    num_bytes: int
    crc32c: int

    @classmethod
    def of(cls, data: memoryview, offset: int) -> Part:
        """Return what ``data`` is, written at ``offset``."""
        return cls(offset, data.nbytes, crc32c(data))


def joined(parts: Iterable[Part]) -> list[Part]:
    """Return ``parts`` in order of their offsets, those that adjoin as one."""
    runs: list[list[Part]] = []
    for part in sorted(parts):
        if runs and sum(runs[-1][-1][:2]) == part.offset:
            runs[-1].append(part)
        else:
            runs.append([part])
    return [
        Part(run[0].offset, sum(part.num_bytes for part in run), combined(part[1:] for part in run))
        for run in runs
    ]
