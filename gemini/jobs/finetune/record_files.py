"""Reads files of records one record at a time: JSON lines and lists, CSV, parquet, Arrow and plain text.

At most one record of a file is in memory (a few rows of a columnar file), and a record has at most
:data:`MAX_RECORD_BYTES`. Every problem is a one-line :class:`InputError` that names the file and the line.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from gemini.errors import ConfigError, InputError, in_words, printable
from gemini.system.files import open_regular
from gemini.system.input_files import AGAIN, errors_of, require_inside, why_unread
from gemini.system.parsing import SyntaxProblem, parse_record

MAX_RECORD_BYTES = 2**26
_CHUNK = 2**20
_LINES = (".jsonl", ".ndjson")  # a record in each line
_LIST = ".json"  # a list of records, or records one after another
_TABLES = {".csv": ",", ".tsv": "\t"}
_COLUMNS = (".parquet", ".arrow")
_RECORDS = (*_LINES, _LIST, *_TABLES, *_COLUMNS)
_JSON_LINES = "JSON lines"
_FORMATS = {_LIST: "JSON", ".csv": "CSV", ".tsv": "TSV", ".parquet": "parquet", ".arrow": "Arrow"}
_BLANKS = re.compile(r"[ \t\r\n]*")
_ROWS_AT_ONCE = 64
_WILDCARDS = "*?["
# Files that are no records in a copy of a hub's data set.
_ABOUT = ("readme", "license", "dataset_info", "dataset_dict", "state.json", "dataset_infos", "croissant")
# Words in names of files and directories that say which split of a data set they hold, as on hubs.
_SPLIT = re.compile(
    r"(?<![a-z])(train|training|validation|valid|val|dev|test|testing|eval|evaluation)(?![a-z])"
)
_LEARNED = ("train", "training")
_KINDS_OF_BYTES = {
    b"PAR1": "parquet; name it .parquet",
    b"ARROW1": "Arrow; name it .arrow",
    b"\x1f\x8b": "gzip; add the ending of its contents, such as .jsonl.gz",
    b"\x28\xb5\x2f\xfd": "Zstandard; unpack it (unzstd)",
    b"PK\x03\x04": "a zip archive or a spreadsheet; unpack it, or save the sheet as .csv",
    b"\xfd7zXZ": "xz; unpack it (unxz)",
    b"SQLite": "a database; export its table as .csv",
    b"%PDF": "a PDF; extract its text (pdftotext)",
}
_NEEDED = "line {} of {}"


@dataclass(frozen=True)
class Record:
    """A value in a file of records, or the text of a whole file. ``place`` names it in messages."""

    place: str
    value: Any
    is_file: bool = False


@dataclass(frozen=True)
class DataFiles:
    """The data files that ``option`` names. ``left_out``: files of its directory that only describe the
    data, or hold another split.
    """

    files: tuple[Path, ...]
    left_out: tuple[Path, ...] = ()
    option: str = "--data"


def find_data(data: str, option: str = "--data") -> DataFiles:
    """Return the files that ``option`` names: a file, a pattern of names (``train-*.parquet``), or a
    directory with everything below it except hidden files. The order does not depend on the file system.

    Of a directory with several splits (``train.jsonl`` and ``test.jsonl``), ``--data`` leaves out those for
    validation and tests, and other options leave out that for training.

    Raises:
        InputError: there are none, or one is a link out of the directory.
    """
    path = Path(data)
    try:
        if path.is_dir():
            files, inside = sorted(path.rglob("*")), path
        elif path.is_file():
            return DataFiles((path,), option=option)
        else:
            is_pattern = any(sign in data for sign in _WILDCARDS)
            base = Path(path.anchor or ".")
            files, inside = sorted(base.glob(str(path.relative_to(path.anchor))) if is_pattern else []), base
        files = [each for each in files if each.is_file() and not _is_hidden(each, path)]
        for each in files:
            if path.is_dir():
                require_inside(each, Path(os.path.realpath(inside)))
    except (OSError, ValueError) as error:
        reason = why_unread(error) if isinstance(error, OSError) else f"{error}; check the path"
        raise InputError(f"cannot read {option} {path}: {reason}") from error
    if not files:
        is_there, is_pattern = os.path.lexists(path), any(sign in data for sign in _WILDCARDS)
        problem = "has no files" if is_there else "matches no file" if is_pattern else "does not exist"
        raise InputError(
            f"{option} {path} {problem}; give a file (.jsonl, .json, .csv, .parquet or text), a directory of "
            "them, or a pattern in quotes, as in 'data/train-*.parquet'"
        )
    if not any(_suffix(each) in _RECORDS and not _is_about(each) for each in files):
        return DataFiles(tuple(files), option=option)
    others = set(filter(_is_about, files))
    if path.is_dir():
        others |= _other_splits([each for each in files if each not in others], path, option)
    records = tuple(each for each in files if each not in others)
    return DataFiles(records, tuple(each for each in files if each in others), option)


def _other_splits(files: list[Path], directory: Path, option: str) -> set[Path]:
    """Return those of ``files`` that hold a split of another use than that of ``option``."""
    found = {each: _SPLIT.findall(str(each.relative_to(directory)).lower()) for each in files}
    split = {each: words[-1] in _LEARNED for each, words in found.items() if words}
    if len(set(split.values())) < 2:
        return set()
    return {each for each, is_learned in split.items() if is_learned != (option == "--data")}


@dataclass(frozen=True)
class _Source:
    """A file and the option that names it."""

    path: Path
    option: str

    def __str__(self) -> str:
        return f"{self.option} {self.path}"


def format_of(path: Path, *, as_lines: bool) -> str:
    """Return the name of the format in which :func:`read_records` reads a file; "" for plain text."""
    suffix = _suffix(path)
    is_lines = suffix in _LINES or (as_lines and suffix not in _RECORDS)
    return _JSON_LINES if is_lines else _FORMATS.get(suffix, "")


def read_records(
    path: Path, *, as_lines: bool = False, is_text: bool = False, option: str = "--data"
) -> Iterator[Record]:
    """Yield the records of a file that ``option`` names, in order.

    A file with an unknown ending is one text. With ``as_lines`` it is read as JSON lines. With ``is_text`` it
    is not refused if it looks like JSON.

    Raises:
        InputError: the file cannot be read, or changes while it is read.
        ConfigError: the package that reads it is not installed.
    """
    suffix = _suffix(path)
    if format_of(path, as_lines=as_lines) == _JSON_LINES:
        read: Callable[[_Source, BinaryIO], Iterator[Record]] = _json_lines
    elif suffix == _LIST:
        read = _json_list
    elif suffix in _TABLES:
        read = _table
    elif suffix in _COLUMNS:
        read = _columns
    else:
        read = _text if is_text else _text_of_no_records
    place, source = "its beginning", _Source(path, option)
    try:
        descriptor = open_regular(path)
        with os.fdopen(descriptor, "rb") as file:
            before = _version(file, path)
            try:
                for record in read(source, _unpacked(path, file)):
                    place = record.place
                    yield record
            except InputError as error:
                if _version(file, path) != before:
                    raise _changed(source, place) from error
                raise
            if _version(file, path) != before:
                raise _changed(source, place)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"cannot read {source} after {place}: {in_words(error)}; {AGAIN}") from error
    except OSError as error:
        raise InputError(f"cannot read {source}: {why_unread(error)}") from error


def _changed(source: _Source, place: str) -> InputError:
    return InputError(
        f"{source} changed while it was read, after {place}; wait until it is complete, then run again"
    )


def _version(file: BinaryIO, path: Path) -> tuple[int, ...]:
    """Return a key that changes if the file is written to or replaced."""
    found: list[int] = []
    for stat in (os.fstat(file.fileno()), path.stat()):
        found += (stat.st_ino, stat.st_size, stat.st_mtime_ns)
    return tuple(found)


def _suffix(path: Path) -> str:
    name = path.name.lower().removesuffix(".gz")
    return Path(name).suffix


def _unpacked(path: Path, file: BinaryIO) -> BinaryIO:
    return cast(BinaryIO, gzip.GzipFile(fileobj=file)) if path.name.lower().endswith(".gz") else file


def _is_hidden(path: Path, root: Path) -> bool:
    names = path.relative_to(root).parts if path.is_relative_to(root) else (path.name,)
    return any(name.startswith(".") for name in names)


def _is_about(path: Path) -> bool:
    return path.name.lower().startswith(_ABOUT)


def _lines_of(path: Path, file: BinaryIO, first: int = 1) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file with their numbers. A line may have at most the size of a record."""
    for number in itertools.count(first):
        line = file.readline(MAX_RECORD_BYTES + 1)
        if not line:
            return
        if len(line) > MAX_RECORD_BYTES:
            raise _too_large(_NEEDED.format(number, path))
        yield number, _decoded(line, _NEEDED.format(number, path), is_first=number == 1)


