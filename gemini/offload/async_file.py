"""A private, unlinked file read and written in the background."""

from __future__ import annotations

import os
from types import TracebackType

from gemini import _C
from gemini.errors import ConfigError

# With O_DIRECT, addresses, sizes and offsets are multiples of this many bytes.
BLOCK_BYTES = 4096


def checked_directory(directory: str | os.PathLike[str]) -> str:
    """Return ``directory`` as a string.

    Raises:
        ConfigError: it does not exist, is not a directory, or cannot be written.
    """
    path = os.fspath(directory)
    if not os.path.isdir(path):  # noqa: PTH112 -- the string is passed on as it is
        raise ConfigError(f"directory {path!r} does not exist; create it or name another")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"directory {path!r} is not writable; change its permissions or name another")
    return path


def round_to_block(nbytes: int) -> int:
    """Round a size up to whole blocks."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


class AsyncFile:
    """``nbytes`` of disk space in ``directory``, without a name: nothing is left behind, also after a kill.

    ``read`` and ``write`` take addresses of memory that the caller keeps alive until the ticket was waited
    for. Tickets finish in any order; overlapping requests must be ordered by waiting. The process that
    made the file is the only one that may use it: not a forked child.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        nbytes: int,
        *,
        threads: int = 4,
        direct: bool = True,
        reserve: bool = True,
    ) -> None:
        """Make the file.

        Args:
            directory: an existing, writable directory.
            nbytes: size of the file, rounded up to 4096.
            threads: how many requests are at the disk at one time.
            direct: use O_DIRECT where the file system has it; see the property ``direct``.
            reserve: take the disk space at once; otherwise only what is written takes space, see ``discard``.

        Raises:
            ConfigError: the directory is missing or read-only, or a number is not positive.
            IoError: the space cannot be had; nothing is left behind.
        """
        if nbytes <= 0 or threads <= 0:
            raise ConfigError(f"AsyncFile of {nbytes} bytes with {threads} threads: both must be positive")
        self._file = _C.AsyncFile(
            checked_directory(directory),
            round_to_block(nbytes),
            threads=threads,
            direct=direct,
            reserve=reserve,
        )

    def read(self, address: int, nbytes: int, offset: int) -> int:
        """Start reading ``nbytes`` at ``offset`` into memory; return the ticket.

        Raises:
            StateError: the file is closed, the range is outside it, or ``direct`` needs alignment.
        """
        return int(self._file.read(address, nbytes, offset))

    def write(self, address: int, nbytes: int, offset: int) -> int:
        """Start writing ``nbytes`` of memory at ``offset``; return the ticket. Raises as ``read``."""
        return int(self._file.write(address, nbytes, offset))

    def done(self, ticket: int) -> bool:
        """Say, without waiting, whether the ticket's memory is free again (also when it failed)."""
        return bool(self._file.done(ticket))

    def wait(self, ticket: int) -> None:
        """Block until the ticket is done, without the GIL.

        Raises:
            IoError: the request failed; errno, path and offset say how and where.
        """
        self._file.wait(ticket)

    def wait_all(self) -> None:
        """Block until every request is done. Raises the first error that no ``wait`` has raised."""
        self._file.wait_all()

    def discard(self, offset: int, nbytes: int) -> None:
        """Give the disk space of a range back, in a file made without ``reserve``. Raises IoError."""
        self._file.discard(offset, nbytes)

    def close(self) -> None:
        """Finish all requests and give the disk space back. Idempotent."""
        self._file.close()

    @property
    def native(self) -> _C.AsyncFile:
        """The object under it, for the native transfer engine, which keeps it alive."""
        return self._file

    @property
    def direct(self) -> bool:
        """Whether requests bypass the page cache and must be aligned to 4096 bytes."""
        return bool(self._file.direct)

    @property
    def size(self) -> int:
        """Bytes reserved."""
        return int(self._file.size)

    @property
    def path(self) -> str:
        """What errors call the file; there is no such name in the directory."""
        return str(self._file.path)

    def __enter__(self) -> AsyncFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
