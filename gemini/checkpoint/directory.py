"""A checkpoint directory that is complete or not there, whatever happens while it is written.

``DIR/step-<N>.partial`` is written and synced file by file, renamed to ``DIR/step-<N>``, then
``DIR/latest.json`` is replaced to name it. Older ones are removed last: after a kill at any point the last
complete one is still there and named. Entries of other names are left alone.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gemini.checkpoint.sealed_file import Seal, SealedFile, check_seal
from gemini.errors import CheckpointError, IoError

logger = logging.getLogger(__name__)

FORMAT = "gemini-checkpoint-1"
_LATEST = "latest.json"
_MANIFEST = "manifest.json"
# What _free_name makes, and the same while it is written. Whatever else lies there is the user's.
_OWN_NAME = re.compile(r"step-\d{8,}(-\d+)?(?P<partial>\.partial)?")


class NewCheckpoint:
    """A checkpoint being written: add files, then :meth:`finish` it with the manifest."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest_seal: Seal | None = None
        self._seals: dict[str, Seal] = {}

    @contextmanager
    def file(self, name: str) -> Iterator[SealedFile]:
        """Yield a new file; on leaving the block it is durable and part of the checkpoint."""
        with SealedFile(self.path / name) as file:
            yield file
        self._seals[name] = file.seal

    def add_json(self, name: str, document: Mapping[str, Any]) -> None:
        """Write a JSON file."""
        with self.file(name) as file:
            file.write(_encoded(document))

    def finish(self, manifest: Mapping[str, Any]) -> None:
        """Write the manifest: what it is given, and the seals of all other files."""
        files = {name: [seal.num_bytes, seal.crc32] for name, seal in self._seals.items()}
        self.add_json(_MANIFEST, {**manifest, "format": FORMAT, "files": files})
        self.manifest_seal = self._seals[_MANIFEST]


@contextmanager
def new_checkpoint(directory: str | os.PathLike[str], step: int) -> Iterator[NewCheckpoint]:
    """Yield a checkpoint to fill and finish; name it the latest on leaving the block.

    On failure what was written is removed and the previous checkpoint stays.

    Raises:
        IoError: the directory cannot be written.
        CheckpointError: another process is saving there.
    """
    root = Path(directory)
    try:
        _make_private(root)
        with _exclusive(root):
            _remove_leftovers(root)
            final = _free_name(root, step)
            partial = _partial(final)
            try:
                partial.mkdir(mode=0o700)
                checkpoint = NewCheckpoint(partial)
                yield checkpoint
                assert checkpoint.manifest_seal is not None, "finish() was not called"
                _publish(root, partial, final, checkpoint.manifest_seal)
            finally:
                shutil.rmtree(partial, ignore_errors=True)  # gone by now, unless something failed
    except IoError:
        raise
    except OSError as error:
        raise IoError(
            error.errno or 0,
            f"cannot save a checkpoint: {error.strerror or error}",
            error.filename or str(root),
        ) from error


def latest_checkpoint(directory: str | os.PathLike[str]) -> Path:
    """Return the last complete checkpoint below ``directory``.

    Raises:
        CheckpointError: there is none.
    """
    return _latest(Path(directory))[0]


def read_manifest(directory: str | os.PathLike[str]) -> tuple[Path, dict[str, Any]]:
    """Return the last complete checkpoint below ``directory`` and its manifest; check the sizes of all files.

    Raises:
        CheckpointError: there is none, or a file is missing or damaged.
    """
    checkpoint, seal = _latest(Path(directory))
    check_seal(checkpoint / _MANIFEST, seal, content=True)
    manifest = _read_json(checkpoint / _MANIFEST)
    check_files(checkpoint, manifest, content=False)
    return checkpoint, manifest


def check_files(checkpoint: Path, manifest: Mapping[str, Any], *, content: bool) -> None:
    """Compare every file with its seal. Raises CheckpointError naming the first that differs."""
    for name, (num_bytes, crc32) in manifest["files"].items():
        check_seal(checkpoint / name, Seal(num_bytes, crc32), content=content)


def _latest(root: Path) -> tuple[Path, Seal]:
    if not (root / _LATEST).exists():
        raise CheckpointError(
            f"{root} holds no complete checkpoint; check the path, or train with this directory first"
        )
    document = _read_json(root / _LATEST)
    try:
        name = str(document["checkpoint"])
        num_bytes, crc32 = document["manifest"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{root / _LATEST} is damaged: {error!r}") from error
    if (root / name).parent != root or not (root / name / _MANIFEST).exists():
        raise CheckpointError(f"{root / _LATEST} names {name!r}, which is not a complete checkpoint")
    return root / name, Seal(int(num_bytes), int(crc32))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="ascii"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a {FORMAT} file")
    return document


def _encoded(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=1, sort_keys=True) + "\n").encode("ascii")


def _publish(root: Path, partial: Path, final: Path, manifest: Seal) -> None:
    """Give a finished checkpoint its name, make it the latest, and only then remove the others."""
    _sync(partial)
    partial.rename(final)
    _sync(root)  # the name must be durable before the file that tells it
    temporary = root / (_LATEST + ".tmp")
    seal = [manifest.num_bytes, manifest.crc32]
    try:
        with SealedFile(temporary) as file:
            file.write(_encoded({"format": FORMAT, "checkpoint": final.name, "manifest": seal}))
        temporary.replace(root / _LATEST)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise  # the next save removes what nothing names
    _sync(root)
    try:
        _remove_others(root, final.name)
    except OSError as error:
        logger.warning("%s is complete, but an older one cannot be removed: %s", final, error)


def _make_private(root: Path) -> None:
    if not root.is_dir():
        root.mkdir(mode=0o700, parents=True)
        _sync(root.parent)


@contextmanager
def _exclusive(root: Path) -> Iterator[None]:
    """Keep other savers out of ``root``; the kernel ends this with the process."""
    descriptor = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                f"another process is saving in {root}; give each its own directory"
            ) from error
        except OSError as error:
            logger.info(
                "%s cannot be locked (%s): nothing keeps a second process from saving there", root, error
            )
        yield
    finally:
        os.close(descriptor)


def _remove_leftovers(root: Path) -> None:
    """Remove what killed or failed saves left behind; their disk space may be needed for this one."""
    (root / (_LATEST + ".tmp")).unlink(missing_ok=True)
    with suppress(
        CheckpointError
    ):  # without a latest one, complete ones that nothing names stay for the user
        _remove_others(root, _latest(root)[0].name)
    for partial in _own_directories(root, partial=True):
        shutil.rmtree(partial)


def _remove_others(root: Path, keep: str) -> None:
    for other in _own_directories(root, partial=False):
        if other.name != keep:
            shutil.rmtree(other)


def _own_directories(root: Path, *, partial: bool) -> list[Path]:
    """Return the checkpoints in ``root`` that are finished, or those that are not."""
    found = ((path, _OWN_NAME.fullmatch(path.name)) for path in root.iterdir())
    return [
        path
        for path, name in found
        if name and bool(name["partial"]) == partial and path.is_dir() and not path.is_symlink()
    ]


def _free_name(root: Path, step: int) -> Path:
    """Return a name that nothing has: a checkpoint of the same step stays until the new one is the latest."""
    final, attempt = root / f"step-{step:08d}", 1
    while os.path.lexists(final) or os.path.lexists(_partial(final)):
        attempt += 1
        final = root / f"step-{step:08d}-{attempt}"
    return final


def _partial(final: Path) -> Path:
    return final.with_name(final.name + ".partial")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