def _decoded(data: bytes, place: str, *, is_first: bool) -> str:
    try:
        return data.decode("utf-8-sig" if is_first else "utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{printable(place)} is not UTF-8 text ({error.reason} at byte {error.start}); convert "
            "the file (iconv), or leave it out"
        ) from error


def _too_large(place: str) -> InputError:
    return InputError(
        f"{printable(place)} has more than {MAX_RECORD_BYTES >> 20} MiB, the maximum for one record; "
        "split it into several"
    )


def _json_lines(source: _Source, file: BinaryIO) -> Iterator[Record]:
    for number, line in _lines_of(source.path, file):
        if line.strip():
            place = printable(_NEEDED.format(number, source.path))
            try:
                yield Record(place, parse_record(line))
            except SyntaxProblem as problem:
                raise InputError(
                    f"{place} is not valid JSON: {problem.reason}; correct or remove it"
                ) from problem


def _json_list(source: _Source, file: BinaryIO) -> Iterator[Record]:
    text = io.TextIOWrapper(file, "utf-8-sig", newline="")
    reader = _JsonReader(text, source.path)
    try:
        for number, value in reader.values():
            yield Record(printable(_NEEDED.format(number, source.path)), value)
    except SyntaxProblem as problem:
        raise InputError(
            f"{problem.of(printable(str(source.path)), 'JSON')}; correct it, or name a file of plain text "
            ".txt"
        ) from problem
    except UnicodeDecodeError as error:
        raise InputError(
            f"{printable(str(source))} is not UTF-8 text ({error.reason}, after line {reader.line}); "
            "convert it, or leave it out"
        ) from error
    finally:
        text.detach()  # otherwise it would close the file, which the caller still checks for changes


