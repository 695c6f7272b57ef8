"""CRC32C of memory, and of a whole from its parts, written in whatever order."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from gemini import _C

_POLYNOMIAL = 0x82F63B78  # Castagnoli's, lowest power in the highest bit
_ONE = 1 << 31


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
