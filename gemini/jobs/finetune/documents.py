"""What there is to learn from: documents out of jsonl and text files, one after the other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemini.errors import ConfigError

_JSONL = (".jsonl", ".ndjson")
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
        ConfigError: there are none.
    """
    path = Path(data)
    try:
        if path.is_dir():
            files = sorted(
                each
                for each in path.rglob("*")
                if each.is_file() and not any(part.startswith(".") for part in each.relative_to(path).parts)
            )
        else:
            files = [path] if path.is_file() else []
    except OSError as error:
        raise ConfigError(f"cannot read --data {path}: {error.strerror}") from error
    if not files:
        problem = "has no files" if path.exists() else "does not exist"
        raise ConfigError(f"--data {path} {problem}; give a .jsonl or text file, or a directory of them")
    return files


def documents(files: list[Path]) -> Iterator[Document]:
    """Yield the documents of all files: one per line of jsonl, each other file as a whole.

    Raises:
        ConfigError: a file cannot be read, or a line has neither text nor messages.
    """
    for file in files:
        try:
            if file.suffix in _JSONL:
                with file.open(encoding="utf-8") as lines:
                    for number, line in enumerate(lines, 1):
                        if line.strip():
                            yield _of_line(f"line {number} of {file}", line)
            else:
                yield Document(str(file), text=file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read --data {file}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"--data {file} is no text in UTF-8 ({error.reason} at byte {error.start}); convert it, or "
                "leave it out"
            ) from error


def _of_line(place: str, line: str) -> Document:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place} is no JSON: {error}; correct or remove it") from error
    if not isinstance(record, dict):
        raise ConfigError(f'{place} is no JSON object; write {{"text": ...}} or {{"messages": [...]}}')
    text, messages = record.get("text"), record.get("messages")
    if isinstance(text, str) and messages is None:
        return Document(place, text=text)
    if isinstance(messages, list) and text is None:
        for message in messages:
            if not isinstance(message, dict) or not all(
                isinstance(message.get(key), str) for key in ("role", "content")
            ):
                raise ConfigError(f"{place} has the message {message!r:.100}; {_ROLES}")
        if messages:
            return Document(place, messages=messages)
    raise ConfigError(
        f"{place} needs either a text or a list of messages; it has "
        f"{', '.join(map(repr, record)) or 'nothing'}: rename the one that holds the text, "
        'as in {"text": ...} or {"messages": [{"role": "user", "content": ...}]}'
    )
