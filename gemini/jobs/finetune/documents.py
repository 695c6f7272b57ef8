"""What there is to learn from: documents out of files of records and of text, one after the other."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemini.errors import InputError, printable
from gemini.system.files import open_regular
from gemini.system.input_files import require_inside
from gemini.system.parsing import SyntaxProblem, parse_record, parse_records

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
        raise InputError(f"cannot read --data {path}: {error.strerror}") from error
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
            raise InputError(f"cannot read --data {file}: {error.strerror or error}") from error
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
