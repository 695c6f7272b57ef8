"""Directories that one process at a time may use."""

from __future__ import annotations

import fcntl
import logging
import os
from contextlib import suppress

logger = logging.getLogger(__name__)


class DirectoryLock:
    """Keeps other processes out of a directory until :meth:`release`; the kernel ends it with the process.

    ``is_exclusive``: whether it does; not every file system has locks.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Take the lock. Raises BlockingIOError where another has it, OSError for no such directory."""
        self._descriptor: int | None = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._owner = os.getpid()
        self.is_exclusive = True
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise
        except OSError as error:
            self.is_exclusive = False
            logger.info("%s cannot be locked (%s): nothing keeps a second process out", path, error)

    def release(self) -> None:
        """Let others in. Idempotent."""
        if self._descriptor is None:
            return
        if os.getpid() == self._owner:  # a forked child has the same lock, and may live on
            with suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)
        self._descriptor = None
