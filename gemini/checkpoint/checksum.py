"""CRC32C of memory, of what was written of each block of a file, and of a whole from its parts, written in
whatever order."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from gemini import _C

_POLYNOMIAL = 0x82F63B78  # Castagnoli's, lowest power in the highest bit
_ONE = 1 << 31
# Every so many bytes of a file have a checksum of their own: what is read at a time is compared at once.
BLOCK_BYTES = 4 * 2**20


def crc32c(data: bytes | bytearray | memoryview) -> int:
    """Return the checksum of ``data``; the GIL is released while it is computed."""
    raw = np.frombuffer(data, dtype=np.uint8)
    return _C.crc32c(raw.ctypes.data, raw.nbytes) if raw.nbytes else 0


def combined(parts: Iterable[tuple[int, int]]) -> int:
    """Return the checksum of what the parts, each (bytes, checksum), are one after the other."""
    whole = 0
    for num_bytes, checksum in parts:
        whole = _product(_shift(num_bytes), whole) ^ checksum
    return whole


def _product(left: int, right: int) -> int:
    """Return the product of two polynomials over GF(2), modulo the checksum's."""
    product, bit = 0, _ONE
    while bit:
        if left & bit:
            product ^= right
        right = (right >> 1) ^ (_POLYNOMIAL if right & 1 else 0)
        bit >>= 1
    return product


@lru_cache(maxsize=256)
def _shift(num_bytes: int) -> int:
    """Return x to the power of the number of bits: what a checksum is multiplied by where bytes follow."""
    power, square, bits = _ONE, _ONE >> 1, 8 * num_bytes
    while bits:
        if bits & 1:
            power = _product(power, square)
        square = _product(square, square)
        bits >>= 1
    return power


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
