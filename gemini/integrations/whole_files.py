"""Files and directories that all ranks write together and that get their names once they are complete."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from gemini.comm.ranks import Rank
from gemini.system.durable import make_locked_directory, put_in_place, remove_unless_locked, rename, sync
from gemini.system.files import io_errors

_PARTIAL = re.compile(r"\.(.+)\.partial")


@contextmanager
def written_whole(
    target: Path,
    rank: Rank,
    *,
    begin: Callable[[], None] = lambda: None,
    end: Callable[[], None] = lambda: None,
) -> Iterator[Path]:
    """Yield a temporary path. All ranks write to it; on exit it is fsynced and renamed to ``target``.

    Rank 0 calls ``begin`` before, and ``end`` once all ranks have written. If one rank raises, all do, and
    the old ``target`` stays. Raises IoError, CheckpointError.
    """
    held = ExitStack()
    made = _partial_of(target) / target.name

    def start() -> None:
        with io_errors("save a checkpoint", target):
            target.parent.mkdir(parents=True, exist_ok=True)
            begin()
            sweep(target.parent)
            held.enter_context(_temporary_directory(target))

    def finish() -> None:
        with io_errors("save a checkpoint", target):
            end()
            put_in_place(made, target)

    with held:
        _lead(rank, start)
        try:
            yield made
        except BaseException as error:
            rank.tell_failure(error)
            raise
        rank.agree(lambda: "")  # wait until all ranks have written their files
        _lead(rank, finish)


def remove_whole(path: Path) -> None:
    """Remove a checkpoint. It loses its name before any of its files is removed. Raises OSError."""
    with _temporary_directory(path) as partial:
        rename(path, partial / path.name)
        sync(path.parent)


def sweep(directory: Path) -> None:
    """Remove the temporary directories of killed saves and removals in ``directory``, if it is readable."""
    found: list[Path] = []
    with suppress(OSError):
        found += directory.iterdir()
    for path in found:
        match = _PARTIAL.fullmatch(path.name)
        if match and _holds_at_most(path, match[1]):
            remove_unless_locked(path)


@contextmanager
def _temporary_directory(target: Path) -> Iterator[Path]:
    """Yield an empty, locked directory beside ``target``, and remove it on exit. A killed process leaves it
    behind, and :func:`sweep` removes it. Raises OSError."""
    partial = _partial_of(target)
    try:
        lock = make_locked_directory(partial)
    except BlockingIOError as error:
        raise OSError(errno.EBUSY, "another process is writing it", str(target)) from error
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        lock.release()


def _partial_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


def _holds_at_most(path: Path, name: str) -> bool:
    """Return whether ``path`` is a directory with no entry but ``name``."""
    with suppress(OSError):
        return not path.is_symlink() and {entry.name for entry in path.iterdir()} <= {name}
    return False


def _lead(rank: Rank, action: Callable[[], None]) -> None:
    """Run ``action`` on rank 0; returns on all ranks once it has succeeded. Collective."""
    rank.together(lambda: None if rank.index else action())
