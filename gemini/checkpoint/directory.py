"""The directory of checkpoints: finds complete ones and the newest, and publishes new ones.

``DIR/step-<N>.partial`` is written and synced file by file, then renamed to ``DIR/step-<N>``, so a checkpoint
is complete or absent. Old ones are removed last. Entries with other names are left alone
(docs/notes/checkpoint.md).
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gemini.checkpoint.contents import check_file_name
from gemini.checkpoint.sealed_file import (
    DamagedError,
    OtherVersionError,
    Seal,
    UnreadableError,
    cannot_read,
    check_size,
    making_sense_of,
    reading,
    write_sealed,
)
from gemini.checkpoint.tensor_file import BlockFile, ReadAhead
from gemini.errors import CheckpointError, ConfigError, IoError
from gemini.system.durable import rename, sync
from gemini.system.files import KEY, DirectoryLock, Format, parse_json, read_regular

logger = logging.getLogger(__name__)

_FIRST = "a version before 0.1 wrote it; continue with that version, or export the weights with it"
FORMAT = Format("gemini-checkpoint", 3, older={1: _FIRST, 2: _FIRST})
MANIFEST = "manifest.json"
SEAL = "seal.json"
# Larger than any document that we write, even for 10 TB. A larger file could exhaust memory.
_MAX_JSON_BYTES = 2**28
_MAX_SEAL_BYTES = 2**20
SAVE_CHARACTERS = 16  # the length of a save's identity
# Names from _free_name, with .partial while being written. Everything else in the directory is the user's.
_OWN_NAME = re.compile(r"step-\d{8,}(-\d+)?(?P<partial>\.partial)?")
_IDENTITY = re.compile(rf"[0-9a-f]{{{SAVE_CHARACTERS}}}")


class Found(NamedTuple):
    """A checkpoint: its sequence number in time (0 if ``damage`` says why it is unknown), and the identity of
    the save that wrote it. All parts of a model have the same identity, and no other save has it.
    """

    number: int
    path: Path
    save: str = ""
    damage: DamagedError | None = None


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay: the ``number`` newest. For a model with parts in several directories also the
    ``number`` newest that all directories have (``common``: the identities of their saves): after a kill one
    directory may have newer ones than another, which cannot be loaded.
    """

    number: int
    common: frozenset[str] | None = None

    def stay(self, found: Sequence[Found]) -> set[Path]:
        """Return the paths in ``found``, newest first, that stay."""
        shared = [each for each in found if each.save in (self.common or ())]
        return {each.path for each in (*found[: self.number], *shared[: self.number])}


@contextmanager
def partial_checkpoint(directory: str | os.PathLike[str], step: int, keep: Keep) -> Iterator[Path]:
    """Yield the directory of a new checkpoint and keep other savers out of ``directory`` meanwhile.

    Remains of killed saves, and checkpoints beyond ``keep``, are removed first. If one cannot be removed, it
    stays and the log has a warning. If the block did not call :func:`publish`, the new directory is removed
    at the end.

    Raises:
        IoError: the directory cannot be written.
        CheckpointError: another process is saving there.
    """
    root, owner = Path(directory), os.getpid()
    with saving_in(root):
        _make_private(root)
        with _exclusive(root):
            _remove_leftovers(root)
            prune(root, keep)
            partial = _partial(_free_name(root, step))
            try:
                partial.mkdir(mode=0o700)
                yield partial
            finally:
                if os.getpid() == owner:  # a forked child that ends runs this, too
                    shutil.rmtree(partial, ignore_errors=True)  # already renamed unless something failed


