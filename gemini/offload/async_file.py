"""A private, unlinked file read and written in the background; memory that a device reads and writes itself:
huge pages, which a fork leaves alone; and which request size and queue depth suit a drive: a short probe,
once per process and drive.
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
_MADV_WIPEONFORK = 18  # Linux 4.14; the module mmap has no name for it


def direct_memory(nbytes: int) -> torch.Tensor:
    """Return ``nbytes`` zeros on a 2 MiB boundary for transfers with O_DIRECT.

    A request for ordinary pages has an entry per 4 KiB, and a virtual disk may have room for 256 entries in
    all: two requests of 1 MiB then cannot be at the device at once. Of a huge page it has one. Where the
    system has none to give, ordinary pages do as well, only slower.

    After a fork the child's copy is empty. Without that, of a page that the disk is just writing to the
    parent may get the old copy and the child the data (open(2), "O_DIRECT").
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=flags)
    if not _advise(memory, _MADV_WIPEONFORK):
        memory = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES)  # shared: never copied
    _advise(memory, mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[start : start + nbytes]


def _advise(memory: mmap.mmap, advice: int) -> bool:
    """Say whether the system took the advice."""
    try:
        memory.madvise(advice)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel without it
            raise
        return False
    return True


# What a probe may take. A drive that moves little in that time keeps the default: it is slow anyway.
PROBE_SECONDS = 0.5
PROBE_BYTES = 16 * 2**20
_MIN_GAIN = 1.25  # less is noise


@dataclass(frozen=True)
class Tuning:
    """How to talk to a drive: ``depth`` requests of ``request_bytes`` at one time."""

    depth: int
    request_bytes: int


DEFAULT = Tuning(depth=8, request_bytes=2**20)
CANDIDATES = (DEFAULT, Tuning(depth=32, request_bytes=2**20), Tuning(depth=8, request_bytes=4 * 2**20))

_known: dict[tuple[int, str], Tuning] = {}


def tuned(device: int, directory: str, backend: str) -> Tuning:
    """Return what is best for the drive ``device`` (``st_dev``) that holds ``directory``.

    The first call of a process writes and reads 16 MiB of a private file with every candidate by turns, for
    half a second. The default stays unless another one is a quarter faster, and where there is no room.
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

# What making a file fails with in a directory that there is, and may be written to: that of /proc, of /sys.
_NO_PLACE_FOR_FILES = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EINVAL, errno.EOPNOTSUPP)


def checked_directory(directory: str | os.PathLike[str]) -> str:
    """Return ``directory`` as a string.

    Raises:
        ConfigError: it does not exist, is not a directory, cannot be written, or takes no files.
    """
    path = os.fspath(directory)
    if not os.path.isdir(path):  # noqa: PTH112 -- the string is passed on as it is
        if os.path.exists(path):  # noqa: PTH110
            raise ConfigError(f"directory {path!r} is a file; name a directory")
        raise ConfigError(f"directory {path!r} does not exist; create it or name another")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"directory {path!r} is not writable; change its permissions or name another")
    try:
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        if error.errno not in _NO_PLACE_FOR_FILES:  # the disk is full: the file itself will say so
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
    """Return the backend to use: as asked for, else as the environment says, else "auto".

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
    """``nbytes`` of disk space in ``directories``, without a name: nothing is left behind, also after a kill.

    ``read`` and ``write`` take addresses of memory that the caller keeps alive until the ticket was waited
    for. Tickets finish in any order; overlapping requests must be ordered by waiting. The process that
    made the file is the only one that may use it: not a forked child.
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
        """Make the file.

        Args:
            directories: an existing, writable directory, or several: every drive then gets each n-th
                ``request_bytes``, and they work at the same time.
            nbytes: size of the file, rounded up to 4096.
            backend: None is the environment's ``GEMINI_IO_BACKEND``, and where that is not set io_uring if
                the system allows it, else threads. On a file system in memory (tmpfs) it is threads: there
                is no device, only copying.
            depth: how many requests are at the disk at one time.
            request_bytes: larger transfers are cut into requests of this size, a multiple of 4096. Where
                neither is given it is 8 requests of 1 MiB, and for files of 1 GiB and more what a probe of
                half a second, once per process and drive, finds to be clearly faster.
            direct: use O_DIRECT where the file system has it; see the property ``direct``.
            reserve: take the disk space at once; otherwise only what is written takes space, see ``discard``.
            checksums: keep a CRC32C of every block written, 5 bytes of memory per 4096, and verify what is
                read. Sizes and offsets must then be multiples of 4096.

        Raises:
            ConfigError: a directory is missing or read-only, a number does not fit, or the backend cannot
                be used here.
            IoError: the space cannot be had, or no thread (ThreadError); nothing is left behind.
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
        """Have the kernel keep memory pinned: transfers from and to it need less processor time.

        The memory must not be freed before ``unregister`` or ``close``. False where the system refuses
        (``ulimit -l``) or the backend has no use for it; everything works anyway.
        """
        return bool(self._file.pin(address, nbytes))

    def unregister(self, address: int) -> None:
        """Undo ``register``; no transfer on the memory may be under way."""
        self._file.forget(address)

    def stats(self) -> dict[str, float]:
        """Return what was done so far.

        ``requests``, ``bytes_read`` and ``bytes_written`` of successful requests, ``system_calls``,
        ``batches`` handed over, ``cpu_seconds`` of the file's own threads, and ``mean_depth``: the requests
        at the device whenever more were waiting.
        """
        return dict(self._file.stats())

    def done(self, ticket: int) -> bool:
        """Say, without waiting, whether the ticket's memory is free again (also when it failed)."""
        return bool(self._file.done(ticket))

    def wait(self, ticket: int) -> None:
        """Block until the ticket is done, without the GIL.

        Raises:
            IoError: the request failed; errno, path and offset say how and where.
            ChecksumError: what was read is not what was written.
        """
        self._file.wait(ticket)

    def wait_all(self) -> None:
        """Block until every request is done. Raises the first error that no ``wait`` has raised."""
        self._file.wait_all()

    def discard(self, offset: int, nbytes: int) -> None:
        """Give the disk space of a range back, in a file made without ``reserve``.

        Raises:
            IoError: the disk refuses, or its file system cannot (see ``can_discard``).
        """
        self._file.discard(offset, nbytes)

    def grow(self, nbytes: int) -> None:
        """Make the file ``nbytes`` long, rounded up to 4096, where it is shorter: what is added takes disk
        space where it is written. Requests may be under way.

        Raises:
            IoError: the file cannot be that long. StateError: it has checksums, or is closed.
        """
        self._file.grow(round_to_block(nbytes))

    def close(self) -> None:
        """Finish all requests and give the disk space back. Idempotent."""
        self._file.close()

    @property
    def native(self) -> _C.AsyncFile:
        """The object under it, for the native transfer engine, which keeps it alive."""
        return self._file

    @property
    def direct(self) -> bool:
        """Whether requests bypass the page cache and must be aligned to 4096 bytes."""
        return bool(self._file.direct)

    @property
    def can_discard(self) -> bool:
        """Whether ``discard`` gives space back: not on every file system, and of a file with ``reserve`` only
        once it has grown."""
        return bool(self._file.can_discard)

    @property
    def backend(self) -> str:
        """Whether "uring" or "threads" carry the requests."""
        return str(self._file.backend)

    @property
    def depth(self) -> int:
        """How many requests are at the disk at one time."""
        return int(self._file.depth)

    @property
    def size(self) -> int:
        """Bytes reserved."""
        return int(self._file.size)

    @property
    def path(self) -> str:
        """What errors call the file; there is no such name in the directory."""
        return str(self._file.path)

    def __enter__(self) -> AsyncFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
