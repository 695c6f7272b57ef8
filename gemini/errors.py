"""The exceptions that users can meet. Each message says what failed, with its numbers, then why, then what to
do.
"""

from __future__ import annotations

from errno import EACCES, EDQUOT, EFBIG, EMFILE, ENFILE, ENOSPC


class GeminiError(Exception):
    """Base class of every error this library raises on purpose."""


class ConfigError(GeminiError, ValueError):
    """An argument or a combination of arguments that cannot work."""


class OutOfBudgetError(GeminiError, MemoryError):
    """Something does not fit a tier's byte budget; budgets and states are as before."""


class DeviceFullError(OutOfBudgetError):
    """The computing device has no free memory for a chunk that its budget allows: another program or another
    user of the device holds it.
    """


_FREE_SOME = ("free some space", "free some space there, or name another directory")
_MORE_FILES = "raise the limit on open files (ulimit -n)"
# errno -> (text that a message with the advice already contains, the advice).
_WAYS_OUT = {
    ENOSPC: _FREE_SOME,
    EDQUOT: _FREE_SOME,
    EACCES: ("change its permissions", "change its permissions, or name another place"),
    EFBIG: ("ulimit -f", "raise the limit on the size of a file (ulimit -f), or name another file system"),
    EMFILE: ("ulimit -n", _MORE_FILES),
    ENFILE: ("ulimit -n", f"{_MORE_FILES} and the whole system's (sysctl fs.file-max)"),
}
_MORE_THREADS = (
    "raise the limit on processes (ulimit -u, or the container's pids limit) or that on memory (ulimit -v)"
)


class IoError(GeminiError, OSError):
    """A failed file operation; ``errno``, ``filename`` and ``offset`` say which."""

    def __init__(self, errno: int, message: str, path: str = "", offset: int = 0) -> None:
        sign, way_out = _WAYS_OUT.get(errno, ("", ""))
        if sign not in message:
            message = f"{message}; {way_out}"
        super().__init__(errno, message, path)
        self.offset = offset

    def __str__(self) -> str:
        """Return the message with the path in it once. The text is printable even if the file name is not."""
        text, path = str(self.strerror), self.filename
        if path and f" {path} at offset " not in text:  # the C++ core puts the path in itself
            text = f"{text}: {path!r}"
        return f"[Errno {self.errno}] {text}".encode(errors="backslashreplace").decode()


class ThreadError(IoError):
    """The system did not start a thread; ``errno`` is usually EAGAIN, and there is no file."""

    def __init__(self, errno: int, message: str, path: str = "", offset: int = 0) -> None:
        if _MORE_THREADS not in message:
            message = f"{message}; {_MORE_THREADS}"
        super().__init__(errno, message, path, offset)


class ChecksumError(IoError):
    """Bytes read back from a file differ from the bytes that were written; ``errno`` is EIO."""


class CheckpointError(GeminiError):
    """A checkpoint that is missing, incomplete or made for another model."""


class InputError(CheckpointError, ConfigError):
    """An input file or directory from another program cannot be read: it is damaged, of another kind, or
    leads outside its directory. The message is one printable line, even if a file name is not printable.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class StateError(GeminiError, RuntimeError):
    """An illegal tensor state transition, or an object used after it was closed."""


class EvictedAccessError(GeminiError, RuntimeError):
    """Memory of an evicted chunk was read or written outside an operator."""


def in_words(error: BaseException) -> str:
    """Return the message of an error as one line of at most 300 characters, for the middle of a sentence.

    The text of KeyError, IndexError and RecursionError is replaced by one that a user understands: Python's
    text of a KeyError is only the key.
    """
    said = " ".join(str(error).split())
    if isinstance(error, GeminiError):
        return said
    if isinstance(error, KeyError) and error.args:
        key = error.args[0]
        is_sentence = isinstance(key, str) and " " in key
        said = " ".join(key.split()) if is_sentence else f"{key!r} is missing or unknown"
    elif isinstance(error, RecursionError):
        said = "it is nested too deeply"
    elif isinstance(error, IndexError):
        said = f"a list is shorter than it should be ({said})"
    return (said or type(error).__name__)[:300]


def printable(text: str) -> str:
    """Return ``text`` with unprintable characters (escapes, line ends, unpaired surrogates) written as escape
    sequences.
    """
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
