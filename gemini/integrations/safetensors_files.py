"""Safetensors files of a model, one tensor read at a time: what the library maps counts as the process's
memory.

The next tensors are read ahead, into as much memory as the largest of them takes. That memory is used again
and again: the kernel zeroes new pages first, which takes as long as reading them from the page cache.
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

# More keeps a disk no busier, and leaves less for memory that is used again.
_MOST_AHEAD_BYTES = 64 * 2**20
# Of what is freed the C library keeps up to 64 MiB for each thread, once it has seen blocks as large.
_MOST_FREED_BYTES = 48 * 2**20


class Readable(Protocol):
    """A tensor in a file."""

    @property
    def name(self) -> str: ...

    @property
    def nbytes(self) -> int: ...

    def read(self, memory: torch.UntypedStorage | None = None) -> torch.Tensor:
        """Return a copy in ``memory``, which is of its size, or in some of its own; may be called on another
        thread."""
        ...


class TensorReads:
    """Hands out tensors of files, for one thread; close it before the files.

    A caller that has written a tensor's values where they belong puts it into ``spent``: the next of its size
    gets its memory. ``stand_in``: see :meth:`hand_out`.
    Spare memory, what was handed out last and what waits for its turn take at most what the
    largest tensor of the order does.
    """

    def __init__(self) -> None:
        self.spent: list[torch.Tensor] = []
        self.stand_in: Callable[[StoredTensor], torch.Tensor] | None = None
        self._is_over = False  # the files are closed
        self._order: list[Readable] = []
        self._places: dict[str, int] = {}
        self._next = 0  # in the order: what nobody has read yet
        self._most_bytes = 0
        self._spare = _Spare()
        self._freed_bytes = 0  # since the system was given back what was freed
        self._ahead: dict[str, _TensorRead] = {}
        self._ahead_bytes = 0
        self._workers: Workers | None = None

    def hand_out(self, stand_in: Callable[[StoredTensor], torch.Tensor]) -> None:
        """Give callers what ``stand_in`` makes of a tensor instead of its values."""
        self.stand_in = stand_in

    def end(self) -> None:
        """Refuse to read from now on."""
        self.close()
        self._is_over = True

    def expect(self, order: Iterable[Readable]) -> None:
        """Say in which order tensors will be asked for, as far as that is known: one that comes at another
        time is read then, one that never comes holds its memory until the end.

        Raises:
            ThreadError: the system starts no thread.
        """
        self.close()
        self._order = list(order)
        self._places = {tensor.name: place for place, tensor in enumerate(self._order)}
        self._next = 0
        self._most_bytes = max((tensor.nbytes for tensor in self._order), default=0)
        self._workers = Workers(1)

    def take(self, tensor: Readable) -> torch.Tensor:
        """Return the values of ``tensor``, which are the caller's, and begin to read those that follow.
        Raises what reading it raised."""
        if self._is_over:
            raise CheckpointError(f"{tensor.name} was to be read after its file was closed")
        while self.spent:
            self._spare.add(self.spent.pop().untyped_storage())
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
        """Begin to read what follows, as far as there is room beside what is in use."""
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
        """Free spare memory for which there is no room beside what is in use and read ahead."""
        room_bytes = max(0, self._most_bytes - in_use_bytes - self._ahead_bytes)
        self._freed_bytes += self._spare.shrink_to(room_bytes)
        if self._workers is not None and self._freed_bytes >= _MOST_FREED_BYTES:
            self._freed_bytes = 0
            self._workers.submit(_give_back)

    def close(self) -> None:
        """End the thread, and give the system back what reading took. Idempotent."""
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.close()
            self._ahead.clear()
            self._ahead_bytes = 0
            self._spare.shrink_to(0)
            _give_back()  # what each thread had


def _give_back() -> None:
    """Have the C library give the system what was freed."""
    _C.malloc_trim()


class _Spare:
    """Memory that nobody uses, for tensors of the same size. Every call takes constant time: there may be as
    many pieces as tensors."""

    def __init__(self) -> None:
        self._storages: OrderedDict[int, torch.UntypedStorage] = OrderedDict()  # the oldest first
        self._of_size: defaultdict[int, deque[int]] = defaultdict(deque)  # their keys, in the same order
        self._next = 0
        self._nbytes = 0

    def add(self, storage: torch.UntypedStorage) -> None:
        if storage.nbytes():
            self._storages[self._next] = storage
            self._of_size[storage.nbytes()].append(self._next)
            self._next += 1
            self._nbytes += storage.nbytes()

    def take(self, nbytes: int) -> torch.UntypedStorage | None:
        """Return some of exactly ``nbytes``, which is the caller's, if there is any."""
        keys = self._of_size.get(nbytes)
        if not keys:
            return None
        self._nbytes -= nbytes
        return self._storages.pop(keys.popleft())

    def shrink_to(self, most_bytes: int) -> int:
        """Free what is more than ``most_bytes``, the oldest first; return how many bytes that was."""
        freed_bytes = 0
        while self._nbytes > most_bytes:
            _, storage = self._storages.popitem(last=False)
            self._of_size[storage.nbytes()].popleft()  # the oldest of all is the oldest of its size
            freed_bytes += storage.nbytes()
            self._nbytes -= storage.nbytes()
            storage.resize_(0)
        return freed_bytes


