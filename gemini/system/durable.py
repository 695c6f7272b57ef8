"""Writes files and directories durably: they get their names only once their contents are on disk.

After a power loss there is the old content or the new, never zeros. All files that this library writes go
through this module; ``tests/packaging/test_writers.py`` finds writers that do not.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gemini.system.files import DirectoryLock, io_errors

_RANDOM = "[a-z0-9_]{8}"  # the random part of tempfile's names
_HERE, _RENAME_EXCHANGE = -100, 2  # AT_FDCWD, and a flag of Linux's renameat2


def sync(path: Path) -> None:
    """Wait until a file's content, or a directory's entries, are on disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a directory may be a link
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(path: Path) -> None:
    """Wait until a file, or a directory with everything in it, is on disk. Raises OSError."""
    found = path.stat(follow_symlinks=False)
    if stat.S_ISDIR(found.st_mode):
        for entry in path.iterdir():
            sync_tree(entry)
    if stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode):
        sync(path)


def rename(path: Path, target: Path) -> None:
    """Rename ``path``, which must be on disk already, to ``target``, and wait until the new name is on disk.
    An existing file is replaced. Raises OSError.
    """
    path.replace(target)
    sync(target.parent)


def publish(made: Path, target: Path) -> None:
    """Sync a file or directory and give it its final name. Raises OSError."""
    sync_tree(made)
    rename(made, target)


def temporary_of(path: Path) -> Path:
    """Return the name under which :func:`replacing` writes a file. A killed process leaves it behind."""
    return path.with_name(path.name + ".tmp")


@contextmanager
def replacing(path: Path, doing: str) -> Iterator[Path]:
    """Yield a temporary path to write to; on exit it is fsynced and renamed to ``path``. Raises IoError."""
    with _replacing(temporary_of(path), path, doing) as temporary:
        yield temporary


def write_text(path: Path, text: str, doing: str, *, mode: int = 0o666) -> None:
    """Replace a file by ``text``, with permissions ``mode`` minus the umask. If several processes write at
    once, one of the texts stays. Raises IoError.
    """
    with _replacing(path.with_name(f".{path.name}.{os.getpid()}.tmp"), path, doing) as temporary:
        temporary.unlink(missing_ok=True)  # left by a killed process with the same pid
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            file.write(text)


@contextmanager
def _replacing(temporary: Path, path: Path, doing: str) -> Iterator[Path]:
    with io_errors(doing, path):
        try:
            yield temporary
            publish(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


@contextmanager
def scratch_directory(target: Path) -> Iterator[Path]:
    """Yield an empty private directory next to ``target``; it is removed on exit.

    Scratch directories of ``target`` that no living process holds are removed first. Raises OSError.
    """
    _remove_leftovers(target)
    scratch, lock = _make_scratch(target)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        lock.release()


def put_in_place(made: Path, target: Path) -> None:
    """Sync a file or directory and give it the name ``target``; an existing file or directory is removed.

    If the system can exchange two names, ``target`` always exists, and a kill may leave the older one under
    the name of ``made``. Otherwise a kill may leave the older one beside ``target``, for :func:`restore`.
    Raises OSError.
    """
    sync_tree(made)
    restore(target)
    older = _set_aside(target)
    if _is_there(target) and (made.is_dir() or target.is_dir()):
        if _exchange(made, target):
            sync(target.parent)
            _remove(made)
            return
        target.rename(older)
    rename(made, target)
    _remove(older)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two paths atomically. Return False if the kernel, the C library or the file
    system cannot.
    """
    call = getattr(ctypes.CDLL(None), "renameat2", None)
    names = os.fsencode(one), os.fsencode(other)
    return call is not None and call(_HERE, names[0], _HERE, names[1], _RENAME_EXCHANGE) == 0


def restore(target: Path) -> None:
    """Finish a :func:`put_in_place` that was killed: give the older one its name back, or remove it if the
    newer one already has the name. Raises OSError.
    """
    older = _set_aside(target)
    if _is_there(target):
        _remove(older)
    elif _is_there(older):
        rename(older, target)


def _is_there(path: Path) -> bool:
    return path.is_symlink() or path.exists()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def set_aside_in(directory: Path) -> list[Path]:
    """Return the targets with an older version set aside in ``directory``. Raises OSError."""
    found = (re.fullmatch(r"\.(.+)\.replaced", path.name) for path in directory.iterdir())
    return [directory / match[1] for match in found if match]


def _set_aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


def _scratch_prefix(target: Path) -> str:
    return f".{target.name}.gemini-"  # only this module uses such names


def _make_scratch(target: Path) -> tuple[Path, DirectoryLock]:
    """Return a new directory and its lock."""
    while True:
        scratch = Path(tempfile.mkdtemp(prefix=_scratch_prefix(target), dir=target.parent))
        with suppress(FileNotFoundError, BlockingIOError):  # another process removes it as a leftover
            lock = DirectoryLock(scratch)
            if scratch.exists():
                return scratch, lock
            lock.release()


def _remove_leftovers(target: Path) -> None:
    name = re.compile(re.escape(_scratch_prefix(target)) + _RANDOM)
    found: list[Path] = []
    with suppress(PermissionError):  # a writable directory may be unreadable
        found += (path for path in target.parent.iterdir() if name.fullmatch(path.name))
    for path in found:
        remove_unless_locked(path)


def remove_unless_locked(path: Path) -> None:
    """Remove a directory that no process has locked. Do nothing if the file system has no locks."""
    # Left alone: its process is alive, it is another user's or not a directory, or it is already gone.
    with suppress(OSError):
        lock = DirectoryLock(path)
        try:
            if lock.is_exclusive:
                shutil.rmtree(path)
        finally:
            lock.release()


def make_locked_directory(path: Path) -> DirectoryLock:
    """Create a directory, lock it and return the lock. Content that a killed process left there is removed.

    Raises OSError; BlockingIOError if another process has locked it.
    """
    while True:
        path.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):  # another process has just removed it
            lock = DirectoryLock(path)
            if path.exists():
                for entry in path.iterdir():
                    _remove(entry)
                return lock
            lock.release()
