"""Caches the tokens of a run's data in its directory, so that a resumed run need not encode the data again.

The cache is valid if nothing that the tokens depend on has changed: the data files by name, size and
modification time, the tokenizer with its template, the options, and the package versions. The file has a line
of JSON, the length of each document (int32), and the tokens (int32); those that the loss ignores are
inverted.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from gemini.jobs.finetune.encoding import EncodedDocument
from gemini.jobs.finetune.record_files import DataFiles
from gemini.jobs.finetune.record_kinds import DATA_FORMATS, Document
from gemini.jobs.finetune.samples import Samples
from gemini.system.durable import replacing
from gemini.system.files import open_regular, parse_json

TOKENS, EVAL_TOKENS = "tokens.bin", "eval_tokens.bin"  # in the directory of a run
_MAX_LINE = 2**24  # limit for the first line
_BLOCK = 2**22  # tokens to copy at a time
_KEY, _COUNTS, _FINGERPRINT, _PLAIN = "key", "counts", "fingerprint", "plain_template"
_NUM_DOCUMENTS, _NUM_TOKENS = "documents", "tokens"


@dataclass(frozen=True)
class KeptTokens:
    """The contents of a cache file.

    Attributes:
        counts: number of documents by kind; the first document's kind comes first.
        fingerprint: as in :class:`Samples`.
        plain_template: whether documents used the plain chat template.
        begin: offset of the data behind the first line.
    """

    path: Path
    counts: Mapping[str, int]
    fingerprint: str
    plain_template: bool
    num_documents: int
    num_tokens: int
    begin: int

    def __iter__(self) -> Iterator[EncodedDocument]:
        """Yield the documents without their texts. Raises OSError or ValueError if the file has changed."""
        document = Document("", next(iter(self.counts), ""))
        with os.fdopen(open_regular(self.path), "rb") as file, self.path.open("rb") as more:
            file.seek(self.begin)
            more.seek(self.begin + 4 * self.num_documents)
            for length in _numbers(file, self.num_documents).tolist():
                stored = _numbers(more, length)
                ids = np.where(stored < 0, ~stored, stored)
                yield EncodedDocument(document, ids.tolist(), (stored >= 0).tolist())


def _numbers(file: IO[bytes], count: int) -> npt.NDArray[np.int32]:
    found = np.frombuffer(file.read(4 * max(0, count)), dtype="<i4")
    if len(found) != count:
        raise ValueError("the file is too short")
    return found


def key_of(files: DataFiles, tokenizer: Path, options: Mapping[str, Any]) -> str:
    """Return the cache key of ``files``: it changes with everything that the tokens depend on. ``tokenizer``:
    the directory of the tokenizer. Raises OSError."""
    import tokenizers  # type: ignore[import-not-found, unused-ignore]
    import transformers

    found = [(str(path.absolute()), path.stat()) for path in files.files]
    told = {
        "files": [[name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for name, stat in found],
        "tokenizer": _digest(tokenizer),
        "options": dict(options),
        "versions": [transformers.__version__, tokenizers.__version__],
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _digest(directory: Path) -> str:
    """Return a hash of the tokenizer files in a model directory."""
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if path.suffix in (".json", ".jinja", ".model", ".txt", ".tiktoken") and path.is_file():
            digest.update(f"{path.name}\0{path.stat().st_size}\n".encode("utf-8", "surrogateescape"))
            digest.update(path.read_bytes())
    return digest.hexdigest()


def kept_tokens(path: Path, key: str) -> KeptTokens | None:
    """Return the tokens cached at ``path`` for the same ``key``; None if there is no usable file."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            line = file.readline(_MAX_LINE)
            found = parse_json(line.decode("ascii"))
            size = os.fstat(file.fileno()).st_size
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or found.get(_KEY) != key:
        return None
    counts: Any = found.get(_COUNTS)
    documents: Any = found.get(_NUM_DOCUMENTS)
    tokens: Any = found.get(_NUM_TOKENS)
    is_counted = isinstance(counts, dict) and counts.keys() <= {*DATA_FORMATS}
    are_numbers = all(type(each) is int and each >= 0 for each in (documents, tokens))
    if not (is_counted and are_numbers) or size != len(line) + 4 * (documents + tokens):
        return None
    fingerprint, plain = str(found.get(_FINGERPRINT)), found.get(_PLAIN) is True
    return KeptTokens(path, counts, fingerprint, plain, documents, tokens, len(line))


def keep_tokens(
    path: Path, key: str, samples: Samples, counts: Mapping[str, int], *, plain_template: bool
) -> None:
    """Write the tokens of ``samples`` to ``path``, readable only by the user. Raises IoError."""
    told = {
        _KEY: key,
        _COUNTS: dict(counts),
        _FINGERPRINT: samples.fingerprint,
        _PLAIN: plain_template,
        _NUM_DOCUMENTS: len(samples.lengths),
        _NUM_TOKENS: samples.num_tokens,
    }
    with replacing(path, "cache the tokens") as temporary:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(json.dumps(told).encode("ascii") + b"\n")
            file.write(np.asarray(samples.lengths, dtype="<i4").tobytes())
            for first in range(0, samples.num_tokens, _BLOCK):
                file.write(samples.stored(first, _BLOCK).tobytes())
