"""Bytes of real text as training data, with bounded memory and random access by batch number.

Batch ``i`` is a pure function of ``(corpus, seed, i)``, so a resumed run sees exactly the batches of an
uninterrupted one, without replaying anything.
"""

from __future__ import annotations

import bisect
import errno
import hashlib
import itertools
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gemini.errors import ConfigError, IoError
from gemini.system.input_files import require_inside, why_unread

_STDLIB_CAP_BYTES = 32 * 2**20
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
_PROBE_BYTES = 4096


@dataclass(frozen=True)
class Piece:
    """One file of a corpus: its path, its name within the corpus, and the number of its bytes that are
    used."""

    path: Path
    name: str
    nbytes: int


class ByteCorpus:
    """Read-only bytes of one file, of a directory's text files, or of Python's standard library (``None``).

    A directory is read recursively in sorted order; hidden, empty and binary files (a NUL in the first 4 KiB)
    are skipped. No file stays open and nothing is cached, so memory does not grow with the corpus. Raise
    ConfigError if there is nothing to read.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.source = "the Python standard library" if path is None else os.fspath(path)
        self._pieces = _stdlib_pieces() if path is None else _pieces_of(Path(path))
        self._ends = list(itertools.accumulate(piece.nbytes for piece in self._pieces))
        if not self._ends:
            raise ConfigError(
                f"no text in {self.source}; give --data a text file or a directory of text files"
            )

    @property
    def num_files(self) -> int:
        """Number of files in the corpus."""
        return len(self._pieces)

    @property
    def nbytes(self) -> int:
        """Size of the corpus in bytes, which is also its number of tokens."""
        return self._ends[-1]

    def fingerprint(self) -> str:
        """Return a hash of the files' names and sizes. It is equal for the same corpus at any path."""
        digest = hashlib.sha256()
        for piece in self._pieces:
            digest.update(f"{piece.name}\0{piece.nbytes}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()[:16]

    def read(self, position: int, nbytes: int) -> bytes:
        """Return ``nbytes`` bytes from ``position``, across files. Raise IoError if a file shrank or is
        gone."""
        if position < 0 or nbytes < 0 or position + nbytes > self.nbytes:
            raise ConfigError(
                f"bytes {position} to {position + nbytes} are outside the corpus of {self.nbytes} bytes"
            )
        parts: list[bytes] = []
        index = bisect.bisect_right(self._ends, position)
        while nbytes > 0:
            piece = self._pieces[index]
            offset = position - (self._ends[index] - piece.nbytes)
            take = min(nbytes, piece.nbytes - offset)
            parts.append(_read_exactly(piece.path, offset, take))
            position, nbytes, index = position + take, nbytes - take, index + 1
        return b"".join(parts)

    def batch(self, index: int, *, batch: int, seq: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of batch ``index``: int64 ``[batch, seq]``, targets shifted by one
        byte."""
        rows = [self.read(start, seq + 1) for start in self.positions(index, batch=batch, seq=seq, seed=seed)]
        tokens = torch.from_numpy(np.frombuffer(b"".join(rows), dtype=np.uint8).astype(np.int64))
        tokens = tokens.view(batch, seq + 1)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def positions(self, index: int, *, batch: int, seq: int, seed: int) -> list[int]:
        """Return the start of each row of batch ``index``. Raise ConfigError if the corpus is too short."""
        num_starts = self.nbytes - seq
        if num_starts < 1:
            raise ConfigError(
                f"{self.source} has {self.nbytes:,} bytes; sequences of {seq} need at least "
                f"{seq + 1}: give more --data or a shorter --seq"
            )
        # Raw Philox words are stable across NumPy versions; Generator's distributions need not be.
        words = np.random.Philox(key=[seed % 2**64, index]).random_raw(batch)
        return [int(word) % num_starts for word in words]


def _pieces_of(path: Path) -> list[Piece]:
    """Return the pieces of a file or a directory."""
    try:
        if path.is_dir():
            return list(_directory_pieces(path))
        if path.is_file():
            nbytes = path.stat().st_size
            _read_exactly(path, 0, min(nbytes, 1))  # refuse an unreadable file now, not at step 1
            return [Piece(path, path.name, nbytes)] if nbytes else []
    except OSError as error:
        raise ConfigError(f"cannot read --data {path}: {why_unread(error)}") from error
    problem = "is not a regular file or a directory" if path.exists() else "does not exist"
    raise ConfigError(f"--data {path} {problem}; give a text file or a directory of text files")


def _directory_pieces(root: Path) -> Iterator[Piece]:
    """Yield the non-empty text files under ``root``, sorted by name."""
    inside = Path(os.path.realpath(root))
    for path in _walk(root, skipped=frozenset({"__pycache__"})):
        require_inside(path, inside)
        nbytes = path.stat().st_size
        if nbytes and b"\0" not in _read_exactly(path, 0, min(nbytes, _PROBE_BYTES)):
            yield Piece(path, path.relative_to(root).as_posix(), nbytes)


def _stdlib_pieces() -> list[Piece]:
    """Return the source files of the standard library in sorted order, at most 32 MiB."""
    root = Path(sysconfig.get_paths()["stdlib"])
    pieces: list[Piece] = []
    room = _STDLIB_CAP_BYTES
    for path in _walk(root, skipped=frozenset(_STDLIB_SKIPPED)):
        nbytes = min(path.stat().st_size, room) if path.suffix == ".py" else 0
        if nbytes:
            pieces.append(Piece(path, path.relative_to(root).as_posix(), nbytes))
            room -= nbytes
    return pieces


def _walk(root: Path, *, skipped: frozenset[str]) -> Iterator[Path]:
    """Yield the regular files under ``root`` in an order that does not depend on the file system."""
    for folder, folders, files in os.walk(root, onerror=_refuse):
        folders[:] = sorted(name for name in folders if name not in skipped and not name.startswith("."))
        for name in sorted(files):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _refuse(error: OSError) -> None:
    """Raise for a folder that cannot be listed; ``os.walk`` would skip it silently."""
    raise error


def _read_exactly(path: Path, offset: int, nbytes: int) -> bytes:
    """Return exactly ``nbytes`` bytes of ``path`` from ``offset``. Raise IoError otherwise."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(nbytes)
    except OSError as error:
        raise IoError(error.errno or 0, error.strerror or str(error), str(path), offset) from error
    if len(data) != nbytes:
        raise IoError(
            errno.EIO, f"read {len(data)} of {nbytes} bytes: the file became shorter", str(path), offset
        )
    return data
