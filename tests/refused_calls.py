"""System calls that fail, as in a container that forbids them: a filter of this process, for good."""

from __future__ import annotations

import ctypes
import platform
import struct

IO_URING_ENTER = (426,)
FALLOCATE = {"x86_64": (285,), "aarch64": (47,)}.get(platform.machine(), ())
NEW_THREAD = {"x86_64": (56, 435), "aarch64": (220, 435)}.get(platform.machine(), ())  # clone, clone3

_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _FILTER = 22, 38, 2


class _Program(ctypes.Structure):
    _fields_ = (("count", ctypes.c_ushort), ("code", ctypes.c_void_p))


def refuse(calls: tuple[int, ...], code: int) -> None:
    """Have ``calls`` fail with the errno ``code`` in this thread, and in all that it starts from now on."""
    steps = [(_LOAD, 0, 0, 0)]  # the number of the call
    steps += [(_JUMP_IF_EQUAL, len(calls) - at, 0, call) for at, call in enumerate(calls)]
    steps += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | code)]
    code_bytes = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = _Program(len(steps), ctypes.cast(code_bytes, ctypes.c_void_p))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    for arguments in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0),
    ):
        if prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "seccomp is not possible here")
