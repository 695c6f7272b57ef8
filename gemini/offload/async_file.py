"""AsyncFile: a private, unlinked file that is read and written in the background.

Also: memory in huge pages for transfers by O_DIRECT, and a short probe, once per process and drive, of the
best request size and queue depth.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeAlias

import torch

from gemini import _C
from gemini.errors import ConfigError, IoError

HUGE_PAGE_BYTES = 2 * 2**20
_MADV_WIPEONFORK = 18  # Linux 4.14; missing in the mmap module


def direct_memory(nbytes: int) -> torch.Tensor:
    """Return ``nbytes`` zeros on a 2 MiB boundary for transfers with O_DIRECT.

    A request has one entry per page: per 4 KiB for ordinary pages. A virtual disk may have room for only 256
    entries, so two requests of 1 MiB cannot be at the device at once. With huge pages a request has a single
    entry. If the system has no huge pages, ordinary pages work too, only slower.

    After a fork the child's copy is empty. Otherwise, if the disk writes to a page during the fork, the
    parent may keep the old copy while the child gets the data (open(2), "O_DIRECT").
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=flags)
    if not _advise(memory, _MADV_WIPEONFORK):
        memory = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES)  # shared memory is never copied at a fork
    _advise(memory, mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[start : start + nbytes]


def _advise(memory: mmap.mmap, advice: int) -> bool:
    """Say whether the system accepted the advice."""
    try:
        memory.madvise(advice)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the kernel does not know it
            raise
        return False
    return True


# Limits of a probe. A drive that transfers less in this time keeps the default: it is slow anyway.
PROBE_SECONDS = 0.5
PROBE_BYTES = 16 * 2**20
_MIN_GAIN = 1.25  # a smaller gain is noise


@dataclass(frozen=True)
class Tuning:
    """Parameters of a drive: at most ``depth`` requests of ``request_bytes`` at a time."""

    depth: int
    request_bytes: int


DEFAULT = Tuning(depth=8, request_bytes=2**20)
CANDIDATES = (DEFAULT, Tuning(depth=32, request_bytes=2**20), Tuning(depth=8, request_bytes=4 * 2**20))

_known: dict[tuple[int, str], Tuning] = {}


def tuned(device: int, directory: str, backend: str) -> Tuning:
    """Return the best parameters for the drive ``device`` (``st_dev``) that holds ``directory``.

    The first call in a process writes and reads 16 MiB of a private file, for half a second, with all
    candidates in turns. The default stays unless another candidate is 25 % faster, or if there is no space.
    """
    key = (device, backend)
    if key not in _known:
        try:
            _known[key] = _probe(directory, backend)
        except IoError:
            return DEFAULT
    return _known[key]


def _probe(directory: str, backend: str) -> Tuning:
    memory = direct_memory(PROBE_BYTES)
    best: dict[Tuning, float] = {}
    deadline = time.perf_counter() + PROBE_SECONDS
    while time.perf_counter() < deadline:
        for candidate in CANDIDATES:
            if time.perf_counter() >= deadline and len(best) < len(CANDIDATES):
                return DEFAULT
            seconds = _time(directory, backend, candidate, memory.data_ptr())
            best[candidate] = min(seconds, best.get(candidate, seconds))
    fastest = min(CANDIDATES, key=best.__getitem__)
    return fastest if best[DEFAULT] > _MIN_GAIN * best[fastest] else DEFAULT


def _time(directory: str, backend: str, tuning: Tuning, address: int) -> float:
    """Return the seconds of one write and one read."""
    file = _C.AsyncFile(
        [directory], PROBE_BYTES, backend=backend, depth=tuning.depth, request_bytes=tuning.request_bytes
    )
    try:
        start = time.perf_counter()
        file.wait(file.write(address, PROBE_BYTES, 0))
        file.wait(file.read(address, PROBE_BYTES, 0))
        return time.perf_counter() - start
    finally:
        file.close()


Directories: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Backend: TypeAlias = Literal["uring", "threads"]

BACKEND_VARIABLE = "GEMINI_IO_BACKEND"
MAX_DEPTH = 1024
MAX_REQUEST_BYTES = 2**30
TUNED_FROM_BYTES = 2**30

# With O_DIRECT, addresses, sizes and offsets are multiples of this many bytes.
BLOCK_BYTES = 4096

# errno values of creating a file in a directory that exists and is writable, but takes no files (/proc,
# /sys).
_NO_PLACE_FOR_FILES = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EINVAL, errno.EOPNOTSUPP)


