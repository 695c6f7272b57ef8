"""The door for files, directories and programs that somebody else made.

Through it come regular files alone, which keep no reader waiting; of a directory those inside it; documents
of bounded size and depth. Whatever is wrong is an :class:`InputError` of one line that names the file, and
the line in it where there is one.
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
from gemini.system.files import open_regular, read_regular
from gemini.system.parsing import SyntaxProblem, parse_json_input, parse_toml, parse_yaml

MAX_DOCUMENT_BYTES = 2**20  # of what people write
MAX_INDEX_BYTES = 2**26  # of a million tensors
AGAIN = "copy or download the file again"
_AS_OWNER = "read it as its owner, or have its permissions changed"
_PARSERS: dict[str, tuple[Callable[[bytes], Any], str]] = {
    ".json": (parse_json_input, "JSON"),
    ".toml": (parse_toml, "TOML"),
    ".yaml": (parse_yaml, "YAML"),
    ".yml": (parse_yaml, "YAML"),
}
_PACKAGES = {"YAML": "reading {} needs pip install pyyaml", "TOML": "reading {} needs pip install tomli"}
_SNAPSHOTS, _BLOBS = "snapshots", "blobs"  # as the cache of Hugging Face lies: its files are links to blobs


def why_unread(error: OSError) -> str:
    """Return why a file or a directory of the user's cannot be read, and what to do."""
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
    """Turn whatever another library raises on somebody's files into an InputError: ``doing``, and the error
    in words. What is a GeminiError stays that."""
    try:
        yield
    except GeminiError:
        raise
    except Exception as error:  # of as many classes as libraries have checks
        raise _said(doing, error, way_out) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of a library in Rust
            raise
        raise _said(doing, error, way_out) from error


def _said(doing: str, error: BaseException, way_out: str) -> InputError:
    return InputError(f"{doing}: {in_words(error)}{way_out and f'; {way_out}'}")


@contextmanager
def seconds_in(filename: str, most: float, refusal: Exception) -> Iterator[None]:
    """Bound what was compiled as ``filename``: the first of its lines that begins after ``most`` seconds of
    this thread's processor time raises ``refusal``. A busy machine does not make that time longer. Another
    tracer of this thread, such as a debugger's, rests within the block."""
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
    """Return what a document says, by the ending of its name, or of ``kind`` (``".json"``).

    Raises:
        InputError: it is no regular file, cannot be read, is larger than ``max_bytes`` or says nothing in its
            language; ``what`` it is, such as ``"the recipe"``, stands in front of the path.
    """
    parse, language = _PARSERS[kind or path.suffix]
    where = printable(f"{what} {path}")
    try:
        return parse(read_regular(path, max_bytes))
    except OSError as error:
        raise InputError(f"cannot read {where}: {why_unread(error)}") from error
    except SyntaxProblem as problem:
        raise InputError(problem.of(where, language)) from problem
    except ValueError as error:  # a path that is none
        raise InputError(f"cannot read {where}: {error}; check the path") from error
    except ImportError as error:
        raise InputError(f"{_PACKAGES[language].format(where)}; or write it in another language") from error


def require_inside(path: Path, *roots: Path) -> None:
    """Raise InputError for a link that leads out of all ``roots``, which are paths without links. Raises
    OSError where it leads nowhere."""
    if not path.is_symlink():
        return
    target = Path(os.path.realpath(path, strict=True))
    if not any(target.is_relative_to(root) for root in roots):
        raise InputError(f"{path} is a link out of its directory, to {target}; copy the file there instead")


class InputDirectory:
    """A directory that somebody else made. Its files are regular, and inside it; in a snapshot of the cache
    of Hugging Face they may be links to the blobs of the same model.

    Raises:
        InputError: there is no such directory, or it cannot be looked into.
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
        """Say whether there is an entry of this name, of whatever kind."""
        return os.path.lexists(self._root / name)

    def file(self, name: str) -> Path:
        """Return the path of a file that may be read.

        Raises:
            InputError: there is none, it is no regular file, or it lies outside the directory.
        """
        self.require_name(name)
        self.check(name)
        return self.path / name

    def require_name(self, name: object) -> None:
        """Raise InputError for what is no name of a file in the directory, there or not."""
        if not _is_plain(name):
            raise InputError(f"{self.path}: {name!r:.200} is not the name of a file in it")

    def check(self, name: str, max_bytes: int | None = None) -> None:
        """Check that the entry of this name may be read and has at most ``max_bytes``. Raises as
        :meth:`file`."""
        path = self.path / name
        try:
            require_inside(path, *self._roots)
            descriptor = open_regular(path)
            size = os.fstat(descriptor).st_size
            os.close(descriptor)
            if max_bytes is not None and size > max_bytes:
                raise OSError(errno.EFBIG, f"it has {size} bytes, more than {max_bytes}")
        except OSError as error:
            way_out = _AS_OWNER if isinstance(error, PermissionError) else AGAIN
            raise InputError(f"cannot read {path}: {error.strerror or error}; {way_out}") from error

    def json(self, name: str, max_bytes: int) -> dict[str, Any]:
        """Return the object that a file of JSON holds. Raises as :meth:`file`, and for what is none."""
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
    """Return the names of the files that tensors are in, by the tensors' names, of an index that was read
    from the file ``name``. Raises InputError where it does not say that, or names what is no file there."""
    named = index.get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
        raise InputError(f"{directory.path / name} is damaged: it has no weight_map of names; {AGAIN}")
    for file in sorted(set(named.values())):
        directory.require_name(file)
    return named


def _is_plain(name: object) -> bool:
    """Say whether ``name`` is one of an entry of a directory, and text."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        return False
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
