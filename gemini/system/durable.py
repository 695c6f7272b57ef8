"""A file or directory has its name only once what is in it is on disk: the one way in which this library
gives names to what it writes, so that after a loss of power there is the old content or the new, never zeros.

``tests/packaging/test_writers.py`` finds writers that go another way.
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

_RANDOM = "[a-z0-9_]{8}"  # what tempfile adds
_HERE, _RENAME_EXCHANGE = -100, 2  # AT_FDCWD and a flag of renameat2 of Linux


def sync(path: Path) -> None:
    """Return once a file's content, or a directory's entries, are on disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a directory may be a link
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(path: Path) -> None:
    """Return once a file, or a directory with all that is in it, is on disk. Raises OSError."""
    found = path.stat(follow_symlinks=False)
    if stat.S_ISDIR(found.st_mode):
        for entry in path.iterdir():
            sync_tree(entry)
    if stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode):
        sync(path)


def rename(path: Path, target: Path) -> None:
    """Rename ``path``, which is on disk already, to ``target``, and return once the new name is on disk, too.
    A file of that name is replaced. Raises OSError."""
    path.replace(target)
    sync(target.parent)


def publish(made: Path, target: Path) -> None:
    """Give a file or directory that was written its name, once all of it is on disk. Raises OSError."""
    sync_tree(made)
    rename(made, target)


def temporary_of(path: Path) -> Path:
    """Return the name under which :func:`replacing` writes a file; a kill leaves it behind."""
    return path.with_name(path.name + ".tmp")


@contextmanager
def replacing(path: Path, doing: str) -> Iterator[Path]:
    """Yield a temporary name to write a file under; on leaving the block it becomes ``path``. Raises
    IoError."""
    with _replacing(temporary_of(path), path, doing) as temporary:
        yield temporary


def write_text(path: Path, text: str, doing: str, *, mode: int = 0o666) -> None:
    """Replace a file by ``text``; the umask takes from ``mode``. Several processes may do so at a time: one
    of the texts stays. Raises IoError."""
    with _replacing(path.with_name(f".{path.name}.{os.getpid()}.tmp"), path, doing) as temporary:
        temporary.unlink(missing_ok=True)  # left behind by a process of this number that was killed
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
    """Yield an empty private directory next to ``target``, which is removed on leaving the block.

    Those for the same ``target`` that no process holds any more are removed first. Raises OSError.
    """
    _remove_leftovers(target)
    scratch, lock = _make_scratch(target)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        lock.release()


def put_in_place(made: Path, target: Path) -> None:
    """Give a file or directory that was written the name ``target``, once all of it is on disk; what is
    there, a file or a directory, is removed. Where the system can exchange names, one of both has the name at
    any moment, and a kill may leave the older one under the name of ``made``. Elsewhere a kill in between
    leaves it beside ``target``, for :func:`restore`. Raises OSError."""
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
    """Give each of two paths what the other one names, both at the same moment. Return False where the system
    cannot do that: the kernel, the C library or the file system."""
    call = getattr(ctypes.CDLL(None), "renameat2", None)
    names = os.fsencode(one), os.fsencode(other)
    return call is not None and call(_HERE, names[0], _HERE, names[1], _RENAME_EXCHANGE) == 0


def restore(target: Path) -> None:
    """End what a kill has interrupted in :func:`put_in_place`: the older one has its name again, or goes,
    where the newer one has it. Raises OSError."""
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
    """Return the targets of which an older one is set aside in ``directory``. Raises OSError."""
    found = (re.fullmatch(r"\.(.+)\.replaced", path.name) for path in directory.iterdir())
    return [directory / match[1] for match in found if match]


def _set_aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


def _scratch_prefix(target: Path) -> str:
    return f".{target.name}.gemini-"  # nobody else's


def _make_scratch(target: Path) -> tuple[Path, DirectoryLock]:
    """Return a new directory, locked."""
    while True:
        scratch = Path(tempfile.mkdtemp(prefix=_scratch_prefix(target), dir=target.parent))
        with suppress(FileNotFoundError, BlockingIOError):  # another process has taken it for a leftover
            lock = DirectoryLock(scratch)
            if scratch.exists():
                return scratch, lock
            lock.release()


def _remove_leftovers(target: Path) -> None:
    name = re.compile(re.escape(_scratch_prefix(target)) + _RANDOM)
    found: list[Path] = []
    with suppress(PermissionError):  # a directory that may be written need not be readable
        found += (path for path in target.parent.iterdir() if name.fullmatch(path.name))
    for path in found:
        # It stays: its process is alive, another user's, no directory, or just removed by its process.
        with suppress(OSError):
            lock = DirectoryLock(path)
            try:
                if lock.is_exclusive:
                    shutil.rmtree(path)
            finally:
                lock.release()
