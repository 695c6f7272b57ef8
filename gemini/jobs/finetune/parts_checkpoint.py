"""Checkpoints of a model that ranks have in parts: files with whole tensors, which any layout can read.

``DIR/step-<N>`` has the booster's files in ``model/`` and ``optimizer/``, ``scheduler.json``, and
``run.json``, which is written last. The directory is written as ``step-<N>.partial`` and then renamed, so a
checkpoint is complete or absent. The two newest are kept.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gemini.checkpoint import plain_data
from gemini.checkpoint.directory import saving_in
from gemini.comm.ranks import Rank
from gemini.errors import CheckpointError
from gemini.system import rng
from gemini.system.durable import put_in_place, rename, write_text
from gemini.system.files import KEY, Format, parse_json, read_regular

_FORMAT = Format("gemini-finetune-parts", 1)
_RECORD = "run.json"
_NAME = re.compile(r"step-(\d{8,12})(\.partial)?")
_MAX_BYTES = 2**28  # limit for run.json, which has the random states of all ranks
_KEPT = 2


def save(
    directory: Path,
    rank: Rank,
    step: int,
    extra: Mapping[str, Any],
    write: Callable[[Path], None],
    *,
    sizes: Mapping[str, int],
) -> None:
    """Write the checkpoint of a ``step`` in ``directory``. Collective.

    Args:
        write: writes the files of the model to the directory that it gets; all ranks call it.
        sizes: number of parts of a copy of the model, by kind of parallelism.

    Raises:
        IoError: it cannot be written. The other ranks raise CheckpointError.
    """
    target = directory / f"step-{step:08d}"
    made = target.with_name(f"{target.name}.partial")

    def begin() -> None:
        with saving_in(directory):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for _, partial in _found(directory, partial=True):
                shutil.rmtree(partial)
            made.mkdir()

    def end() -> None:
        record = {KEY: str(_FORMAT), "step": step, "extra": plain_data.encode(dict(extra), "extra")}
        record |= {"sizes": dict(sizes), "rng": states}
        with saving_in(directory):
            write_text(made / _RECORD, json.dumps(record), "save a checkpoint")
            put_in_place(made, target)
            for _, older in _found(directory)[_KEPT:]:
                leftover = older.with_name(
                    f"{older.name}.partial"
                )  # a half-removed one must not look complete
                rename(older, leftover)
                shutil.rmtree(leftover)

    rank.together(lambda: None if rank.index else begin())
    write(made)
    states = [json.loads(said) for said in rank.collect(lambda: json.dumps(rng.capture()))]
    rank.together(lambda: None if rank.index else end())


def load(
    directory: Path, rank: Rank, read: Callable[[Path], None], *, sizes: Mapping[str, int]
) -> dict[str, Any]:
    """Let ``read`` read the newest checkpoint in ``directory``, and return its ``extra`` data. Collective.

    Random states are restored only if ranks have the same parts as when it was saved. With other parts they
    cannot be: ranks along tp must draw the same numbers.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    found, record = rank.together(lambda: _newest(directory))
    states = record["rng"]
    if not isinstance(states, list):
        raise CheckpointError(f"{found / _RECORD} is damaged: it has no states of random generators")
    is_same = len(states) == rank.count and record.get("sizes") == dict(sizes)
    parsed = rank.together(lambda: rng.parse(states[rank.index]) if is_same else None)
    read(found)
    if parsed is not None:
        rng.restore(parsed)
    return extra_of(directory)


def is_complete(directory: Path) -> bool:
    """Return whether ``directory`` has a checkpoint of this kind that can be loaded."""
    try:
        _newest(directory)
    except CheckpointError:
        return False
    return True


def lies_in(path: Path) -> bool:
    """Return whether ``path`` is a checkpoint of this kind, complete or damaged, or a directory of such
    checkpoints."""
    return bool(_found(path)) or any(own == path for _, own in _found(path.parent))


def extra_of(directory: Path) -> dict[str, Any]:
    """Return the ``extra`` data of the newest checkpoint. Raises CheckpointError."""
    found, record = _newest(directory)
    extra = plain_data.decode(record["extra"])
    if not isinstance(extra, dict):
        raise CheckpointError(f"{found / _RECORD} is damaged: it says nothing of its run")
    return extra


def _newest(directory: Path) -> tuple[Path, dict[str, Any]]:
    """Return the newest checkpoint and its record. Raises CheckpointError."""
    found = _found(directory)
    if not found:
        raise CheckpointError(f"{directory} holds no complete checkpoint of a model in parts")
    path = found[0][1]
    try:
        record = parse_json(read_regular(path / _RECORD, _MAX_BYTES, os.O_NOFOLLOW))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path / _RECORD}: {error}") from error
    if not isinstance(record, dict) or not _FORMAT.is_read(record):
        raise CheckpointError(_FORMAT.refusal(record, path / _RECORD))
    if lacking := [name for name in ("extra", "rng") if name not in record]:
        raise CheckpointError(f"{path / _RECORD} is damaged: it has no {lacking[0]}")
    return path, record


def _found(directory: Path, *, partial: bool = False) -> list[tuple[int, Path]]:
    """Return (step, path) of the complete checkpoints, newest first; with ``partial``, of the unfinished
    ones."""
    if not directory.is_dir():
        return []
    named = [(_NAME.fullmatch(path.name), path) for path in directory.iterdir() if not path.is_symlink()]
    own = [(int(name[1]), path) for name, path in named if name and bool(name[2]) == partial]
    if not partial:
        own = [(step, path) for step, path in own if (path / _RECORD).is_file()]
    return sorted(own, reverse=True)
