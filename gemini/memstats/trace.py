"""Trace: one iteration as plain data, with everything that planning the next ones needs, including link
speeds.

On disk it is a JSON file that is written atomically.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from gemini.errors import CheckpointError, ConfigError, in_words
from gemini.system.config import format_bytes
from gemini.system.durable import write_text
from gemini.system.files import KEY, Format, parse_json, read_regular
from gemini.system.input_files import why_unread

_T = TypeVar("_T")


# The largest file that is read: enough for hundreds of thousands of moments.
_MAX_BYTES = 2**26
_AGAIN = "remove it and run the warmup again"
_LESS = f"it does not say how chunks are accessed nor how long operators take; {_AGAIN}"
FORMAT = Format("gemini-trace", 2, older={1: _LESS})


def digest(document: dict[str, Any]) -> str:
    """Return a digest that is equal exactly for equal documents, on every machine."""
    return hashlib.sha256(_canonical(document).encode()).hexdigest()


def write_trace(path: Path, fields: dict[str, Any], identity: str) -> None:
    """Write a trace's fields and its hash, with a checksum over all of them. Raises IoError."""
    document = {KEY: str(FORMAT), "hash": identity, "checksum": digest(fields), "trace": fields}
    # Readable only by its owner, like checkpoints: it contains parameter names.
    write_text(path, _canonical(document) + "\n", "write the trace", mode=0o600)


def read_trace(path: Path) -> tuple[dict[str, Any], str]:
    """Return the fields and the hash from a file of :func:`write_trace`.

    Raises:
        CheckpointError: the file is missing, damaged, foreign, or of another version of the format.
    """
    try:
        document = parse_json(read_regular(path, _MAX_BYTES).decode("ascii"))
    except OSError as error:
        raise CheckpointError(f"cannot read the trace {path}: {why_unread(error)}") from error
    except ValueError as error:  # not ASCII, or not JSON
        raise CheckpointError(f"{path} is not a trace: {error}; {_AGAIN}") from error
    if not FORMAT.is_read(document):
        is_foreign = FORMAT.version_of(document) is None
        hint = ": that is what Trace.save writes, and gemini trace as trace-step.json" if is_foreign else ""
        raise CheckpointError(FORMAT.refusal(document, path) + hint)
    fields, identity = document.get("trace"), document.get("hash")
    if not isinstance(fields, dict) or document.get("checksum") != digest(fields):
        raise damaged(path, "its checksum does not match")
    return fields, str(identity)


def damaged(path: Path, why: object) -> CheckpointError:
    """Return the error for a trace file with contradictory content."""
    return CheckpointError(f"{path} is damaged: {why}; {_AGAIN}")


def _canonical(document: dict[str, Any]) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


LINKS = ("h2d", "d2h", "disk_read", "disk_write")
KINDS = ("train", "eval")
FORWARD, BACKWARD, OPTIMIZER = PHASES = ("forward", "backward", "optimizer")
CHUNK_KINDS = (
    "param",
    "grad",
    "master",
    "exp_avg",
    "exp_avg_sq",
    "momentum_buffer",
    "state",
    "activation",
    "shard",
    "grad_shard",
    "exchange",
    "room",
    "kv",
)
_TOO_MANY_BYTES = 2**62  # the core adds them in 64 bits
READ, MODIFIED, WRITTEN = MODES = "rmw"

_PER_MOMENT = ("accesses", "modes", "frees", "seconds", "non_model_bytes", "phases")
_PER_MACHINE = ("seconds", "links")  # differ between two recordings of the same iteration


@dataclass(frozen=True)
class LinkSpeed:
    """One link: a transfer of n bytes takes ``latency_seconds + n / bytes_per_second``.

    ``name``: one of ``LINKS``. Raises ConfigError for impossible values.
    """

    name: str
    bytes_per_second: float
    latency_seconds: float

    def __post_init__(self) -> None:
        if self.name not in LINKS:
            raise ConfigError(f"there is no link {self.name!r}; the links are {', '.join(LINKS)}")
        if not (self.bytes_per_second > 0 and math.isfinite(self.bytes_per_second)):
            raise ConfigError(f"{self.name} moves {self.bytes_per_second} bytes per second; it must be > 0")
        if not (self.latency_seconds >= 0 and math.isfinite(self.latency_seconds)):
            raise ConfigError(f"{self.name} has a latency of {self.latency_seconds} s; it must be >= 0")

    def seconds(self, nbytes: int) -> float:
        """Return the duration of a transfer of ``nbytes`` on a free link."""
        return self.latency_seconds + nbytes / self.bytes_per_second


