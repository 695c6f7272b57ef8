"""The directory of a run: its checkpoint, and metrics, summary and picture next to it.

``DIR/checkpoint/`` (see gemini.checkpoint), ``DIR/run.json`` (the options, and all settings that the numbers
depend on), ``DIR/metrics.jsonl``, ``DIR/summary.json``, ``DIR/memory.png``, and ``DIR/tensorboard/``, which a
new run removes. A job may have others (``best/``, ``references.jsonl``, ``tokens.bin``). Nothing else in DIR
is touched. DIR and ``DIR/checkpoint`` may be links to another disk; links to files are not followed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

from gemini.checkpoint.directory import latest, only_unfinished, read_manifest, remove_unfinished
from gemini.errors import CheckpointError, ConfigError
from gemini.system.durable import replacing, restore, temporary_of
from gemini.system.files import DirectoryLock, append_whole, io_errors, read_regular

RESUME = ("no", "auto", "yes")  # whether to continue an existing run; auto: if there is one
_RUN = "run.json"
_TRACKERS = "trackers"  # key in run.json of the names that trackers gave the run
_MAX_RUN_BYTES = 2**20  # it has some hundred bytes
_MAX_METRICS_BYTES = 2**30  # millions of steps
# The subject of each digest in the identity of a run, with the options that set it.
_OF_DIGESTS = {
    "model": "the model (--model)",
    "tokens": "the data (--data, --data-keys or the tokenizer)",
    "eval_tokens": "the held-out data (--eval-data)",
    "corpus": "the text (--data)",
}
_REFERENCE = "reference"  # a digest of the model and the data together
_REPAIR = "repair it, or start over with --overwrite"


class RunDirectory:
    """Owns the files of one run.

    From the first look at the directory until :meth:`release`, no other process may train in it. If a file
    cannot be read or written, an IoError names it.

    Args:
        is_complete: whether a checkpoint directory can be loaded.
        option: the command line option that names the directory, for messages.
        exports: whether the run has ``model`` and ``best`` directories.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        is_complete: Callable[[Path], bool],
        *,
        option: str = "--checkpoint",
        exports: bool = False,
    ) -> None:
        self.path = Path(path)
        self._option = option
        self._exports = exports
        self._is_complete = is_complete
        self._unwritten = b""
        self._lock: DirectoryLock | None = None

    @property
    def checkpoint(self) -> Path:
        """The directory that gemini.checkpoint writes and reads."""
        return self.path / "checkpoint"

    @property
    def metrics(self) -> Path:
        """The file with one JSON object per step."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """The file with the summary of the run."""
        return self.path / "summary.json"

    @property
    def picture(self) -> Path:
        """The picture of memory per tier over one step."""
        return self.path / "memory.png"

    @property
    def model(self) -> Path:
        """The directory of the exported model or adapters."""
        return self.path / "model"

    @property
    def best(self) -> Path:
        """The directory with the weights that had the lowest held-out loss."""
        return self.path / "best"

    @property
    def tensorboard(self) -> Path:
        """The directory with the curves of the run for TensorBoard."""
        return self.path / "tensorboard"

    @property
    def _run(self) -> Path:
        return self.path / _RUN

    def refuse_unmakeable(self) -> None:
        """Raise ConfigError if :attr:`path` is not a writable directory and cannot become one."""
        there = self.path.absolute()
        while not os.path.exists(there) and there != there.parent:  # noqa: PTH110 - it never raises
            there = there.parent
        if not there.is_dir():
            raise ConfigError(f"{self._option} {self.path}: {there} is a file; name another directory")
        if not os.access(there, os.W_OK | os.X_OK):
            raise ConfigError(
                f"{self._option} {self.path}: {there} is not writable; change its permissions, or "
                "name another directory"
            )

    def refuse_foreign_model(self, source: Path) -> None:
        """Raise ConfigError if :attr:`model` or :attr:`best`, which a run replaces, contains ``source``, or
        exists although no run made it."""
        place = Path(os.path.realpath(source))
        for target in (self.model, self.best):
            if place.is_relative_to(os.path.realpath(target)):
                raise ConfigError(
                    f"{target} is the model that the run starts from, and the run would replace it; "
                    f"choose another {self._option}"
                )
            if target.exists() and not self._run.exists():
                raise ConfigError(
                    f"{target} exists and was not written by a run; move it, or choose another {self._option}"
                )

    def holds_run(self) -> bool:
        """Return whether there is a checkpoint to resume, complete or damaged."""
        self._hold()
        return self._has_checkpoint()

    def resumes(self, how: str, *, overwrite: bool) -> bool:
        """Return whether to continue the existing run. ``how`` is one of :data:`RESUME`.

        Raises:
            CheckpointError: ``how`` is "yes", and there is no run.
            ConfigError: ``how`` is "no", there is a run, and ``overwrite`` is not set.
        """
        if how == "no":
            if not overwrite:
                self.refuse_older_run()
            return False
        if how == "yes" and not self.holds_run():
            raise self._no_checkpoint()
        return self.holds_run()

    def refuse_older_run(self) -> None:
        """Raise ConfigError if there is a checkpoint, complete or not, or if another process trains here."""
        self._hold()
        if not self._has_checkpoint():
            return
        if not self._is_complete(self.checkpoint):
            raise ConfigError(self._incomplete())
        raise ConfigError(
            f"{self.path} already holds a run; "
            "continue it with --resume, start over with --overwrite, or choose another directory"
        )

    def start(self, identity: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Create the directory for a new run, and remove an older run.

        Args:
            identity: the settings that the numbers depend on; a resumed run must have the same.
            options: the options to use when the run is resumed.

        Raises:
            ConfigError: the directory cannot be written, or a file of the run is a directory.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._hold()
            self._refuse_directories()  # must precede every removal
            self._remove_checkpoint()
            self._remove_temporaries()
            if self._exports:
                restore(self.model)  # bring back a model that a killed export set aside, to remove it too
                for exported in (self.model, self.best):
                    if exported.exists():
                        shutil.rmtree(exported)
            for file in (self.metrics, self.summary, self.picture):
                file.unlink(missing_ok=True)
            self._remove_curves()
            _write(self._run, json.dumps({**identity, "options": dict(options)}, indent=2) + "\n")
        except OSError as error:
            raise ConfigError(
                f"cannot write to {self._option} {self.path}: {error.strerror or error}; name another "
                "directory"
            ) from error

    def _remove_curves(self) -> None:
        """Remove the event files of an older run, and nothing else of that directory."""
        if self.tensorboard.is_dir() and not self.tensorboard.is_symlink():
            for file in self.tensorboard.glob("events.out.tfevents.*"):
                file.unlink()

    def _refuse_directories(self) -> None:
        own = (self._run, self.metrics, self.summary, self.picture)
        for file in (*own, *map(temporary_of, own)):
            if file.is_dir() and not file.is_symlink():
                raise ConfigError(f"{file} is a directory; move it, or choose another {self._option}")

    def _remove_temporaries(self) -> None:
        """Remove half-written files of a killed run."""
        for file in (self._run, self.metrics, self.summary, self.picture):
            temporary_of(file).unlink(missing_ok=True)

    def _remove_checkpoint(self) -> None:
        """Remove the checkpoint directory. If it is a link to a directory (perhaps on another disk), remove
        only its contents."""
        if not self.checkpoint.is_symlink():
            if self.checkpoint.exists():
                shutil.rmtree(self.checkpoint)
            return
        if not self.checkpoint.is_dir():
            raise ConfigError(
                f"{self.checkpoint} is a link to {self.checkpoint.readlink()}, which is not a "
                "directory; create it (is its disk mounted?), or remove the link"
            )
        for entry in self.checkpoint.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def saved_step(self) -> int:
        """Return the number of finished steps in the newest checkpoint. Raises CheckpointError."""
        step: Any = read_manifest(latest(self.checkpoint))["extra"].get("step")
        if not _is_step(step) and step != 0:
            raise CheckpointError(f"{self.checkpoint} was not written by a run: it has no step; {_REPAIR}")
        return int(step)

    def check_resume(self, identity: Mapping[str, Any]) -> None:
        """Raise CheckpointError if there is no complete checkpoint, ConfigError if it belongs to a run with
        another identity, or if another process trains here."""
        self._hold()
        if not self._has_checkpoint():
            raise self._no_checkpoint()
        if not self._is_complete(self.checkpoint):
            raise CheckpointError(self._incomplete())
        self._check_metrics()
        self._refuse_directories()
        saved = _read_run(self._run)
        others = [name for name, value in identity.items() if saved.get(name) != value]
        if others:
            raise ConfigError(self._another_run(saved, identity, others))

    def _another_run(self, saved: Mapping[str, Any], identity: Mapping[str, Any], others: list[str]) -> str:
        """Return the message for a run with the keys ``others`` of its identity changed."""
        has = ", ".join(f"{name} = {saved.get(name)!r}" for name in others)
        asked = ", ".join(f"{name} = {identity[name]!r}" for name in others)
        return f"the run in {self.path} has {has}, but this command has {asked}; {self._way_back(others)}"

    def _way_back(self, others: Sequence[str]) -> str:
        """Return the remedy for a run with the keys ``others`` of its identity changed."""
        if not all(name in _OF_DIGESTS or name == _REFERENCE for name in others):
            return (
                "resume with the options of the first run (the device, budgets, tiers and policy may change)"
            )
        named = [_OF_DIGESTS[name] for name in others if name != _REFERENCE] or [_OF_DIGESTS["model"]]
        not_that, it = ("is not that", "it") if len(named) == 1 else ("are not those", "them")
        return (
            f"{' and '.join(named)} {not_that} of the first run: give {it} again, name another "
            f"{self._option}, or start over with --overwrite instead of --resume"
        )

    def release(self) -> None:
        """Let other processes train here. Idempotent."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _hold(self) -> None:
        """Lock the directory against other training processes, if it exists."""
        if self._lock is not None or not self.path.is_dir():
            return
        with io_errors("open", self.path):
            try:
                self._lock = DirectoryLock(self.path)
            except BlockingIOError as error:
                raise ConfigError(
                    f"another process trains in {self.path}; wait until it ends, or choose another directory"
                ) from error

    def _has_checkpoint(self) -> bool:
        """Return whether there is a checkpoint, complete or not.

        The remains of a first save that was killed do not count. An empty directory behind a link counts if
        there was a run, because its disk may not be mounted.
        """
        with io_errors("look for an older run", self.checkpoint):
            if not self.checkpoint.exists():
                return False
            if self.checkpoint.is_symlink() and not any(self.checkpoint.iterdir()):
                return self._run.exists()
            return not only_unfinished(self.checkpoint)

    def _no_checkpoint(self) -> CheckpointError:
        return CheckpointError(
            f"no complete checkpoint in {self.path}: there is nothing to resume; check the path, or give "
            "--resume auto to start a new run there"
        )

    def _incomplete(self) -> str:
        return (
            f"no complete checkpoint in {self.path}: files of {self.checkpoint} are missing (is its "
            "disk mounted?); start over with --overwrite, or choose another directory"
        )

    def keep_options(self, options: Mapping[str, Any]) -> None:
        """Store ``options`` for the next resume. Also remove partial files of a killed run, because a run
        that is at its end saves nothing that would remove them."""
        with io_errors("remove the files of a killed run", self.path):
            self._remove_temporaries()
        remove_unfinished(self.checkpoint)
        _write(self._run, json.dumps({**_read_run(self._run), "options": dict(options)}, indent=2) + "\n")

    def tracker_identities(self) -> dict[str, str]:
        """Return the name that each tracker gave this run, by tracker."""
        found = _read_run(self._run).get(_TRACKERS, {})
        if not isinstance(found, dict):
            return {}
        return {name: each for name, each in found.items() if isinstance(each, str)}

    def keep_tracker_identities(self, identities: Mapping[str, str]) -> None:
        """Store the names that trackers gave this run, so that a resumed run continues there."""
        saved = _read_run(self._run)
        if saved.get(_TRACKERS, {}) != identities:
            _write(self._run, json.dumps({**saved, _TRACKERS: dict(identities)}, indent=2) + "\n")

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Append one line, which readers of the file see at once. If writing fails, the line is written with
        the next one."""
        self._unwritten += (json.dumps(record) + "\n").encode("ascii")
        with io_errors("write metrics", self.metrics):
            append_whole(self.metrics, self._unwritten)
        self._unwritten = b""

    def read_metrics(self, before_step: int) -> list[dict[str, Any]]:
        """Return the records of steps 1 to ``before_step``, and delete later ones, which will be trained
        again.

        An unfinished last line of a killed run is ignored. Raise CheckpointError for any other invalid line.
        """
        records: list[dict[str, Any]] = []
        self._check_metrics()
        with io_errors("read metrics", self.metrics):
            data = (
                read_regular(self.metrics, _MAX_METRICS_BYTES, os.O_NOFOLLOW)
                if self.metrics.exists()
                else b""
            )
        lines = data.decode("ascii", errors="replace").splitlines()
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                if number == len(lines):
                    break
                raise self._bad_line(number, str(error)) from error
            if not isinstance(record, dict) or not _is_step(record.get("step")):
                raise self._bad_line(number, "it has no step, a number from 1")
            if not _is_number(record.get("loss")):
                raise self._bad_line(number, "it has no loss, a number")
            if record["step"] <= before_step:
                records.append(record)
        self._write_metrics(records)
        return records

    def add_to_metrics(self, step: int, found: Mapping[str, Any]) -> None:
        """Add values to the record of ``step``, if it is the last one. Raises the errors of
        :meth:`read_metrics`."""
        records = self.read_metrics(step)
        if records and records[-1]["step"] == step:
            records[-1].update(found)
            self._write_metrics(records)

    def _write_metrics(self, records: Sequence[Mapping[str, Any]]) -> None:
        _write(self.metrics, "".join(json.dumps(record) + "\n" for record in records))

    def _check_metrics(self) -> None:
        """Raise CheckpointError if the metrics are not a regular file: a FIFO would block its reader, and
        links are not followed."""
        with io_errors("read metrics", self.metrics):
            is_other = self.metrics.is_symlink() or (self.metrics.exists() and not self.metrics.is_file())
        if is_other:
            raise CheckpointError(
                f"{self.metrics} is not a regular file; remove it to continue without the losses of "
                "earlier steps"
            )

    def _bad_line(self, number: int, why: str) -> CheckpointError:
        return CheckpointError(
            f"line {number} of {self.metrics} is not the record of a step: {why}; repair it, or "
            "remove the file to continue without the losses of earlier steps"
        )

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the summary, atomically."""
        _write(self.summary, json.dumps(summary, indent=2) + "\n")

    def add_to_summary(self, found: Mapping[str, Any]) -> None:
        """Replace some values of the existing summary. Do nothing if it is unreadable."""
        try:
            summary = json.loads(read_regular(self.summary, _MAX_RUN_BYTES, os.O_NOFOLLOW))
        except (OSError, ValueError, RecursionError):
            return
        if isinstance(summary, dict):
            self.write_summary({**summary, **found})