class _JsonReader:
    """Reads the values of a JSON list, or values one after another. One value is in memory at a time."""

    def __init__(self, text: io.TextIOWrapper, path: Path) -> None:
        self.line = 1
        self._text = text
        self._path = path
        self._buffer = ""
        self._at = 0
        self._ended = False
        self._decoder = json.JSONDecoder()

    def values(self) -> Iterator[tuple[int, Any]]:
        """Yield (first line, value) for each value. Raises SyntaxProblem."""
        is_list = self._next() == "["
        self._at += is_list
        for number in itertools.count():
            found = self._next()
            if not found:
                if is_list:
                    raise SyntaxProblem("the list does not end", self.line)
                return
            if is_list and found == "]":
                self._at += 1
                if self._next():
                    raise SyntaxProblem("something follows the list", self.line)
                return
            if is_list and number:
                if found != ",":
                    raise SyntaxProblem("expecting ',' or ']'", self.line)
                self._at += 1
                self._next()
            yield self._value()

    def _next(self) -> str:
        """Skip blanks, and return the next character without consuming it; "" at the end."""
        while True:
            blanks = _BLANKS.match(self._buffer, self._at)
            assert blanks is not None
            self.line += blanks[0].count("\n")
            self._at = blanks.end()
            if self._at < len(self._buffer) or not self._fill():
                return self._buffer[self._at : self._at + 1]

    def _fill(self) -> bool:
        # Double the buffer: a record that needs many reads is then parsed only a few times.
        more = self._text.read(max(_CHUNK, len(self._buffer) - self._at))
        self._buffer, self._at = self._buffer[self._at :] + more, 0
        self._ended = not more
        return bool(more)

    def _value(self) -> tuple[int, Any]:
        while True:
            problem: SyntaxProblem | None = None
            end = 0
            try:
                end = self._decoder.raw_decode(self._buffer, self._at)[1]
            except json.JSONDecodeError as error:
                begun = self.line + self._buffer.count("\n", self._at, error.pos)
                problem = SyntaxProblem(error.msg, begun)
                is_cut = error.pos >= len(self._buffer) - 16 or error.msg.startswith("Unterminated")
                if self._ended or not is_cut:
                    raise problem from None
            except RecursionError:
                raise SyntaxProblem("it is nested too deeply", self.line) from None
            except ValueError:
                raise SyntaxProblem("a number has too many digits", self.line) from None
            if problem is None and (self._ended or end < len(self._buffer)):
                break
            if len(self._buffer) - self._at > MAX_RECORD_BYTES:
                raise _too_large(_NEEDED.format(self.line, self._path))
            self._fill()
        text, line = self._buffer[self._at : end], self.line
        try:
            value = parse_record(text)
        except SyntaxProblem as inner:
            raise SyntaxProblem(inner.reason, line - 1 + (inner.line or 1)) from None
        self.line += text.count("\n")
        self._at = end
        return line, value


