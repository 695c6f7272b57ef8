"""Reads files, directories and programs from other people.

It accepts only regular files, which never block; in a directory only files inside it; and documents of
limited size and depth. Every problem is an :class:`InputError` with a one-line message that names the file
and, if known, the line.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from gemini.errors import GeminiError, InputError, in_words, printable
from gemini.system.config import format_bytes
from gemini.system.files import open_regular, read_regular
from gemini.system.parsing import SyntaxProblem, parse_json_input, parse_toml, parse_yaml

MAX_DOCUMENT_BYTES = 2**20  # for documents that people write
MAX_INDEX_BYTES = 2**26  # enough for an index of a million tensors
AGAIN = "copy or download the file again"
_AS_OWNER = "read it as its owner, or have its permissions changed"
_PARSERS: dict[str, tuple[Callable[[bytes], Any], str]] = {
    ".json": (parse_json_input, "JSON"),
    ".toml": (parse_toml, "TOML"),
    ".yaml": (parse_yaml, "YAML"),
    ".yml": (parse_yaml, "YAML"),
}
_PACKAGES = {"YAML": "reading {} needs pip install pyyaml", "TOML": "reading {} needs pip install tomli"}
_SNAPSHOTS, _BLOBS = "snapshots", "blobs"  # in Hugging Face's cache, files of a snapshot link to blobs


def why_unread(error: OSError) -> str:
    """Return why a user's file or directory cannot be read, and what to do."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP):
        way_out = "check the path"
    elif error.errno in (errno.EACCES, errno.EPERM):
        way_out = _AS_OWNER
    elif error.errno in (errno.EISDIR, errno.EINVAL, errno.EFBIG):
        way_out = "name another file"
    else:
        way_out = AGAIN
    return f"{error.strerror or error}; {way_out}"


@contextmanager
def errors_of(doing: str, *, way_out: str = "") -> Iterator[None]:
    """Turn any error of another library on a user's files into an InputError: ``doing``, and the error in
    words. A GeminiError is passed on.
    """
    try:
        yield
    except GeminiError:
        raise
    except Exception as error:  # other libraries may raise anything
        raise _said(doing, error, way_out) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # raised by libraries in Rust
            raise
        raise _said(doing, error, way_out) from error


def _said(doing: str, error: BaseException, way_out: str) -> InputError:
    return InputError(f"{doing}: {in_words(error)}{way_out and f'; {way_out}'}")


@contextmanager
def seconds_in(filename: str, most: float, refusal: Exception) -> Iterator[None]:
    """Limit the CPU time of code that was compiled as ``filename``: its first line that starts after ``most``
    seconds of this thread's CPU time raises ``refusal``. CPU time does not grow on a busy machine. Other
    tracers of this thread, such as debuggers, are off within the block.
    """
    end = time.thread_time() + most

    def check(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and time.thread_time() > end:
            raise refusal
        return check

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        return check if frame.f_code.co_filename == filename else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)


def read_document(path: Path, what: str, *, max_bytes: int = MAX_DOCUMENT_BYTES, kind: str = "") -> Any:
    """Return the contents of a document, parsed by its file name extension or as ``kind`` (``".json"``).

    Raises:
        InputError: it is not a regular file, cannot be read, is larger than ``max_bytes``, or has a syntax
            error. ``what`` it is, such as ``"the recipe"``, precedes the path in the message.
    """
    parse, language = _PARSERS[kind or path.suffix]
    where = printable(f"{what} {path}")
    try:
        return parse(read_regular(path, max_bytes))
    except OSError as error:
        raise InputError(f"cannot read {where}: {why_unread(error)}") from error
    except SyntaxProblem as problem:
        raise InputError(problem.of(where, language)) from problem
    except ValueError as error:  # the path is invalid
        raise InputError(f"cannot read {where}: {error}; check the path") from error
    except ImportError as error:
        raise InputError(f"{_PACKAGES[language].format(where)}; or write it in another language") from error


def require_inside(path: Path, *roots: Path) -> None:
    """Raise InputError if ``path`` is a link that leads outside all ``roots``, which must not contain links.
    Raises OSError if it is a broken link.
    """
    if not path.is_symlink():
        return
    target = Path(os.path.realpath(path, strict=True))
    if not any(target.is_relative_to(root) for root in roots):
        raise InputError(f"{path} is a link out of its directory, to {target}; copy the file there instead")


class InputDirectory:
    """A directory from other people. Its files must be regular and inside it; in a snapshot of Hugging Face's
    cache they may be links to the blobs of the same model.

    Raises:
        InputError: the directory does not exist or cannot be listed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._root = Path(os.path.realpath(path, strict=True))
            self.names = sorted(each.name for each in self._root.iterdir())
        except (OSError, ValueError) as error:
            reason = why_unread(error) if isinstance(error, OSError) else f"{error}; check the path"
            raise InputError(f"cannot look into the directory {path}: {reason}") from error
        self._roots = [self._root]
        if self._root.parent.name == _SNAPSHOTS:
            self._roots.append(self._root.parent.parent / _BLOBS)

    def __contains__(self, name: str) -> bool:
        """Return whether there is an entry with this name, of any kind."""
        return os.path.lexists(self._root / name)

    def file(self, name: str) -> Path:
        """Return the path of a file that may be read.

        Raises:
            InputError: it does not exist, is not a regular file, or lies outside the directory.
        """
        self.require_name(name)
        self.check(name)
        return self.path / name

    def require_name(self, name: object) -> None:
        """Raise InputError unless ``name`` is a valid name of a file in the directory, existing or not."""
        if not _is_plain(name):
            raise InputError(f"{self.path}: {name!r:.200} is not the name of a file in it")

    def check(self, name: str, max_bytes: int | None = None) -> None:
        """Check that the entry may be read and has at most ``max_bytes``. Raises like :meth:`file`."""
        path = self.path / name
        try:
            require_inside(path, *self._roots)
            descriptor = open_regular(path)
            size = os.fstat(descriptor).st_size
            os.close(descriptor)
            if max_bytes is not None and size > max_bytes:
                raise OSError(errno.EFBIG, f"it has {size:,} bytes, more than {format_bytes(max_bytes)}")
        except OSError as error:
            way_out = _AS_OWNER if isinstance(error, PermissionError) else AGAIN
            raise InputError(f"cannot read {path}: {error.strerror or error}; {way_out}") from error

    def json(self, name: str, max_bytes: int) -> dict[str, Any]:
        """Return the object in a JSON file. Raises like :meth:`file`, and if the file is not a
        JSON object.
        """
        path = self.file(name)
        try:
            found = read_document(path, "the file", max_bytes=max_bytes, kind=".json")
        except InputError as error:
            if isinstance(error.__cause__, OSError):
                raise
            raise InputError(f"{error}; {AGAIN}") from error
        if not isinstance(found, dict):
            raise InputError(f"{path} is a {type(found).__name__}, not an object with keys; {AGAIN}")
        return found


def files_of(index: Mapping[str, Any], directory: InputDirectory, name: str) -> dict[str, str]:
    """Return {tensor name: file name} from ``index``, which was read from the file ``name``. Raises
    InputError if the index is malformed or has an invalid file name.
    """
    named = index.get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
        raise InputError(f"{directory.path / name} is damaged: it has no weight_map of names; {AGAIN}")
    for file in sorted(set(named.values())):
        directory.require_name(file)
    return named


def _is_plain(name: object) -> bool:
    """Return whether ``name`` is a valid name of a directory entry, in encodable text."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        return False
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