class _TensorRead:
    """A tensor that is being read on another thread."""

    def __init__(self, tensor: Readable, memory: torch.UntypedStorage | None, workers: Workers) -> None:
        self.nbytes = tensor.nbytes
        self._tensor, self._memory = tensor, memory
        self._values: torch.Tensor | None = None
        self._done: Future[None] = workers.submit(self._run)

    def _run(self) -> None:
        self._values = self._tensor.read(self._memory)

    def result(self) -> torch.Tensor:
        """Wait for the values and return them; raise what reading raised."""
        self._done.result()
        assert self._values is not None
        return self._values


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_METADATA = "__metadata__"
_MAX_HEADER_BYTES = 100_000_000  # as the safetensors library
_MAX_DIMS = 64  # as torch
_MOST = 2**63 - 1
_READ_AHEAD_BYTES = 64 * 2**20
_LARGEST_READ_BYTES = 2**30  # the kernel moves at most 2 GiB in one call
_COMPARED_NUMEL = 2**20


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, which ``[...]`` reads, through ``reads``; ``begin`` is its first byte there."""

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
        """Return what it takes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def get_shape(self) -> list[int]:
        """Return the shape, as safetensors does."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Return the type's name in the format, as safetensors does."""
        return self.type_name

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return a copy of the tensor, or a part of one; what stands for it, where ``reads`` says so."""
        if index is ... and self.reads.stand_in is not None:
            return self.reads.stand_in(self)
        whole = self.reads.take(self)
        return whole if index is ... else whole[index]

    def read(self, memory: torch.UntypedStorage | None = None) -> torch.Tensor:
        """Return a copy of the tensor in ``memory``, or in some of its own, while the kernel fetches what
        follows it.

        Raises:
            CheckpointError: the file cannot be read, or is too short.
        """
        if memory is None:
            copy = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        else:
            copy = torch.empty(0, dtype=self.dtype, device="cpu").set_(memory).view(self.shape)
        return self._read(copy, self.begin)

    def holds_the_same_as(self, other: StoredTensor) -> bool:
        """Return whether two tensors have equal values, of whatever types; some MiB are read at a time.
        Raises as :meth:`read`."""
        return self.shape == other.shape and all(
            hold_the_same(one, another) for one, another in zip(self._pieces(), other._pieces(), strict=True)
        )

    def _pieces(self) -> Iterator[torch.Tensor]:
        numel = math.prod(self.shape)
        for start in range(0, numel, _COMPARED_NUMEL):
            piece = torch.empty(min(_COMPARED_NUMEL, numel - start), dtype=self.dtype, device="cpu")
            yield self._read(piece, self.begin + start * self.dtype.itemsize)

    def _read(self, tensor: torch.Tensor, begin: int) -> torch.Tensor:
        """Fill ``tensor``, in memory of its own, with the bytes at ``begin`` of the file, and return it."""
        nbytes = tensor.nbytes
        with suppress(OSError):  # a hint
            end = begin + nbytes
            os.posix_fadvise(self.descriptor, end, _READ_AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
        if not nbytes:
            return tensor
        # Not numpy's view: memory that numpy has seen cannot be given back early.
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
    """Open safetensors files, by the names of their tensors. Close it after the last read.

    Raises:
        CheckpointError: a file cannot be opened, is damaged, or is not what the index says.
    """

    def __init__(self, paths: list[Path], named: Mapping[str, str] | None = None) -> None:
        """Open ``paths``; ``named``: which file each tensor is in, as an index has it."""
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
        """Open a model's files in the directory at ``path``: one, or shards with an index. Raises as the
        class."""
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
        """Say in which order the tensors will be asked for: they are read before that. See
        :meth:`TensorReads.expect`."""
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
    """The same as tensors, each read again at every use: what ``load_state_dict`` takes one by one."""

    def __init__(self, files: SafetensorsFiles) -> None:
        self._files = files

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._files[name][...]

    def outline(self, name: str) -> torch.Tensor:
        """Return a tensor without values: its shape and type."""
        stored = self._files[name]
        return torch.empty(stored.shape, dtype=stored.dtype, device="meta")

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _read_header(descriptor: int) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Return type, shape and first byte of each tensor of an open file, by its name.

    Raises:
        ValueError: it is no safetensors file: what the header says is not what the file holds, each byte
            once. OSError: it cannot be read.
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
    """Return type, shape, first byte and end of a tensor. Raises ValueError for what says none of that."""
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
    """Return torch's types by their names in the format."""
    return {name: dtype for dtype, name in TYPE_NAMES.items()}
