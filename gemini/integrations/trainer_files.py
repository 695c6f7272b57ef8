"""Checkpoints of a GeminiTrainer: each is complete or absent, and incomplete ones are not resumed from.

All ranks write a checkpoint to ``.checkpoint-N.partial/checkpoint-N``; then it is fsynced and renamed. Its
last file, ``gemini.json``, has the identity of the save in ``gemini/``.
"""

from __future__ import annotations

import json
import logging
import os
import re
import zipfile
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from transformers import TrainerState

from gemini.checkpoint import latest
from gemini.checkpoint.directory import identity_of
from gemini.errors import CheckpointError, InputError
from gemini.integrations.whole_files import remove_whole, sweep
from gemini.system.durable import restore, set_aside_in, write_text
from gemini.system.files import KEY, Format, io_errors
from gemini.system.input_files import AGAIN, InputDirectory, errors_of

logger = logging.getLogger(__name__)

FOLDER = "gemini"
SCHEDULER = "scheduler.pt"
_RECORD = "gemini.json"
_STATE = "trainer_state.json"
_OPTIMIZER = "optimizer.pt"
_FORMAT = Format("gemini-trainer", 1)
_MAX_BYTES = 2**28
_NAME = re.compile(r"checkpoint-(\d+)")


def clear(run: Path) -> None:
    """Remove the remains of killed saves in ``run``."""
    sweep(run)
    for target in set_aside_in(run):
        if _NAME.fullmatch(target.name):
            restore(target)


def seal(made: Path, step: int) -> None:
    """Write the record of a checkpoint: the identity of the save in ``gemini/``, and the files that it must
    have.
    """
    folder = made / FOLDER
    save = identity_of(latest(folder)) if folder.is_dir() else None
    own = (SCHEDULER, "scaler.pt")
    files = [path.name for path in made.iterdir() if path.name in own or path.name.startswith("rng_state")]
    record = {KEY: str(_FORMAT), "save": save, "step": step, "files": sorted(files)}
    write_text(made / _RECORD, json.dumps(record, indent=1) + "\n", "save a checkpoint")


def remove_older(run: Path, keep: int, kept: set[Path]) -> None:
    """Remove the oldest checkpoints in ``run`` until ``keep`` are left, but not those in ``kept``. A partly
    removed one never keeps its name.
    """
    found = sorted(_checkpoints(run), key=lambda path: (path.stat().st_mtime_ns, _step(path)))
    others = [path for path in found if path not in kept]
    for path in others[: max(0, len(found) - max(keep, len(kept)))]:
        remove_whole(path)


def newest(run: Path) -> Path | None:
    """Return the newest checkpoint in ``run`` that can be resumed from; None if there are none at all. Others
    are logged. Raises CheckpointError if there are some and none can be resumed from.
    """
    if not run.is_dir():
        return None
    with io_errors("look for checkpoints", run):
        clear(run)  # no save will do it if no step is left to train
        found = sorted(_checkpoints(run), key=_step, reverse=True)
    first: CheckpointError | None = None
    for path in found:
        try:
            check(path)
        except CheckpointError as error:
            logger.warning("%s; it is skipped", error)
            first = first or error
        else:
            return path
    if first is not None:
        raise first
    return None