class FollowedDirectory(RunDirectory):
    """The directory of a run on a rank that does not own it. This rank reads checkpoints and writes
    nothing."""

    def holds_run(self) -> bool:
        """Return False: only the owning rank checks."""
        return False

    def saved_step(self) -> int:
        """Return 0: the owning rank reports the step."""
        return 0

    def check_resume(self, identity: Mapping[str, Any]) -> None:
        """Do nothing: the owning rank checks. The methods below also do nothing, for the same reason."""

    def refuse_older_run(self) -> None:
        """Do nothing."""

    def start(self, identity: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Do nothing."""

    def keep_options(self, options: Mapping[str, Any]) -> None:
        """Do nothing."""

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Do nothing."""

    def read_metrics(self, before_step: int) -> list[dict[str, Any]]:
        """Return no records."""
        return []


def saved_options(path: str | os.PathLike[str], kind: type[Any], command: str) -> dict[str, Any]:
    """Return the options with which the run in ``path`` last ran; empty if there is no run.

    ``kind``: the dataclass of the options; its ``NOT_KEPT`` names options that a run does not store. Raise
    CheckpointError or IoError if the options cannot be read.
    """
    file = Path(path) / _RUN
    with io_errors("look for an older run", file):
        exists = file.is_symlink() or file.exists()
    options = _read_run(file).get("options", {}) if exists else {}
    if not isinstance(options, dict):
        raise CheckpointError(
            f"{file} has options = {options!r:.200}, which are not options of {command}; {_REPAIR}"
        )
    types = {field.name: get_type_hints(kind)[field.name] for field in fields(kind)}
    for name, value in options.items():
        if name in kind.NOT_KEPT or name not in types or not is_a(value, types[name]):
            raise CheckpointError(
                f"{file} has {name} = {value!r:.200}, which is not an option of {command}; {_REPAIR}"
            )
    return options


def _read_run(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_regular(file, _MAX_RUN_BYTES, os.O_NOFOLLOW).decode("ascii"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read, so the run is unknown: {error}; {_REPAIR}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} does not hold a JSON object, so the run is unknown; {_REPAIR}")
    return found


def is_a(value: object, kind: Any) -> bool:
    """Return whether a value from a file is valid for an option of type ``kind``."""
    if isinstance(value, bool):
        return kind is bool
    if isinstance(value, str) and "\0" in value:
        return False
    if type(value) in (int, float):
        return _is_number(value) and (kind is float or isinstance(value, kind))
    return isinstance(value, kind)


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**63)


def _is_step(value: object) -> bool:
    return type(value) is int and value >= 1


def _write(path: Path, text: str) -> None:
    with replacing(path, "write") as temporary:
        temporary.write_text(text, encoding="ascii")
