"""What files are to a user who may not do everything, whoever runs the tests."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_VERSION_3 = 0x20080522
_OVERRIDES = 0b1110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


@contextmanager
def modes_respected() -> Iterator[None]:
    """Have the modes of files bind this thread, and those it starts, also where it is root's."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, before = _Header(_VERSION_3, 0), (_Sets * 2)()
    _check(libc.capget(ctypes.byref(header), before))
    limited = (_Sets * 2).from_buffer_copy(before)
    limited[0].effective &= ~_OVERRIDES
    _check(libc.capset(ctypes.byref(header), limited))
    try:
        yield
    finally:
        _check(libc.capset(ctypes.byref(header), before))


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
