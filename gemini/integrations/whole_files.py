"""Files and directories that all ranks write together and that get their names once they are complete."""

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
    """Yield a temporary path. All ranks write to it; on exit it is fsynced and renamed to ``target``.

    Rank 0 calls ``begin`` before, and ``end`` once all ranks have written. If one rank raises, all do, and
    the old ``target`` stays. Raises IoError, CheckpointError.
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
        rank.agree(lambda: "")  # wait until all ranks have written their files
        _lead(rank, finish)
    finally:
        if rank.index == 0:
            shutil.rmtree(made.parent, ignore_errors=True)


def partial_of(target: Path) -> Path:
    """Return the directory in which ``target`` is written; a killed process leaves it behind."""
    return target.with_name(f".{target.name}.partial")


def _lead(rank: Rank, action: Callable[[], None]) -> None:
    """Run ``action`` on rank 0; returns on all ranks once it has succeeded. Collective."""
    rank.together(lambda: None if rank.index else action())
