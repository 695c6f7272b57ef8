"""Errors a user can meet. Each names the thing, the numbers and the way out."""

from __future__ import annotations

from errno import EACCES, EDQUOT, ENOSPC


class GeminiError(Exception):
    """Base class of every error this library raises on purpose."""


class ConfigError(GeminiError, ValueError):
    """An argument or a combination of arguments that cannot work."""


class OutOfBudgetError(GeminiError, MemoryError):
    """Something does not fit a tier's byte budget; budgets and states are as before."""


class DeviceFullError(OutOfBudgetError):
    """The computing device has no memory left for a chunk that its budget allows: somebody else has it."""


_FULL = (ENOSPC, EDQUOT)
_FREE_SOME = "free some space"
_CHANGE = "change its permissions"


class IoError(GeminiError, OSError):
    """A failed file operation; ``errno``, ``filename`` and ``offset`` say which."""

    def __init__(self, errno: int, message: str, path: str = "", offset: int = 0) -> None:
        if errno in _FULL and _FREE_SOME not in message:
            message = f"{message}; {_FREE_SOME} there, or name another directory"
        if errno == EACCES and _CHANGE not in message:
            message = f"{message}; {_CHANGE}, or name another place"
        super().__init__(errno, message, path)
        self.offset = offset


class ChecksumError(IoError):
    """Bytes read back from a file are not those that were written; ``errno`` is EIO."""


class CheckpointError(GeminiError):
    """A checkpoint that is missing, incomplete or made for another model."""


class StateError(GeminiError, RuntimeError):
    """An illegal tensor state transition, or an object used after it was closed."""


class EvictedAccessError(GeminiError, RuntimeError):
    """Memory of an evicted chunk was read or written outside an operator."""