def _table(source: _Source, file: BinaryIO) -> Iterator[Record]:
    """Yield the rows of a CSV file as dicts with the names of its first line."""
    lines = _TableLines(source.path, file)
    delimiter = _TABLES[_suffix(source.path)]
    if delimiter == "," and "," not in lines.header and ";" in lines.header:
        delimiter = ";"
    limit = csv.field_size_limit(MAX_RECORD_BYTES)
    try:
        rows = csv.reader(lines, delimiter=delimiter, strict=True)
        names = next(rows, [])
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise InputError(
                f"line 1 of {printable(str(source.path))} names the column {twice[0]!r} twice; rename one"
            )
        while True:
            place = printable(_NEEDED.format(lines.begin_row(), source.path))
            row = next(rows, None)
            if row is None:
                return
            if not row:
                continue
            if len(row) != len(names):
                raise InputError(
                    f"{place} has {len(row)} values, and the first line names {len(names)} columns; put "
                    'values with a comma in quotes ("...")'
                )
            yield Record(place, dict(zip(names, row, strict=True)))
    except csv.Error as error:
        raise InputError(
            f"{printable(_NEEDED.format(lines.begun, source.path))} is not valid CSV: {error}; "
            "correct its quotes"
        ) from error
    finally:
        csv.field_size_limit(limit)


class _TableLines:
    """The lines of a table, for a reader that takes several lines per row. A row may have at most the size of
    a record."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.begun = 1
        self._path = path
        self._lines = _lines_of(path, file)
        self.header = next(self._lines, (1, ""))[1]
        self._last = 1
        self._size = 0
        self._is_first = True

    def begin_row(self) -> int:
        """Return the number of the line in which the next row begins."""
        self.begun, self._size = self._last + 1, 0
        return self.begun

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self._is_first:
            self._is_first = False
            return self.header
        self._last, line = next(self._lines)
        self._size += len(line)
        if self._size > MAX_RECORD_BYTES:  # probably an unclosed quote
            raise _too_large(_NEEDED.format(self.begun, self._path))
        return line


def _columns(source: _Source, file: BinaryIO) -> Iterator[Record]:
    """Yield the rows of a columnar file (parquet or Arrow), reading a few at a time."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(
            f"reading {source} needs the package pyarrow: pip install 'gemini-runtime[data]' ({error}); or "
            "save the records as JSON lines"
        ) from error
    number = 0
    with _errors_after(source, number):
        if _suffix(source.path) == ".parquet":
            batches = parquet.ParquetFile(file, buffer_size=_CHUNK).iter_batches(_ROWS_AT_ONCE)
        else:
            is_file = file.read(6) == b"ARROW1"
            file.seek(0)
            ipc = pyarrow.ipc
            opened = ipc.open_file(file) if is_file else ipc.open_stream(file)
            batches = (
                (opened.get_batch(at) for at in range(opened.num_record_batches)) if is_file else iter(opened)
            )
    while True:
        with _errors_after(source, number):
            batch = next(batches, None)
            if batch is None:
                return
            parts = [batch.slice(at, _ROWS_AT_ONCE) for at in range(0, batch.num_rows, _ROWS_AT_ONCE)]
        for part in parts:
            with _errors_after(source, number):
                rows = part.to_pylist()
            for row in rows:
                number += 1
                yield Record(printable(f"row {number} of {source.path}"), row)


@contextmanager
def _errors_after(source: _Source, number: int) -> Iterator[None]:
    with errors_of(printable(f"cannot read {source} after row {number}"), way_out=AGAIN):
        yield


def _text(source: _Source, file: BinaryIO) -> Iterator[Record]:
    data = file.read(MAX_RECORD_BYTES + 1)
    for mark, kind in _KINDS_OF_BYTES.items():
        if data.startswith(mark):
            raise InputError(f"{source} seems to be {kind}")
    if len(data) > MAX_RECORD_BYTES:
        line = data.count(b"\n") + 1
        raise InputError(
            f"{source} has more than {MAX_RECORD_BYTES >> 20} MiB up to line {line}, the maximum for "
            "a text file, which is one document; split it (split -C 32M), or write .jsonl"
        )
    yield Record(printable(str(source.path)), _decoded(data, str(source), is_first=False), is_file=True)


def _text_of_no_records(source: _Source, file: BinaryIO) -> Iterator[Record]:
    for record in _text(source, file):
        begin = record.value.lstrip("\ufeff \t\r\n")
        if begin.startswith(("{", "[")):
            with_key = _first_value(begin)
            if with_key is not None:
                raise InputError(
                    f"{source} seems to hold JSON records ({', '.join(map(repr, with_key)):.100}); name "
                    "it .jsonl (one in each line) or .json, or give --data-format text to train on it as it "
                    "is"
                )
        yield record


def _first_value(text: str) -> dict[str, Any] | None:
    """Return the JSON object at the beginning of a text; None if there is none."""
    try:
        value = json.JSONDecoder().raw_decode(text.lstrip("[ \t\r\n"))[0]
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and value else None