def checked_directory(directory: str | os.PathLike[str]) -> str:
    """Return ``directory`` as a string.

    Raises:
        ConfigError: it does not exist, is not a directory, cannot be written, or takes no files.
    """
    path = os.fspath(directory)
    if not os.path.isdir(path):  # noqa: PTH112 -- the string is passed on unchanged
        if os.path.exists(path):  # noqa: PTH110
            raise ConfigError(f"directory {path!r} is a file; name a directory")
        raise ConfigError(f"directory {path!r} does not exist; create it or name another")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"directory {path!r} is not writable; change its permissions or name another")
    try:
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        if error.errno not in _NO_PLACE_FOR_FILES:  # the disk is full: creating the real file reports it
            return path
        raise ConfigError(
            f"no file can be made in directory {path!r} ({os.strerror(error.errno)}); name another one, on a "
            "disk"
        ) from None
    return path


def checked_directories(directories: Directories) -> list[str]:
    """Return one or several directories as strings. Raises as :func:`checked_directory`."""
    several = [directories] if isinstance(directories, (str, os.PathLike)) else list(directories)
    found = [checked_directory(one) for one in several]
    if not found:
        raise ConfigError("no directory given; name at least one")
    return found


def chosen_backend(backend: str | None) -> str:
    """Return the backend to use: the requested one, else the environment's, else "auto".

    Raises:
        ConfigError: there is no such backend, or it cannot be used here.
    """
    source = "backend" if backend is not None else BACKEND_VARIABLE
    name = backend if backend is not None else os.environ.get(BACKEND_VARIABLE) or "auto"
    if name not in ("auto", "uring", "threads"):
        raise ConfigError(f"{source} is {name!r}; it must be 'uring' or 'threads'")
    if name == "uring" and (refusal := _C.uring_refusal()):
        raise ConfigError(f"{source} is 'uring', which cannot be used here ({refusal}); use 'threads'")
    return name


