"""Safetensors files of a model, read one tensor at a time. The safetensors library maps files instead, and
mapped pages count as the process's memory.

The next tensors are read ahead, into at most as much memory as the largest tensor takes. That memory is
reused: the kernel zeroes new pages, which takes as long as reading them from the page cache.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch

from gemini import _C
from gemini.checkpoint.tensor_file import TYPE_NAMES, hold_the_same
from gemini.errors import CheckpointError, InputError
from gemini.integrations.model_directory import read_index
from gemini.system.files import open_regular
from gemini.system.input_files import AGAIN, InputDirectory
from gemini.system.parsing import parse_json_input
from gemini.system.threads import Workers

# Reading more ahead does not speed up a disk, and leaves less memory for reuse.
_MOST_AHEAD_BYTES = 64 * 2**20
# malloc keeps up to 64 MiB of freed memory per thread once it has seen blocks of that size; trim before that.
_MOST_FREED_BYTES = 48 * 2**20


class Readable(Protocol):
    """A tensor in a file."""

    @property
    def name(self) -> str: ...

    @property
    def nbytes(self) -> int: ...

    def read(self, memory: torch.UntypedStorage | None = None) -> torch.Tensor:
        """Return a copy, in ``memory`` of exactly its size if given. May be called on another thread."""
        ...


class TensorReads:
    """Reads tensors of files for one thread, ahead of time. Close it before the files.

    A caller that has copied a tensor's values puts the tensor into ``reusable``; the next one of its size
    reuses the memory. ``stand_in``: see :meth:`hand_out`. Spare memory, the last tensor and those read ahead
    together take at most the memory of the largest tensor in the order.
    """

    def __init__(self) -> None:
        self.reusable: list[torch.Tensor] = []
        self.stand_in: Callable[[StoredTensor], torch.Tensor] | None = None
        self._is_over = False  # the files are closed
        self._order: list[Readable] = []
        self._places: dict[str, int] = {}
        self._next = 0  # index in the order of the first tensor not read yet
        self._most_bytes = 0
        self._spare = _Spare()
        self._freed_bytes = 0  # since the last malloc_trim
        self._ahead: dict[str, _TensorRead] = {}
        self._ahead_bytes = 0
        self._workers: Workers | None = None

    def hand_out(self, stand_in: Callable[[StoredTensor], torch.Tensor]) -> None:
        """Make reads return ``stand_in(tensor)`` instead of values."""
        self.stand_in = stand_in

    def end(self) -> None:
        """Close, and refuse all further reads."""
        self.close()
        self._is_over = True

    def expect(self, order: Iterable[Readable]) -> None:
        """Set the expected order of reads. A tensor out of order is read on demand; one that is never
        requested keeps its memory until the end.

        Raises:
            ThreadError: the system does not start a thread.
        """
        self.close()
        self._order = list(order)
        self._places = {tensor.name: place for place, tensor in enumerate(self._order)}
        self._next = 0
        self._most_bytes = max((tensor.nbytes for tensor in self._order), default=0)
        self._workers = Workers(1)

    def take(self, tensor: Readable) -> torch.Tensor:
        """Return the values of ``tensor``, owned by the caller, and start reading the next ones. Raises the
        error of the read.
        """
        if self._is_over:
            raise CheckpointError(f"{tensor.name} was to be read after its file was closed")
        while self.reusable:
            self._spare.add(self.reusable.pop().untyped_storage())
        read = self._ahead.pop(tensor.name, None)
        self._ahead_bytes -= 0 if read is None else read.nbytes
        memory = self._spare.take(tensor.nbytes) if read is None else None
        self._keep_within(tensor.nbytes)
        if read is not None:
            values = read.result()
        else:
            values = tensor.read(memory)
            self._next = max(self._next, self._places.get(tensor.name, -1) + 1)
        self._begin(tensor.nbytes)
        return values

    def _begin(self, in_use_bytes: int) -> None:
        """Start reading the next tensors, as far as memory allows beside ``in_use_bytes``."""
        most_bytes = min(self._most_bytes - in_use_bytes, _MOST_AHEAD_BYTES)
        while self._workers is not None and self._next < len(self._order):
            tensor = self._order[self._next]
            if self._ahead_bytes + tensor.nbytes > most_bytes:
                return
            memory = self._spare.take(tensor.nbytes)
            self._keep_within(in_use_bytes + tensor.nbytes)
            self._ahead[tensor.name] = _TensorRead(tensor, memory, self._workers)
            self._ahead_bytes += tensor.nbytes
            self._next += 1

    def _keep_within(self, in_use_bytes: int) -> None:
        """Free spare memory that exceeds the limit, given the bytes in use and those read ahead."""
        room_bytes = max(0, self._most_bytes - in_use_bytes - self._ahead_bytes)
        self._freed_bytes += self._spare.shrink_to(room_bytes)
        if self._workers is not None and self._freed_bytes >= _MOST_FREED_BYTES:
            self._freed_bytes = 0
            self._workers.submit(_give_back)

    def close(self) -> None:
        """End the thread, and return all memory to the system. Idempotent."""
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.close()
            self._ahead.clear()
            self._ahead_bytes = 0
            self._spare.shrink_to(0)
            _give_back()  # trims the arenas of all threads


def _give_back() -> None:
    """Make the C library return freed memory to the system."""
    _C.malloc_trim()


class _Spare:
    """Unused memory for tensors of equal sizes. Every call takes constant time, because there may be as many
    pieces as tensors.
    """

    def __init__(self) -> None:
        self._storages: OrderedDict[int, torch.UntypedStorage] = OrderedDict()  # oldest first
        self._of_size: defaultdict[int, deque[int]] = defaultdict(deque)  # keys by size, oldest first
        self._next = 0
        self._nbytes = 0

    def add(self, storage: torch.UntypedStorage) -> None:
        if storage.nbytes():
            self._storages[self._next] = storage
            self._of_size[storage.nbytes()].append(self._next)
            self._next += 1
            self._nbytes += storage.nbytes()

    def take(self, nbytes: int) -> torch.UntypedStorage | None:
        """Return memory of exactly ``nbytes``, owned by the caller; None if there is none."""
        keys = self._of_size.get(nbytes)
        if not keys:
            return None
        self._nbytes -= nbytes
        return self._storages.pop(keys.popleft())

    def shrink_to(self, most_bytes: int) -> int:
        """Free the oldest memory until at most ``most_bytes`` are left; return the number of freed bytes."""
        freed_bytes = 0
        while self._nbytes > most_bytes:
            _, storage = self._storages.popitem(last=False)
            self._of_size[storage.nbytes()].popleft()  # the oldest overall is the oldest of its size
            freed_bytes += storage.nbytes()
            self._nbytes -= storage.nbytes()
            storage.resize_(0)
        return freed_bytes


class _TensorRead:
    """A running read of a tensor on another thread."""

    def __init__(self, tensor: Readable, memory: torch.UntypedStorage | None, workers: Workers) -> None:
        self.nbytes = tensor.nbytes
        self._tensor, self._memory = tensor, memory
        self._values: torch.Tensor | None = None
        self._done: Future[None] = workers.submit(self._run)

    def _run(self) -> None:
        self._values = self._tensor.read(self._memory)

    def result(self) -> torch.Tensor:
        """Wait for the values and return them, or raise the error of the read."""
        self._done.result()
        assert self._values is not None
        return self._values


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_METADATA = "__metadata__"
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_MAX_DIMS = 64  # torch's limit
_MOST = 2**63 - 1
_READ_AHEAD_BYTES = 64 * 2**20
_LARGEST_READ_BYTES = 2**30  # the kernel moves at most 2 GiB in one call
_COMPARED_NUMEL = 2**20


@dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor in a file; ``[...]`` reads it through ``reads``. ``begin``: the offset of its
    first byte.
    """

    name: str
    path: Path
    descriptor: int
    type_name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    reads: TensorReads

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def get_shape(self) -> list[int]:
        """Return the shape, as in safetensors' slices."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Return the format's name of the dtype, as in safetensors' slices."""
        return self.type_name

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return a copy of the tensor or of a part; for ``[...]`` the stand-in, if ``reads`` has one."""
        if index is ... and self.reads.stand_in is not None:
            return self.reads.stand_in(self)
        whole = self.reads.take(self)
        return whole if index is ... else whole[index]

    def read(self, memory: torch.UntypedStorage | None = None) -> torch.Tensor:
        """Return a copy of the tensor, in ``memory`` if given; the kernel reads ahead meanwhile.

        Raises:
            CheckpointError: the file cannot be read, or is too short.
        """
        if memory is None:
            copy = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        else:
            copy = torch.empty(0, dtype=self.dtype, device="cpu").set_(memory).view(self.shape)
        return self._read(copy, self.begin)

    def holds_the_same_as(self, other: StoredTensor) -> bool:
        """Return whether two tensors have equal values, even in different dtypes. Reads a few MiB at a time.
        Raises like :meth:`read`.
        """
        return self.shape == other.shape and all(
            hold_the_same(one, another) for one, another in zip(self._pieces(), other._pieces(), strict=True)
        )

    def _pieces(self) -> Iterator[torch.Tensor]:
        numel = math.prod(self.shape)
        for start in range(0, numel, _COMPARED_NUMEL):
            piece = torch.empty(min(_COMPARED_NUMEL, numel - start), dtype=self.dtype, device="cpu")
            yield self._read(piece, self.begin + start * self.dtype.itemsize)

    def _read(self, tensor: torch.Tensor, begin: int) -> torch.Tensor:
        """Fill ``tensor`` with the file's bytes at offset ``begin`` and return it."""
        nbytes = tensor.nbytes
        with suppress(OSError):  # only a hint
            end = begin + nbytes
            os.posix_fadvise(self.descriptor, end, _READ_AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
        if not nbytes:
            return tensor
        # Not through numpy: a storage with a numpy view cannot be resized to 0, so could not be freed early.
        raw = memoryview((ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr()))
        done = 0
        try:
            while done < nbytes:
                part = raw[done : done + _LARGEST_READ_BYTES]
                count = os.preadv(self.descriptor, [part], begin + done)
                if count == 0:
                    raise CheckpointError(f"{self.path} ends within {self.name!r}, which its header names")
                done += count
        except OSError as error:
            raise CheckpointError(f"cannot read {self.name!r} from {self.path}: {error}") from error
        return tensor


class SafetensorsFiles(Mapping[str, StoredTensor]):
    """Open safetensors files: a mapping tensor name -> StoredTensor. Close it after the last read.

    Raises:
        CheckpointError: a file cannot be opened, is damaged, or contradicts the index.
    """

    def __init__(self, paths: list[Path], named: Mapping[str, str] | None = None) -> None:
        """Open ``paths``. ``named``: {tensor: file} from an index, to be checked."""
        self.reads = TensorReads()
        self._tensors: dict[str, StoredTensor] = {}
        self._stack = ExitStack()
        try:
            for path in paths:
                self._open(path)
        except BaseException:
            self._stack.close()
            raise
        for name, file in (named or {}).items():
            if name not in self._tensors:
                self._stack.close()
                raise InputError(f"{file} does not hold {name!r}, as the index says; {AGAIN}")

    @classmethod
    def of_directory(cls, path: Path) -> SafetensorsFiles:
        """Open the files of the model in the directory ``path``: one, or shards with an index. Raises like
        the class.
        """
        directory = InputDirectory(path)
        if INDEX in directory:
            named = read_index(directory, INDEX)
            return cls([directory.file(file) for file in sorted(set(named.values()))], named)
        if SINGLE not in directory:
            raise InputError(
                f"{path} holds neither {SINGLE} nor {INDEX}; save the model with save_pretrained(), or "
                "give the directory that has its weights"
            )
        return cls([directory.file(SINGLE)])

    def _open(self, path: Path) -> None:
        try:
            descriptor = open_regular(path)
            self._stack.callback(os.close, descriptor)
            header = _read_header(descriptor)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"cannot read {path}: {reason}; {AGAIN}") from error
        types = _types()
        for name, (type_name, shape, begin) in header.items():
            self._tensors[name] = StoredTensor(
                name, path, descriptor, type_name, types[type_name], shape, begin, self.reads
            )

    def __getitem__(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def expect(self, order: Iterable[str]) -> None:
        """Set the expected order of reads, so that tensors are read ahead. See :meth:`TensorReads.expect`."""
        self.reads.expect([self._tensors[name] for name in order])

    def close(self) -> None:
        """Close the files. Idempotent."""
        self.reads.end()
        self._stack.close()

    def __enter__(self) -> SafetensorsFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class StoredValues(Mapping[str, torch.Tensor]):
    """The files as a mapping name -> tensor; every access reads the tensor again. For ``load_state_dict``,
    which takes one at a time.
    """

    def __init__(self, files: SafetensorsFiles) -> None:
        self._files = files

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._files[name][...]

    def outline(self, name: str) -> torch.Tensor:
        """Return a meta tensor with the shape and dtype."""
        stored = self._files[name]
        return torch.empty(stored.shape, dtype=stored.dtype, device="meta")

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _read_header(descriptor: int) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Return dtype name, shape and first byte of each tensor of an open file, by name.

    Raises:
        ValueError: it is not a safetensors file, or its tensors do not cover each byte exactly once.
        OSError: it cannot be read.
    """
    size = os.fstat(descriptor).st_size
    head = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if not 0 < head <= min(size - 8, _MAX_HEADER_BYTES):
        raise ValueError(f"its header would have {head} bytes, and the file has {size}")
    entries = parse_json_input(os.pread(descriptor, head, 8), keys_once=True)
    if not isinstance(entries, dict):
        raise ValueError("its header is no object with keys")
    _check_metadata(entries.pop(_METADATA, {}))
    types = _types()
    found, places = {}, []
    for name, entry in entries.items():
        type_name, shape, begin, end = _entry_of(name, entry)
        if type_name not in types:
            raise ValueError(f"{name!r:.200} has type {type_name!r:.50}, which torch has not")
        if end - begin != math.prod(shape) * types[type_name].itemsize:
            raise ValueError(f"{name!r:.200} of shape {list(shape)} has {end - begin} bytes")
        found[name] = (type_name, shape, 8 + head + begin)
        places.append((begin, end, name))
    end_before = 0
    for begin, end, name in sorted(places):
        if begin != end_before:
            raise ValueError(f"{name!r:.200} begins at byte {begin}, not at {end_before}")
        end_before = end
    if end_before != size - 8 - head:
        raise ValueError(f"its tensors have {end_before} bytes, and the file {size - 8 - head} for them")
    return found


def _entry_of(name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Return dtype name, shape, first byte and end of a tensor. Raises ValueError if the entry is
    malformed.
    """
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name!r:.200} has not dtype, shape and data_offsets")
    type_name, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(type_name, str):
        raise ValueError(f"{name!r:.200} has type {type_name!r:.50}, which torch has not")
    if not _are_numbers(shape) or len(shape) > _MAX_DIMS or math.prod(max(1, each) for each in shape) > _MOST:
        raise ValueError(f"{name!r:.200} has shape {shape!r:.100}, which no tensor has")
    if not _are_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{name!r:.200} has data_offsets {offsets!r:.100}, which are no place")
    return type_name, tuple(shape), offsets[0], offsets[1]


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(each) is int and 0 <= each <= _MOST for each in values)


def _check_metadata(said: Any) -> None:
    if not isinstance(said, dict) or not all(isinstance(each, str) for each in said.values()):
        raise ValueError(f"its {_METADATA} is not of texts")


def _types() -> dict[str, torch.dtype]:
    """Return {name in the format: torch dtype}."""
    return {name: dtype for dtype, name in TYPE_NAMES.items()}