def _checkpoints(run: Path) -> list[Path]:
    return [path for path in run.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def is_ours(directory: str | os.PathLike[str]) -> bool:
    """Return whether the checkpoint has weights and states in ``gemini/``."""
    return (Path(directory) / FOLDER).is_dir()


def check(directory: Path) -> None:
    """Check that a checkpoint has everything that a bit-exact resume needs. Raises CheckpointError with a
    one-line message.

    Every file that transformers may open must be a regular file inside the directory.
    """
    files_there = InputDirectory(directory)
    for name in files_there.names:
        if not (directory / name).is_dir():  # a directory instead of a file is refused when it is read
            files_there.check(name)
    step = _step_of(files_there)
    record = files_there.json(_RECORD, _MAX_BYTES) if _RECORD in files_there else None
    if record is None and not is_ours(directory):
        _check_plain(directory)
        return
    files = [SCHEDULER]
    if record is not None:
        if not _FORMAT.is_read(record):
            raise CheckpointError(_FORMAT.refusal(record, directory / _RECORD))
        if not isinstance(record.get("files"), list):
            raise CheckpointError(f"{directory / _RECORD} is damaged: it lists no files")
        files = [name for name in record["files"] if isinstance(name, str) and Path(name).name == name]
        _check_save(directory, record, step)
    else:
        latest(directory / FOLDER)
    for name in files:
        _check_torch_file(directory / name)


def _check_save(directory: Path, record: dict[str, Any], step: object) -> None:
    """Raise CheckpointError unless all parts of a checkpoint are from the same save."""
    if record.get("save") is None:
        raise CheckpointError(f"{directory} was saved with save_only_model=True: {_FRESH}")
    folder = directory / FOLDER
    if not folder.is_dir():
        raise CheckpointError(
            f"{directory} was saved with {folder}, which has the optimizer's states and is not there; copy "
            f"it along. Without it {_FRESH}"
        )
    if record.get("step") != step:
        raise CheckpointError(
            f"{directory / _RECORD} is of step {record.get('step')!r:.20}, {directory / _STATE} of step "
            f"{step!r:.20}; copy all of a checkpoint, from one save"
        )
    held = latest(folder)
    if identity_of(held) != record["save"]:
        raise CheckpointError(
            f"{directory} is of step {step!r:.20}, and {held} of another save than it was saved with; copy "
            "all of a checkpoint, from one save"
        )


def _check_plain(directory: Path) -> None:
    """Raise CheckpointError if a checkpoint of transformers' own Trainer lacks optimizer or
    scheduler states.
    """
    for name in (_OPTIMIZER, SCHEDULER):
        if not (directory / name).exists():
            raise CheckpointError(f"{directory} has neither {FOLDER}/ nor {name}: {_FRESH}")
        _check_torch_file(directory / name)


def _check_torch_file(path: Path) -> None:
    """Raise CheckpointError unless the file is a complete file of ``torch.save``. Its contents are not
    loaded.
    """
    if not path.exists():
        raise CheckpointError(f"{path} is not there; copy all of a checkpoint")
    if not path.is_file():
        raise CheckpointError(f"{path} is no regular file; copy all of a checkpoint")
    with errors_of(f"{path} is damaged"), zipfile.ZipFile(path) as file:
        # torch stores members uncompressed. A file that unpacks to more than its size is not torch's, and may
        # unpack without bound.
        if sum(member.file_size for member in file.infolist()) > path.stat().st_size:
            raise InputError(f"{path} is damaged: it unpacks to more than it has; {AGAIN}")
        damaged = file.testzip()
    if damaged is not None:
        raise CheckpointError(f"{path} is damaged: {damaged} in it is not what was written")


def _step_of(directory: InputDirectory) -> int:
    """Return the step of a checkpoint, and check its trainer_state.json, which transformers would accept
    unchecked.
    """
    state = directory.json(_STATE, _MAX_BYTES)
    path, step = directory.path / _STATE, state.get("global_step")
    if type(step) is not int or not 0 <= step < 2**63:
        raise InputError(f"{path} is damaged: its global_step is {step!r:.200}, no number of steps; {AGAIN}")
    # Fields have their declared types, except stateful_callbacks, which the Trainer turns into objects.
    kinds = {**get_type_hints(TrainerState), "stateful_callbacks": dict}
    for name, value in state.items():
        if name not in kinds or not _is_of(value, kinds[name]):
            raise InputError(
                f"{path}: {name:.200} is {value!r:.200}, which transformers does not take; {AGAIN}"
            )
    if not all(isinstance(entry, dict) for entry in state.get("log_history", [])):
        raise InputError(f"{path} is damaged: log_history has an entry that is no object; {AGAIN}")
    return step


def _is_of(value: object, hint: Any) -> bool:
    """Return whether a JSON value fits a type hint."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = tuple(get_origin(kind) or kind for kind in kinds)
    if type(value) in (int, float):
        return (int in kinds or float in kinds) and not (isinstance(value, int) and abs(value) >= 2**63)
    return type(value) in kinds


_FRESH = (
    "the optimizer and the schedule would restart; to continue from its weights only, load them with "
    "from_pretrained() and train without resume_from_checkpoint"
)