def round_to_block(nbytes: int) -> int:
    """Round a size up to whole blocks."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


class AsyncFile:
    """``nbytes`` of disk space in ``directories``, in files without names: nothing is left behind, even after
    a kill.

    ``read`` and ``write`` take addresses; the caller keeps the memory alive until it has waited for the
    ticket. Tickets finish in any order; overlapping requests must be ordered by waiting. Only the process
    that created the file may use it, not a forked child.
    """

    def __init__(
        self,
        directories: Directories,
        nbytes: int,
        *,
        backend: Backend | None = None,
        depth: int | None = None,
        request_bytes: int | None = None,
        direct: bool = True,
        reserve: bool = True,
        checksums: bool = False,
    ) -> None:
        """Create the file.

        Args:
            directories: an existing, writable directory, or several: with n directories each drive gets every
                n-th ``request_bytes``, and the drives work in parallel.
            nbytes: size of the file, rounded up to 4096.
            backend: None uses the environment's ``GEMINI_IO_BACKEND``; if that is not set, io_uring if the
                system allows it, else threads. On a file system in memory (tmpfs) it is threads: there is no
                device, only copying.
            depth: the most requests at the disk at a time.
            request_bytes: larger transfers are cut into requests of this size, a multiple of 4096. If neither
                this nor ``depth`` is given: 8 requests of 1 MiB; for files of 1 GiB and more the parameters
                that a probe of half a second, once per process and drive, finds clearly faster.
            direct: use O_DIRECT if the file system supports it; see the property ``direct``.
            reserve: take the disk space at once; otherwise only written blocks take space, see ``discard``.
            checksums: keep a CRC32C of every block written, 5 bytes of memory per 4096, and verify reads.
                Sizes and offsets must then be multiples of 4096.

        Raises:
            ConfigError: a directory is missing or read-only, a number is out of range, or the backend cannot
                be used here.
            IoError: there is not enough space, or a thread cannot be started (ThreadError); nothing is left
                behind.
        """
        paths = checked_directories(directories)
        name = chosen_backend(backend)
        chosen = DEFAULT
        if depth is None and request_bytes is None and nbytes >= TUNED_FROM_BYTES:
            chosen = tuned(Path(paths[0]).stat().st_dev, paths[0], name)
        depth = chosen.depth if depth is None else depth
        request_bytes = chosen.request_bytes if request_bytes is None else request_bytes
        if nbytes <= 0 or not 0 < depth <= MAX_DEPTH:
            raise ConfigError(
                f"AsyncFile of {nbytes} bytes with depth {depth}: both must be positive, and depth at most "
                f"{MAX_DEPTH}"
            )
        if request_bytes <= 0 or request_bytes % BLOCK_BYTES or request_bytes > MAX_REQUEST_BYTES:
            raise ConfigError(
                f"request_bytes is {request_bytes}; it must be a multiple of {BLOCK_BYTES}, at most 1 GiB"
            )
        self._file = _C.AsyncFile(
            paths,
            round_to_block(nbytes),
            backend=name,
            depth=depth,
            request_bytes=request_bytes,
            direct=direct,
            reserve=reserve,
            checksums=checksums,
        )

    def read(self, address: int, nbytes: int, offset: int) -> int:
        """Start reading ``nbytes`` at ``offset`` into memory; return the ticket.

        Raises:
            StateError: the file is closed, the range is outside it, or ``direct`` needs alignment.
        """
        return int(self._file.read(address, nbytes, offset))

    def write(self, address: int, nbytes: int, offset: int) -> int:
        """Start writing ``nbytes`` of memory at ``offset``; return the ticket. Raises as ``read``."""
        return int(self._file.write(address, nbytes, offset))

    def readv(self, areas: Sequence[tuple[int, int]], offset: int) -> int:
        """Start reading consecutive bytes at ``offset`` into several areas of memory, (address, nbytes) each.

        Returns the ticket. Raises as ``read``.
        """
        return int(self._file.readv(list(areas), offset))

    def writev(self, areas: Sequence[tuple[int, int]], offset: int) -> int:
        """Start writing several areas of memory as consecutive bytes at ``offset``; as ``readv``."""
        return int(self._file.writev(list(areas), offset))

    def register(self, address: int, nbytes: int) -> bool:
        """Pin memory in the kernel: transfers from and to it need less processor time.

        The memory must not be freed before ``unregister`` or ``close``. Returns False if the system refuses
        (``ulimit -l``) or the backend has no use for it; transfers work in any case.
        """
        return bool(self._file.pin(address, nbytes))

    def unregister(self, address: int) -> None:
        """Undo ``register``; no transfer of the memory may be under way."""
        self._file.forget(address)

    def stats(self) -> dict[str, float]:
        """Return counters since creation.

        ``requests``, ``bytes_read`` and ``bytes_written`` of successful requests, ``system_calls``,
        ``batches`` submitted, ``cpu_seconds`` of the file's own threads, and ``mean_depth``: the mean number
        of requests at the device while more were waiting.
        """
        return dict(self._file.stats())

    def done(self, ticket: int) -> bool:
        """Say, without waiting, whether the ticket's memory is free again (also after a failure)."""
        return bool(self._file.done(ticket))

    def wait(self, ticket: int) -> None:
        """Block until the ticket is done, without the GIL.

        Raises:
            IoError: the request failed; with errno, path and offset.
            ChecksumError: the bytes read differ from those written.
        """
        self._file.wait(ticket)

    def wait_all(self) -> None:
        """Block until every request is done. Raises the first error that no ``wait`` has raised."""
        self._file.wait_all()

    def discard(self, offset: int, nbytes: int) -> None:
        """Return the disk space of a range, in a file created without ``reserve``.

        Raises:
            IoError: the disk refuses, or its file system cannot (see ``can_discard``).
        """
        self._file.discard(offset, nbytes)

    def grow(self, nbytes: int) -> None:
        """Make the file at least ``nbytes`` long, rounded up to 4096. The added part takes disk space only
        when it is written. Requests may be under way.

        Raises:
            IoError: the file cannot be that long.
            StateError: it has checksums, or is closed.
        """
        self._file.grow(round_to_block(nbytes))

    def close(self) -> None:
        """Finish all requests and return the disk space. Idempotent."""
        self._file.close()

    @property
    def native(self) -> _C.AsyncFile:
        """The native object, for the transfer engine, which keeps it alive."""
        return self._file

    @property
    def direct(self) -> bool:
        """Whether requests bypass the page cache and must be aligned to 4096 bytes."""
        return bool(self._file.direct)

    @property
    def can_discard(self) -> bool:
        """Whether ``discard`` returns space: not on every file system, and in a file with ``reserve`` only
        after it has grown."""
        return bool(self._file.can_discard)

    @property
    def backend(self) -> str:
        """The backend in use: "uring" or "threads"."""
        return str(self._file.backend)

    @property
    def depth(self) -> int:
        """The most requests at the disk at a time."""
        return int(self._file.depth)

    @property
    def size(self) -> int:
        """The size in bytes."""
        return int(self._file.size)

    @property
    def path(self) -> str:
        """The name of the file in errors; the directory has no such name."""
        return str(self._file.path)

    def __enter__(self) -> AsyncFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