@dataclass(frozen=True)
class Trace:
    """One iteration in program order: forward, backward, update, whenever the updates ran.

    One entry per moment; period ``i`` lies between moment ``i`` and the next one, and the last reaches to
    moment 0 of the next iteration, because it repeats:

    - ``accesses``: the ids of the chunks that the PreOp needs, ascending.
    - ``modes``: a letter per access: ``r`` read, ``m`` modified, ``w`` written whole (the chunk had no
      content before and is allocated here).
    - ``frees``: the chunks that lose their content in the period, ascending.
    - ``seconds``: compute time of the period, without waits for transfers.
    - ``non_model_bytes``: peak of the period.
    - ``phases``: the phase of the step, one of ``PHASES``.

    One entry per chunk id: ``chunk_bytes``, ``chunk_kinds`` (one of ``CHUNK_KINDS``).

    ``kind``: ``"train"`` or ``"eval"``. ``links``: speeds on the machine that recorded it; empty if none was
    measured. ``param_order``: parameter names by first use. ``chunk_signature``: the layout that the chunk
    ids belong to. Raises ConfigError for fields that contradict each other.
    """

    kind: str
    accesses: tuple[tuple[int, ...], ...]
    modes: tuple[str, ...]
    frees: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]
    non_model_bytes: tuple[int, ...]
    phases: tuple[str, ...]
    chunk_bytes: tuple[int, ...]
    chunk_kinds: tuple[str, ...]
    links: tuple[LinkSpeed, ...]
    param_order: tuple[str, ...]
    chunk_signature: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"a trace of kind {self.kind!r}: the kinds are {', '.join(KINDS)}")
        self._check_chunks()
        self._check_moments()
        _check_each_once("param_order", self.param_order)
        _check_each_once("links", [link.name for link in self.links])

    @property
    def num_moments(self) -> int:
        """The number of moments."""
        return len(self.accesses)

    def reserve_bytes(self) -> tuple[int, ...]:
        """Return, per moment, the DEVICE bytes to keep free: the non-model peak of the period it opens."""
        return self.non_model_bytes

    def hash(self) -> str:
        """Return a digest that is equal exactly for equal iterations, on every rank and machine; the speed of
        a machine (``seconds``, ``links``) is not included."""
        return digest({name: value for name, value in asdict(self).items() if name not in _PER_MACHINE})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as JSON, atomically. Raises IoError."""
        write_trace(Path(path), asdict(self), self.hash())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a file of ``save``. Raises CheckpointError for a missing, damaged, foreign or older file."""
        fields, identity = read_trace(Path(path))
        try:
            trace = cls._from_fields(fields)
        except (KeyError, TypeError, OverflowError, ConfigError) as error:
            raise damaged(Path(path), in_words(error)) from error
        if trace.hash() != identity:
            raise damaged(Path(path), "its hash does not match")
        return trace

    @classmethod
    def _from_fields(cls, fields: dict[str, Any]) -> Trace:
        """Return a trace from fields read from JSON, where tuples are lists."""
        return cls(
            kind=_str(fields["kind"]),
            accesses=_each(lambda chunks: _each(_int, chunks), fields["accesses"]),
            modes=_each(_str, fields["modes"]),
            frees=_each(lambda chunks: _each(_int, chunks), fields["frees"]),
            seconds=_each(_float, fields["seconds"]),
            non_model_bytes=_each(_int, fields["non_model_bytes"]),
            phases=_each(_str, fields["phases"]),
            chunk_bytes=_each(_int, fields["chunk_bytes"]),
            chunk_kinds=_each(_str, fields["chunk_kinds"]),
            links=_each(_link, fields["links"]),
            param_order=_each(_str, fields["param_order"]),
            chunk_signature=_str(fields["chunk_signature"]),
        )

    # -- validation ------------------------------------------------------------------------------

    def _check_chunks(self) -> None:
        if len(self.chunk_bytes) != len(self.chunk_kinds):
            raise ConfigError(
                f"chunk_bytes has {len(self.chunk_bytes)} entries and chunk_kinds {len(self.chunk_kinds)}: "
                "each needs one per chunk"
            )
        for chunk, (nbytes, kind) in enumerate(zip(self.chunk_bytes, self.chunk_kinds, strict=True)):
            if not 0 < nbytes < _TOO_MANY_BYTES:
                raise ConfigError(
                    f"chunk_bytes: chunk {chunk} has {nbytes:,} bytes; it must have 1 byte or more"
                )
            if kind not in CHUNK_KINDS:
                raise ConfigError(f"chunk_kinds: chunk {chunk} is of no known kind: {kind!r}")

        if sum(self.chunk_bytes) >= _TOO_MANY_BYTES:
            raise ConfigError(f"chunk_bytes: all chunks together have {format_bytes(sum(self.chunk_bytes))}")

    def _check_moments(self) -> None:
        counts = {name: len(getattr(self, name)) for name in _PER_MOMENT}
        if len(set(counts.values())) != 1:
            raise ConfigError(f"a trace needs one entry per moment in each field, got {counts}")
        self._check_ids("accesses")
        self._check_ids("frees")
        # Check each distinct value once: there may be hundreds of thousands of moments.
        for chunks, modes in dict.fromkeys(zip(self.accesses, self.modes, strict=True)):
            if len(modes) != len(chunks) or not set(modes) <= set(MODES):
                moment = list(zip(self.accesses, self.modes, strict=True)).index((chunks, modes))
                raise ConfigError(
                    f"modes: moment {moment} has {modes!r} for {len(chunks)} accesses; each is one of {MODES}"
                )
        if not all(map(math.isfinite, self.seconds)) or min(self.seconds, default=0) < 0:
            moment, bad = next(
                (moment, each)
                for moment, each in enumerate(self.seconds)
                if not (math.isfinite(each) and each >= 0)
            )
            raise ConfigError(f"seconds: moment {moment} takes {bad} s")
        for nbytes in (min(self.non_model_bytes, default=0), max(self.non_model_bytes, default=0)):
            if not 0 <= nbytes < _TOO_MANY_BYTES:
                moment = self.non_model_bytes.index(nbytes)
                raise ConfigError(f"non_model_bytes: moment {moment} has {nbytes}")
        for phase in dict.fromkeys(self.phases):
            if phase not in PHASES:
                moment = self.phases.index(phase)
                raise ConfigError(f"phases: moment {moment} is of no known phase: {phase!r}")

    def _check_ids(self, field: str) -> None:
        known, moments = len(self.chunk_bytes), getattr(self, field)
        for chunks in dict.fromkeys(moments):  # few distinct ones: most moments repeat
            if chunks and not 0 <= min(chunks) <= max(chunks) < known:
                raise ConfigError(
                    f"{field}: moment {moments.index(chunks)} names chunks {chunks} of {known}; ids count "
                    "from 0"
                )
            if any(chunk >= following for chunk, following in pairwise(chunks)):
                raise ConfigError(
                    f"{field}: moment {moments.index(chunks)} has {chunks}: ids ascend, each once"
                )


def _check_each_once(field: str, names: Iterable[str]) -> None:
    repeated = [repr(name) for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise ConfigError(f"{field} names {', '.join(repeated)} more than once")


def _each(read: Callable[[Any], _T], values: object) -> tuple[_T, ...]:
    if not isinstance(values, list | tuple):
        raise TypeError(f"expected a list, found {values!r}")
    return tuple(read(value) for value in values)


def _int(value: object) -> int:
    if type(value) is not int:  # a bool is an int to isinstance
        raise TypeError(f"expected an integer, found {value!r}")
    return value


def _float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"expected a number, found {value!r}")
    return float(value)


def _str(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a string, found {value!r}")
    return value


def _link(value: object) -> LinkSpeed:
    if not isinstance(value, dict):
        raise TypeError(f"expected an object for a link, found {value!r}")
    return LinkSpeed(_str(value["name"]), _float(value["bytes_per_second"]), _float(value["latency_seconds"]))
