"""A trace on disk: JSON in a file that is complete or as it was before."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from gemini.errors import CheckpointError
from gemini.system.durable import write_text
from gemini.system.files import parse_json, read_regular
from gemini.system.formats import KEY, Format

# Of steps with hundreds of thousands of moments, too; what is larger would take the memory.
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
    # For its owner alone, as checkpoints are: it names the parameters.
    write_text(path, _canonical(document) + "\n", "write the trace", mode=0o600)


def read_trace(path: Path) -> tuple[dict[str, Any], str]:
    """Return the fields and the hash that :func:`write_trace` wrote.

    Raises:
        CheckpointError: the file is missing, damaged, foreign, or of another version of the format.
    """
    try:
        document = parse_json(read_regular(path, _MAX_BYTES).decode("ascii"))
    except OSError as error:
        raise CheckpointError(f"cannot read the trace {path}: {error.strerror}") from error
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
    """Return the error for a trace file whose content contradicts itself."""
    return CheckpointError(f"{path} is damaged: {why}; {_AGAIN}")


def _canonical(document: dict[str, Any]) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
