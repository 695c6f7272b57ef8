"""What there is to learn from: documents out of files of records and of text, one after the other, as tokens
in a file; and the rows that each step learns from.

Which rows a step has is a pure function of ``(tokens, seed, step)``, so a resumed run sees exactly the rows
that an uninterrupted one would have seen.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gemini.errors import ConfigError, InputError, printable
from gemini.system.files import io_errors, open_regular
from gemini.system.input_files import require_inside, why_unread
from gemini.system.parsing import SyntaxProblem, parse_record, parse_records

IGNORED = -100  # a label that no loss looks at

Batch = dict[str, Tensor]
"""``input_ids`` and ``labels``, int64 ``[batch, seq]``; where rows are filled up also ``attention_mask``."""


class Samples:
    """Rows of ``seq`` tokens. With ``pad`` each document is a row of its own, cut or filled up to ``seq``;
    without, all are put together and cut into rows, the last tokens left out.

    Tokens are in a file without a name in ``directory`` (None: the system's place for temporary files),
    which goes with the process: memory does not grow with the data.

    Raises:
        ConfigError: there is not one row.
        IoError: the file cannot be written.
    """

    def __init__(
        self, documents: Iterable[list[int]], *, seq: int, pad: int | None, directory: Path | None
    ) -> None:
        self.seq = seq
        self._pad = pad
        digest, ends = hashlib.sha256(), [0]
        place = str(directory or tempfile.gettempdir())
        with io_errors("set the tokens aside", place):
            self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - mapped for as long as it is used
            for tokens in documents:
                kept = tokens if pad is None else tokens[:seq]
                if not kept or (pad is not None and len(kept) < 2):  # nothing follows on the first
                    continue
                data = np.asarray(kept, dtype="<i4").tobytes()
                digest.update(len(kept).to_bytes(8, "little") + data)
                self._file.write(data)
                ends.append(ends[-1] + len(kept))
            self._file.flush()
        self.num_tokens = ends[-1]
        self._ends: npt.NDArray[np.int64] = np.asarray(ends, dtype=np.int64)
        self.num_rows = len(ends) - 1 if pad is not None else self.num_tokens // seq
        self.fingerprint = digest.hexdigest()[:16]
        if not self.num_rows:
            raise ConfigError(
                f"--data has {self.num_tokens} tokens and a row takes {seq if pad is None else 2}: give more "
                "data" + (", or a shorter --seq" if pad is None else "")
            )
        self._tokens: npt.NDArray[np.int32] = np.memmap(self._file, dtype="<i4", mode="r")

    def rows(self, numbers: Iterable[int]) -> Batch:
        """Return these rows as one batch."""
        ids, labels = zip(*(self._row(number) for number in numbers), strict=True)
        labelled = torch.from_numpy(np.stack(labels))
        batch = {"input_ids": torch.from_numpy(np.stack(ids)), "labels": labelled}
        return batch if self._pad is None else {**batch, "attention_mask": (labelled != IGNORED).long()}

    def _row(self, number: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        if self._pad is None:
            row = self._tokens[number * self.seq : (number + 1) * self.seq].astype(np.int64)
            return row, row
        tokens = self._tokens[self._ends[number] : self._ends[number + 1]].astype(np.int64)
        ids = np.full(self.seq, self._pad, dtype=np.int64)
        labels = np.full(self.seq, IGNORED, dtype=np.int64)
        ids[: len(tokens)] = labels[: len(tokens)] = tokens
        return ids, labels


class Order:
    """Which rows are learned from and which are held out; each epoch shuffles the former anew."""

    def __init__(self, num_rows: int, *, eval_share: float, seed: int) -> None:
        self._seed = seed
        shuffled = _shuffled(num_rows, seed, 0)
        held = max(1, round(eval_share * num_rows)) if eval_share else 0
        if held >= num_rows:
            raise ConfigError(
                f"--eval-share {eval_share:g} holds out {held} of {num_rows} rows and leaves none to learn "
                "from; give more --data, a shorter --seq or a smaller share"
            )
        self.held_out = np.sort(shuffled[:held])
        self.learned = np.sort(shuffled[held:])
        self._epoch = -1
        self._order = self.learned

    def __getitem__(self, index: int) -> int:
        """Return the row that is the ``index``-th to be learned from, over all epochs."""
        epoch, place = divmod(index, len(self.learned))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = self.learned[_shuffled(len(self.learned), self._seed, epoch + 1)]
        return int(self._order[place])


def num_learned(batch: Batch) -> int:
    """Return how many tokens of a batch a loss is made of: all with a label but the first of each row."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


def _shuffled(count: int, seed: int, stream: int) -> npt.NDArray[np.int64]:
    # Raw Philox words are stable across NumPy versions; Generator's shuffle need not be.
    words = np.random.Philox(key=[seed % 2**64, stream]).random_raw(count)
    return np.argsort(words, kind="stable").astype(np.int64)


_LINES = (".jsonl", ".ndjson")  # a record in each line
_LIST = ".json"  # a list of records, or one after the other
_ROLES = "each needs a role and a content, both text"


@dataclass(frozen=True)
class Document:
    """A text, or the messages of a conversation. ``place`` names it in messages."""

    place: str
    text: str | None = None
    messages: list[dict[str, Any]] | None = None


def data_files(data: str) -> list[Path]:
    """Return the files that ``--data`` names: itself, or those of a directory, hidden ones left out, in an
    order that does not depend on the file system.

    Raises:
        InputError: there are none, or one is a link out of the directory.
    """
    path = Path(data)
    try:
        files = _files_below(path) if path.is_dir() else [path] if path.is_file() else []
    except OSError as error:
        raise InputError(f"cannot read --data {path}: {why_unread(error)}") from error
    if not files:
        problem = "has no files" if os.path.lexists(path) else "does not exist"
        raise InputError(
            f"--data {path} {problem}; give a .jsonl, .json or text file, or a directory of them"
        )
    return files


def _files_below(root: Path) -> list[Path]:
    inside = Path(os.path.realpath(root))
    files = []
    for each in root.rglob("*"):
        if not each.is_file() or any(part.startswith(".") for part in each.relative_to(root).parts):
            continue
        require_inside(each, inside)
        files.append(each)
    return sorted(files)


def documents(files: list[Path]) -> Iterator[Document]:
    """Yield the documents of all files: the records of jsonl and json, each other file as a whole.

    Raises:
        InputError: a file cannot be read, or a record has neither text nor messages.
    """
    for file in files:
        kind = file.suffix.lower()
        try:
            encoding = "utf-8-sig" if kind in (*_LINES, _LIST) else "utf-8"
            with os.fdopen(open_regular(file), encoding=encoding) as text:
                if kind in _LINES:
                    yield from _of_lines(file, text)
                elif kind == _LIST:
                    yield from _of_list(file, text.read())
                else:
                    yield Document(str(file), text=text.read())
        except OSError as error:
            raise InputError(f"cannot read --data {file}: {why_unread(error)}") from error
        except UnicodeDecodeError as error:
            raise InputError(
                f"--data {file} is no text in UTF-8 ({error.reason} at byte {error.start}); convert it, "
                "or leave it out"
            ) from error


def _of_lines(file: Path, lines: Iterable[str]) -> Iterator[Document]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            place = printable(f"line {number} of {file}")
            try:
                record = parse_record(line)
            except SyntaxProblem as problem:
                raise InputError(f"{place} is no JSON: {problem.reason}; correct or remove it") from problem
            yield _of_record(place, record)


def _of_list(file: Path, text: str) -> Iterator[Document]:
    try:
        for number, record in parse_records(text):
            yield _of_record(printable(f"line {number} of {file}"), record)
    except SyntaxProblem as problem:
        raise InputError(
            f"{problem.of(str(file), 'JSON')}; correct it, or name a file of plain text .txt"
        ) from problem


def _of_record(place: str, record: Any) -> Document:
    if not isinstance(record, dict):
        raise InputError(f'{place} is no JSON object; write {{"text": ...}} or {{"messages": [...]}}')
    text, messages = record.get("text"), record.get("messages")
    if isinstance(text, str) and messages is None:
        return Document(place, text=text)
    if isinstance(messages, list) and text is None:
        for message in messages:
            if not isinstance(message, dict) or not all(
                isinstance(message.get(key), str) for key in ("role", "content")
            ):
                raise InputError(f"{place} has the message {message!r:.100}; {_ROLES}")
        if messages:
            return Document(place, messages=messages)
    raise InputError(
        f"{place} needs either a text or a list of messages; it has "
        f"{', '.join(map(repr, record)) or 'nothing':.300}: rename the one that holds the text, "
        'as in {"text": ...} or {"messages": [{"role": "user", "content": ...}]}'
    )