def new_save() -> str:
    """Return a new random identity for a save."""
    return secrets.token_hex(SAVE_CHARACTERS // 2)


def seal(partial: Path, manifest: Mapping[str, Any], save: str) -> None:
    """Complete a checkpoint, except for its name; all its files must be durable. Raises OSError."""
    sequence = max((found.number for found in found_in(partial.parent)), default=0) + 1
    said = {"sequence": sequence, "save": save}
    manifest_seal = write_sealed(partial / MANIFEST, encoded({**manifest, **said}))
    write_sealed(partial / SEAL, encoded({**said, "manifest": manifest_seal}))
    sync(partial)


def publish(partial: Path) -> Path:
    """Rename a sealed checkpoint to its final name and return that path. Raises OSError."""
    final = final_name(partial)
    rename(partial, final)
    return final


def prune(root: Path, keep: Keep) -> None:
    """Remove the checkpoints that ``keep`` does not keep."""
    found = found_in(root)
    stay = keep.stay(found)
    for _, older, _, damage in (each for each in found if each.path not in stay):
        if isinstance(damage, UnreadableError):
            continue  # its contents are unknown
        # Rename first: when half removed it must not look like a checkpoint or like a user's directory.
        try:
            leftover = _partial(older)
            rename(older, leftover)
        except OSError as error:
            _warn_of_leftover(older, error)
        else:
            _remove(leftover)


def _remove(leftover: Path) -> None:
    """Remove one of our directories as far as possible: a save must not fail because of an older one's
    remains.
    """
    try:
        shutil.rmtree(leftover)
    except OSError as error:
        shutil.rmtree(leftover, ignore_errors=True)  # continue after the file that cannot be removed
        _warn_of_leftover(leftover, error)


def _warn_of_leftover(path: Path, error: OSError) -> None:
    logger.warning(
        "%s cannot be removed (%s) and keeps its disk space; remove it by hand, after chmod -R u+w or chattr "
        "-R -i where its files are protected",
        path,
        error.strerror or error,
    )


def final_name(partial: Path) -> Path:
    """Return the path of a checkpoint once it is complete."""
    return partial.with_suffix("")


def complete_checkpoints(directory: str | os.PathLike[str], *, warn: bool = False) -> list[Path]:
    """Return the complete checkpoints below ``directory``, newest first, or ``directory`` itself if it is
    one.

    The contents of files are not checked. Checkpoints that cannot be read come last; ``warn`` logs them.

    Raises:
        DamagedError: ``directory`` cannot be read.
    """
    root = Path(directory)
    with reading(root):
        if _is_there(root / SEAL):
            return [root]
        found = found_in(root)
    for checkpoint in found if warn else ():
        if checkpoint.damage is not None:
            logger.warning("%s; its age is unknown, so it is tried last", checkpoint.damage)
    return [checkpoint.path for checkpoint in found]


def identity_of(checkpoint: Path) -> str:
    """Return the identity of the save that wrote a checkpoint; "" if its seal has none or cannot be read."""
    try:
        return _sealed(checkpoint).save
    except DamagedError:
        return ""


def latest(directory: str | os.PathLike[str]) -> Path:
    """Return the newest complete checkpoint below ``directory`` with all files, by name and size.

    Raises:
        CheckpointError: there is none; the message describes the damage of the newest, or names one that this
            user may not read (UnreadableError).
    """
    damaged: DamagedError | None = None
    for path in complete_checkpoints(directory):
        try:
            read_manifest(path)
        except DamagedError as error:
            if damaged is None or isinstance(error, UnreadableError):
                damaged = error
        else:
            return path
    raise damaged or no_checkpoint(directory)


def no_checkpoint(directory: str | os.PathLike[str]) -> CheckpointError:
    """Return the error for a directory without complete checkpoint."""
    return CheckpointError(
        f"{directory} holds no complete checkpoint; check the path, or train with this directory first"
    )


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint; check its content and the sizes of all files.

    Raises:
        DamagedError: a file is missing or damaged.
    """
    seal = _read_seal(checkpoint)
    with making_sense_of(checkpoint / SEAL):
        sequence, manifest_seal = _sequence(seal), Seal.read(seal["manifest"])
    manifest = read_json(checkpoint / MANIFEST, manifest_seal)
    with making_sense_of(checkpoint / MANIFEST):
        if _sequence(manifest) != sequence or save_of(manifest) != save_of(seal):
            raise DamagedError(f"{checkpoint / SEAL} is damaged: it is number {sequence} there")
        seals = {name: Seal.read(found) for name, found in manifest["files"].items()}
        for name in seals:
            check_file_name(name)
    for name, found in seals.items():
        check_size(checkpoint / name, found)
    return manifest


def check_contents(checkpoint: Path, manifest: Mapping[str, Any], index: int = 0, count: int = 1) -> None:
    """Read every file, or the ``index``-th of ``count`` shares of them, and compare it with its seal. Raises
    DamagedError naming the first one that differs.
    """
    with closing(ReadAhead()) as ahead:
        for name, seal in list(manifest["files"].items())[index::count]:
            with closing(BlockFile(checkpoint / name, Seal.read(seal), ahead)) as file:
                for number in range(len(file.seal.blocks)):
                    file.block(number)


def read_json(path: Path, seal: Seal | None = None, *, max_bytes: int = _MAX_JSON_BYTES) -> dict[str, Any]:
    """Read a document written by :func:`encoded`.

    Raises:
        OtherVersionError: another version of this library wrote it.
        DamagedError: it is something else, has more than ``max_bytes``, or does not match ``seal``, if given.
    """
    with reading(path):
        most = max_bytes if seal is None else min(max_bytes, seal.num_bytes)
        text = read_regular(path, most, os.O_NOFOLLOW)
    try:
        document = parse_json(text)
    except ValueError as error:
        raise DamagedError(f"cannot read {path}: {error}") from error
    if not isinstance(document, dict) or FORMAT.version_of(document) is None:
        raise DamagedError(FORMAT.refusal(document, path))
    if not FORMAT.is_read(document):
        raise OtherVersionError(FORMAT.refusal(document, path))
    with making_sense_of(path):
        if text != encoded(document) or (seal is not None and Seal.of(text) != seal):
            raise ValueError("it is not as it was written")
    return document


def _read_seal(checkpoint: Path) -> dict[str, Any]:
    return read_json(checkpoint / SEAL, max_bytes=_MAX_SEAL_BYTES)


def _sequence(document: Mapping[str, Any]) -> int:
    """Return a checkpoint's sequence number in time. Raises ValueError."""
    sequence = document["sequence"]
    if type(sequence) is not int or sequence < 0:
        raise ValueError(f"{sequence!r:.200} is no number in time")
    return sequence


def save_of(document: Mapping[str, Any]) -> str:
    """Return the identity of the save; the first checkpoints of this format had none. Raises ValueError."""
    save = document.get("save", "")
    if not isinstance(save, str) or (save and not _IDENTITY.fullmatch(save)):
        raise ValueError(f"{save!r:.200} is no identity of a save")
    return save


def encoded(document: Mapping[str, Any]) -> bytes:
    """Return the bytes of a JSON file with the format's name and version."""
    return (json.dumps({**document, KEY: str(FORMAT)}, indent=1, sort_keys=True) + "\n").encode("ascii")


def check_keep(keep: int) -> None:
    """Raise ConfigError if ``keep`` is less than 1."""
    if keep < 1:
        raise ConfigError(f"keep is {keep}; at least the new checkpoint is kept, so it must be 1 or more")


@contextmanager
def saving_in(root: Path) -> Iterator[None]:
    """Turn an OSError inside the block into an IoError of a save in ``root``."""
    try:
        yield
    except IoError:
        raise
    except OSError as error:
        name = str(error.filename or root)
        if Path(name).name == name:  # relative to some directory, as in errors of shutil.rmtree
            name = str(root)
        raise IoError(
            error.errno or 0, f"cannot save a checkpoint: {error.strerror or error}", name
        ) from error


def found_in(root: Path) -> list[Found]:
    """Return the complete checkpoints below ``root``, newest first.

    A checkpoint with a damaged or unreadable seal counts as the oldest. Raises OSError if ``root`` cannot be
    read.
    """
    found = []
    for path in _own_directories(root, partial=False):
        try:
            if _is_there(path / SEAL):
                found.append(_sealed(path))
        except OSError as error:
            found.append(Found(0, path, damage=cannot_read(path, error)))
        except DamagedError as error:
            found.append(Found(0, path, damage=error))
    return sorted(found, key=lambda checkpoint: checkpoint[:2], reverse=True)


def _sealed(path: Path) -> Found:
    """Return the record of a checkpoint from its seal. Raises DamagedError."""
    seal = _read_seal(path)
    with making_sense_of(path / SEAL):
        return Found(_sequence(seal), path, save_of(seal))


def _is_there(path: Path) -> bool:
    """Return whether the file exists. Raises OSError if that cannot be determined."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _make_private(root: Path) -> None:
    if not root.is_dir():
        root.mkdir(mode=0o700, parents=True)
        sync(root.parent)


@contextmanager
def _exclusive(root: Path) -> Iterator[None]:
    """Lock ``root`` against other savers; the kernel releases the lock if the process dies."""
    try:
        lock = DirectoryLock(root)
    except BlockingIOError as error:
        raise CheckpointError(
            f"another save is running in {root}; give each training its own directory"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _remove_leftovers(root: Path) -> None:
    """Remove the remains of killed saves; this save may need their disk space."""
    for partial in _own_directories(root, partial=True):
        _remove(partial)


def remove_unfinished(root: Path) -> None:
    """Remove the remains of killed saves in ``root``, which need not exist.

    Raises:
        IoError: the directory cannot be read.
        CheckpointError: another process is saving there.
    """
    if not root.is_dir():
        return
    with saving_in(root), _exclusive(root):
        _remove_leftovers(root)


def only_unfinished(root: Path) -> bool:
    """Return whether ``root`` contains only remains of killed saves, so that nothing can be loaded
    from it.
    """
    return len(_own_directories(root, partial=True)) == len(list(root.iterdir()))


def _own_directories(root: Path, *, partial: bool) -> list[Path]:
    """Return the finished checkpoints in ``root``, or with ``partial`` the unfinished ones."""
    if not root.is_dir():
        return []
    found = ((path, _OWN_NAME.fullmatch(path.name)) for path in root.iterdir())
    return [
        path
        for path, name in found
        if name and bool(name["partial"]) == partial and path.is_dir() and not path.is_symlink()
    ]


def _free_name(root: Path, step: int) -> Path:
    """Return an unused name. A checkpoint of the same step keeps its name until the new one is complete."""
    final, attempt = root / f"step-{step:08d}", 1
    while os.path.lexists(final) or os.path.lexists(_partial(final)):
        attempt += 1
        final = root / f"step-{step:08d}-{attempt}"
    return final


def _partial(final: Path) -> Path:
    return final.with_name(final.name + ".partial")
