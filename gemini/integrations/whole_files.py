"""Files and directories that all ranks write, which have their name once they are whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gemini.comm.ranks import Rank
from gemini.system.durable import put_in_place
from gemini.system.files import io_errors


@contextmanager
def written_whole(
    target: Path,
    rank: Rank,
    *,
    begin: Callable[[], None] = lambda: None,
    end: Callable[[], None] = lambda: None,
) -> Iterator[Path]:
    """Yield a name that nothing has, of a file or directory that all ranks write; then it is made durable and
    becomes ``target``. Rank 0 calls ``begin`` before, and ``end`` once all have written. Where one of them
    raises all do, and what was there before is there.

    Raises IoError, CheckpointError.
    """
    made = partial_of(target) / target.name

    def start() -> None:
        with io_errors("save a checkpoint", target):
            target.parent.mkdir(parents=True, exist_ok=True)
            begin()
            shutil.rmtree(made.parent, ignore_errors=True)
            made.parent.mkdir()

    def finish() -> None:
        with io_errors("save a checkpoint", target):
            end()
            put_in_place(made, target)

    try:
        _lead(rank, start)
        try:
            yield made
        except BaseException as error:
            rank.tell_failure(error)
            raise
        rank.agree(lambda: "")  # all have written their files
        _lead(rank, finish)
    finally:
        if rank.index == 0:
            shutil.rmtree(made.parent, ignore_errors=True)


def partial_of(target: Path) -> Path:
    """Return the directory in which ``target`` is written; a kill leaves it behind."""
    return target.with_name(f".{target.name}.partial")


def _lead(rank: Rank, action: Callable[[], None]) -> None:
    """Run ``action`` on rank 0; all ranks call this, and return once it has succeeded."""
    rank.together(lambda: None if rank.index else action())
