"""What the warmup learned: the accesses of one iteration, and the memory each period needs besides."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gemini.errors import CheckpointError, ConfigError, IoError

_FORMAT = "gemini-trace-1"


@dataclass(frozen=True)
class Trace:
    """One iteration. The three per-moment fields have one entry per moment.

    ``accesses``: the chunk ids each PreOp needs. ``non_model_bytes``: the peak of period ``i``, between
    moment ``i`` and the next one; the iteration repeats, so the last period reaches to moment 0 of the next
    step. ``phases``: what the step was doing. ``param_order``: parameter names by first use.
    ``chunk_signature``: which layout the chunk ids belong to (``ChunkLayout.signature()``). Raises
    ConfigError for fields that contradict each other.
    """

    accesses: tuple[tuple[int, ...], ...]
    non_model_bytes: tuple[int, ...]
    phases: tuple[str, ...]
    param_order: tuple[str, ...]
    chunk_signature: str

    def __post_init__(self) -> None:
        counts = (len(self.accesses), len(self.non_model_bytes), len(self.phases))
        if len(set(counts)) != 1:
            raise ConfigError(
                f"a trace needs one entry per moment in each field, got {counts[0]} accesses, "
                f"{counts[1]} periods and {counts[2]} phases"
            )
        if min(self.non_model_bytes, default=0) < 0:
            raise ConfigError(
                f"a period has {min(self.non_model_bytes)} non-model bytes; they cannot be negative"
            )
        if any(chunk < 0 for chunks in self.accesses for chunk in chunks):
            raise ConfigError("a chunk id is negative; ids count from 0")
        if len(set(self.param_order)) != len(self.param_order):
            raise ConfigError("a parameter is named twice in param_order; it lists each by its first use")

    @property
    def num_moments(self) -> int:
        """Return how many moments the iteration has."""
        return len(self.accesses)

    def reserve_bytes(self) -> tuple[int, ...]:
        """Return, per moment, the DEVICE bytes to keep free: the non-model peak of the period it opens."""
        return self.non_model_bytes

    def hash(self) -> str:
        """Return a digest that is equal exactly for equal traces, on every rank and machine."""
        return hashlib.sha256(_canonical(asdict(self)).encode()).hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as JSON. The file is complete or as it was before. Raises IoError."""
        document = {"format": _FORMAT, "hash": self.hash(), "trace": asdict(self)}
        _write_atomically(Path(path), _canonical(document) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Return what ``save`` wrote. Raises CheckpointError for a missing, damaged or foreign file."""
        try:
            document = json.loads(Path(path).read_text(encoding="ascii"))
        except OSError as error:
            raise CheckpointError(f"cannot read the trace {path}: {error.strerror}") from error
        except ValueError as error:  # not ASCII, or not JSON
            raise CheckpointError(
                f"{path} is not a trace: {error}; remove it and run the warmup again"
            ) from error
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            raise CheckpointError(f"{path} is not a {_FORMAT} file; remove it and run the warmup again")
        try:
            trace = cls._from_fields(document["trace"])
        except (KeyError, TypeError, ConfigError) as error:
            raise CheckpointError(
                f"{path} is damaged: {error}; remove it and run the warmup again"
            ) from error
        if trace.hash() != document.get("hash"):
            raise CheckpointError(
                f"{path} is damaged: its hash does not match; remove it and run the warmup again"
            )
        return trace

    @classmethod
    def _from_fields(cls, fields: dict[str, Any]) -> Trace:
        """Return a trace of fields read from JSON, where tuples are lists. The caller compares the hash."""
        return cls(
            accesses=tuple(tuple(_int(chunk) for chunk in chunks) for chunks in fields["accesses"]),
            non_model_bytes=tuple(_int(nbytes) for nbytes in fields["non_model_bytes"]),
            phases=tuple(_str(phase) for phase in fields["phases"]),
            param_order=tuple(_str(name) for name in fields["param_order"]),
            chunk_signature=_str(fields["chunk_signature"]),
        )


def _int(value: object) -> int:
    if type(value) is not int:  # a bool is an int to isinstance
        raise TypeError(f"{value!r} stands where an integer belongs")
    return value


def _str(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} stands where a text belongs")
    return value


def _canonical(document: dict[str, Any]) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def _write_atomically(path: Path, text: str) -> None:
    """Replace ``path`` by ``text``, durably; on failure the old file stays and no temporary one does."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_directory(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise IoError(error.errno or 0, f"cannot write the trace: {error.strerror}", str(path)) from error


def _sync_directory(directory: Path) -> None:
    """Make a rename in ``directory`` survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
