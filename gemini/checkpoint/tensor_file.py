"""Safetensors files, written piece by piece in any order, and read piece by piece through buffers of fixed
size: a few blocks ahead, past the page cache, each verified by its checksum.

The safetensors library writes whole dictionaries of tensors; here values go directly from a pinned chunk, or
from staging, to the file. To read, that library maps whole files, and touched pages count as the process's
memory.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch

from gemini.checkpoint.contents import is_text, table, whole_number
from gemini.checkpoint.sealed_file import (
    BLOCK_BYTES,
    DamagedError,
    Part,
    Seal,
    SealedFile,
    Staging,
    crc32c,
    making_sense_of,
    reading,
)
from gemini.errors import CheckpointError
from gemini.offload.async_file import direct_memory
from gemini.system.files import open_regular, parse_json
from gemini.system.threads import Workers

# The dtypes that the installed safetensors library knows; newer releases know more.
TYPE_NAMES: dict[torch.dtype, str] = {
    dtype: name for name, dtype in safetensors.torch._TYPES.items() if dtype is not None
}
_METADATA = "__metadata__"
_ALIGN = 4096  # offset of the first tensor: page-aligned memory can then be written without a copy


def hold_the_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have equal values, even in different dtypes; NaN equals NaN."""
    if one.shape != other.shape:
        return False
    if one.dtype == other.dtype and torch.equal(_bytes(one), _bytes(other)):
        return True
    wide = torch.complex128 if one.is_complex() or other.is_complex() else torch.float64
    first, second = one.to(wide), other.to(wide)
    return bool(((first == second) | (first.isnan() & second.isnan())).all())


def values_differ(where: object, one: str, other: str) -> CheckpointError:
    """Return the error for files in which two names of one tied tensor have different values."""
    return CheckpointError(
        f"{where} holds {one!r} and {other!r} with different values, but they are one tied tensor of the "
        "model: leave one of the two names out of the files, or build the model without tying them"
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


@dataclass(frozen=True)
class TensorSpec:
    """The name, dtype and shape of a tensor in a file; its elements are in row order."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """A new safetensors file with room for given tensors. Raises the errors of :class:`SealedFile`."""

    def __init__(
        self,
        path: Path,
        tensors: Sequence[TensorSpec],
        metadata: Mapping[str, str],
        staging: Staging,
        *,
        shared: bool = False,
        leads: bool = True,
        several_hosts: bool = False,
        private: bool = True,
    ) -> None:
        """Create the file and write its header.

        Args:
            path: the file.
            tensors: the tensors to make room for.
            metadata: text entries of the header.
            staging: the buffers through which it is written.
            shared: several processes write the file, each other elements.
            leads: whether this process writes the header.
            several_hosts: some of these processes are on other machines.
            private: as in :class:`SealedFile`.

        Raises:
            CheckpointError: the format does not support a tensor's dtype or name.
        """
        ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)  # aligns every tensor
        header, begins = _header(ordered, {**metadata, "format": "pt"})
        self._places = {tensor.name: (tensor, begins[tensor.name]) for tensor in ordered}
        self._file = SealedFile(path, staging, shared=shared, several_hosts=several_hosts, private=private)
        try:
            if leads:
                self._file.write(header, 0)
        except BaseException:
            self._file.close()
            raise

    def write(self, name: str, first: int, values: torch.Tensor) -> None:
        """Write ``values`` (in the tensor's dtype, taken in row order) from element ``first`` of ``name`` on.

        The values are copied or written before this returns. Every element must be written exactly once.
        """
        if values.numel():
            self._file.write(*self._run(name, first, values))

    def lend(self, name: str, first: int, values: torch.Tensor) -> None:
        """Write ``values`` like :meth:`write`, but without a copy if possible; they must not change until
        :meth:`settle` returns.
        """
        if values.numel():
            self._file.lend(*self._run(name, first, values))

    def settle(self) -> None:
        """Wait until no lent memory is in use."""
        self._file.settle()

    def offset(self, name: str, first: int) -> int:
        """Return the offset in the file of element ``first`` of ``name``."""
        tensor, begin = self._places[name]
        return begin + first * tensor.dtype.itemsize

    def finish(self) -> list[Part]:
        """Make the file durable, close it and return the parts written here."""
        return self._file.finish()

    def close(self) -> None:
        """Close the file, finished or not. Idempotent."""
        self._file.close()

    def _run(self, name: str, first: int, values: torch.Tensor) -> tuple[memoryview, int]:
        """Return the bytes of ``values`` and their offset in the file."""
        assert values.dtype == self._places[name][0].dtype, name
        # A view may be lazily conjugated or negated: its memory does not have the values yet.
        values = values.resolve_conj().resolve_neg()
        raw = values.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data
        return raw, self.offset(name, first)


@contextmanager
def settled(files: Iterable[TensorFile]) -> Iterator[None]:
    """At the end of the block, even after an error, wait until no memory lent to ``files`` is in use."""
    with ExitStack() as stack:
        for file in set(files):
            stack.callback(file.settle)
        yield


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], staging: Staging) -> list[Part]:
    """Write a file of ordinary tensors; return the written parts."""
    specs = [TensorSpec(name, value.dtype, tuple(value.shape)) for name, value in tensors.items()]
    file = TensorFile(path, specs, {}, staging)
    try:
        for name, value in tensors.items():
            file.write(name, 0, value.detach())
        return file.finish()
    finally:
        file.close()


def require_holdable(tensors: Sequence[TensorSpec], metadata: Mapping[str, str] | None = None) -> None:
    """Raise CheckpointError, with advice, for a dtype or name that the format does not support."""
    for tensor in tensors:
        if tensor.dtype not in TYPE_NAMES:
            raise CheckpointError(
                f"{tensor.name!r} is {tensor.dtype}, which a safetensors file cannot hold: keep it as "
                "another type (torch.view_as_real, .view, .to), or, if it can be computed again, out of the "
                "state with register_buffer(..., persistent=False)"
            )
        if tensor.name == _METADATA:
            raise CheckpointError(
                f"no tensor in a safetensors file can be named {_METADATA!r}; give it another name in its "
                "module"
            )
    names = [*(tensor.name for tensor in tensors), *(metadata or {}), *(metadata or {}).values()]
    for name in names:
        if not is_text(name):
            raise CheckpointError(
                f"the name {name!r} is no text (it has half of a surrogate pair), which a safetensors file "
                "cannot hold; give the tensor another name in its module"
            )


def require_strided(name: str, tensor: torch.Tensor) -> None:
    """Raise CheckpointError if a tensor is not strided (for example sparse)."""
    if tensor.layout != torch.strided:
        raise CheckpointError(
            f"{name!r} is {tensor.layout}, which a safetensors file cannot hold: keep its parts (indices and "
            "values) in buffers, or it out of the state with register_buffer(..., persistent=False)"
        )


def _header(tensors: Sequence[TensorSpec], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """Return the bytes before the tensors, and the offset of each tensor in the file."""
    require_holdable(tensors, metadata)
    entries: dict[str, object] = {_METADATA: metadata}
    offsets, offset = {}, 0
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": TYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offsets[tensor.name] = offset
        offset += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-(8 + len(text)) % _ALIGN)
    base = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: base + at for name, at in offsets.items()}


_TYPES = {name: dtype for dtype, name in TYPE_NAMES.items()}
_MAX_HEADER_BYTES = 10**8  # the format's own limit
_NUM_BLOCKS = 4  # one in use, three being read
_NUM_THREADS = 2

_Memory = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor in a file; ``begin``: the offset of its first byte."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class TensorReader:
    """The tensors of one safetensors file, best read in file order. Not thread-safe; close it.

    Raises:
        DamagedError: the file cannot be opened or read, or a block to be read is damaged.
    """

    def __init__(self, path: Path, seal: Seal, ahead: ReadAhead) -> None:
        """``ahead``: the buffers through which the file is read."""
        self._file = BlockFile(path, seal, ahead)
        try:
            self.tensors = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def pieces(
        self, name: str, first: int = 0, count: int | None = None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (element, values) for ``count`` elements of ``name`` from ``first`` on, flat; None: to its
        end.

        Values are valid until the next ones are read, from this or another file.
        """
        stored = self.tensors[name]
        size = stored.dtype.itemsize
        last = stored.numel if count is None else first + count
        assert 0 <= first <= last <= stored.numel, name
        # After a complete tensor the next one is probably wanted; after a part of one it may not be.
        read_on = last == stored.numel
        while first < last:
            raw = self._bytes(stored.begin + first * size, (last - first) * size, read_on)
            yield first, torch.from_numpy(raw).view(stored.dtype)
            first += len(raw) // size

    def read(self, name: str, first: int = 0, count: int | None = None) -> torch.Tensor:
        """Return a copy of the elements that :meth:`pieces` yields."""
        stored = self.tensors[name]
        values = torch.empty(
            stored.numel - first if count is None else count, dtype=stored.dtype, device="cpu"
        )
        for at, piece in self.pieces(name, first, count):
            values[at - first : at - first + piece.numel()] = piece
        return values

    def whole(self, name: str) -> torch.Tensor:
        """Return a copy of ``name`` in its shape."""
        return self.read(name).reshape(self.tensors[name].shape)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def _read_header(self) -> dict[str, StoredTensor]:
        file = self._file
        return _read_header(file.path, file.seal.num_bytes, lambda end: file.head(end))

    def _bytes(
        self, offset: int, count: int, read_on: bool
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        """Return at most ``count`` bytes of the file, whole elements, from ``offset`` on. With ``read_on``
        the blocks after them are read meanwhile.
        """
        index, first = divmod(offset, BLOCK_BYTES)
        stop = None if read_on else -(-(offset + count) // BLOCK_BYTES)
        return self._file.block(index, stop)[first : first + count]


def stored_tensors(path: Path, seal: Seal) -> dict[str, StoredTensor]:
    """Return the tensors in the header of a file, without verifying its checksum. Raises DamagedError."""
    with reading(path):
        descriptor = open_regular(path, os.O_NOFOLLOW)
        try:
            return _read_header(path, seal.num_bytes, lambda end: os.pread(descriptor, end, 0))
        finally:
            os.close(descriptor)


def _read_header(path: Path, size: int, head: Callable[[int], bytes]) -> dict[str, StoredTensor]:
    """Return the tensors in the header of a file of ``size`` bytes; ``head(n)`` returns its first n bytes.

    Raises DamagedError if the format does not allow it: overlapping tensors, or bytes that belong to none.
    """
    num_bytes = int.from_bytes(head(min(8, size)), "little")
    if num_bytes > min(_MAX_HEADER_BYTES, size - 8):
        raise DamagedError(f"{path} is damaged: its header would have {num_bytes} bytes")
    with making_sense_of(path):
        text = head(8 + num_bytes)[8:]
        if text[:1] != b"{":
            raise ValueError("its header is no JSON object")
        entries = parse_json(text)
        for value in table(entries.pop("__metadata__", {})).values():
            if not isinstance(value, str):
                raise ValueError(f"its metadata holds {value!r:.200}, which is no text")
        tensors = {name: _stored(entry, 8 + num_bytes) for name, entry in table(entries).items()}
        end = 8 + num_bytes
        for begin, nbytes, name in sorted((t.begin, t.nbytes, name) for name, t in tensors.items()):
            if begin != end:
                raise ValueError(f"{name!r} begins at byte {begin}, where byte {end} is next")
            end += nbytes
        if end != size:
            raise ValueError(f"its tensors end at byte {end} of {size}")
    return tensors


def _stored(entry: Any, base: int) -> StoredTensor:
    begin, end = (whole_number(offset) for offset in entry["data_offsets"])
    shape = tuple(whole_number(size) for size in entry["shape"])
    stored = StoredTensor(_TYPES[entry["dtype"]], shape, base + begin)
    if end - begin != stored.nbytes:
        raise ValueError(f"{entry!r:.200} has not so many bytes")
    if stored.begin % stored.dtype.itemsize:
        raise ValueError(f"{entry!r:.200} does not begin where elements of its type do")
    return stored


class ReadAhead:
    """16 MiB of buffers through which any number of files are read, one at a time. For one thread;
    close it.
    """

    def __init__(self) -> None:
        memory = direct_memory(_NUM_BLOCKS * BLOCK_BYTES).numpy()
        self._free = [memory[at : at + BLOCK_BYTES] for at in range(0, len(memory), BLOCK_BYTES)]
        self._reads: dict[tuple[BlockFile, int], _Read] = {}
        self._workers = Workers(_NUM_THREADS)

    def block(self, file: BlockFile, blocks: range) -> _Memory:
        """Return the first of ``blocks`` of a file and start reading those after it, as many as fit. Valid
        until the next call. Raises DamagedError.
        """
        blocks = blocks[:_NUM_BLOCKS]
        wanted = {(file, index) for index in blocks}
        for key in self._reads.keys() - wanted:
            self._free.append(self._reads.pop(key).cancelled())
        for index in blocks:
            if (file, index) not in self._reads:
                self._reads[file, index] = _Read(self._workers, file, index, self._free.pop())
        return self._reads[file, blocks[0]].result()

    def forget(self, file: BlockFile) -> None:
        """Cancel the reads of a file that is about to be closed."""
        for key in [key for key in self._reads if key[0] is file]:
            self._free.append(self._reads.pop(key).cancelled())

    def close(self) -> None:
        """End all reads. Idempotent."""
        self._workers.close()


class BlockFile:
    """A file that returns only verified blocks. Close it.

    Raises:
        DamagedError: it cannot be opened or read, or differs from what was written.
    """

    def __init__(self, path: Path, seal: Seal, ahead: ReadAhead) -> None:
        """``ahead``: the buffers through which it is read."""
        self.path = path
        self.seal = seal
        self._ahead = ahead
        with reading(path):
            self.descriptor = open_direct(path)

    def block(self, index: int, stop: int | None = None) -> _Memory:
        """Return bytes ``[index, index + 1) * BLOCK_BYTES``, fewer at the end of the file; the blocks after
        it, up to ``stop``, are read meanwhile. Valid until the next block of any file is requested.
        """
        return self._ahead.block(self, range(index, len(self.seal.blocks) if stop is None else stop))

    def head(self, num_bytes: int) -> bytes:
        """Return the first ``num_bytes`` bytes, without reading ahead."""
        found = []
        for begin in range(0, num_bytes, BLOCK_BYTES):
            index = begin // BLOCK_BYTES
            found.append(self._ahead.block(self, range(index, index + 1))[: num_bytes - begin].tobytes())
        return b"".join(found)

    def close(self) -> None:
        """Close the file. Idempotent."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            self._ahead.forget(self)
            os.close(descriptor)


class _Read:
    """A running read of one block."""

    def __init__(self, workers: Workers, file: BlockFile, index: int, memory: _Memory) -> None:
        self._memory = memory
        self._file = file
        self._descriptor = file.descriptor
        self._offset = index * BLOCK_BYTES
        self._num_bytes = min(BLOCK_BYTES, file.seal.num_bytes - self._offset)
        self._crc32c = file.seal.blocks[index]
        self._damage = ""  # a text, not an error: a traceback would keep the memory alive
        self._done: Future[None] = workers.submit(self._run)

    def _run(self) -> None:
        self._damage = self._read_and_compare()

    def _read_and_compare(self) -> str:
        """Read and verify the block; return a description of the damage, or ""."""
        try:
            count = self._read()
        except OSError as error:
            return f"cannot read {self._file.path}: {error.strerror}"
        if count < self._num_bytes:
            return f"{self._file.path} is damaged: it ends at byte {self._offset + count}"
        # Verified here, on the reading threads, which compute without the GIL.
        if crc32c(self._memory[: self._num_bytes].data) == self._crc32c:
            return ""
        end = self._offset + self._num_bytes
        return f"{self._file.path} is damaged: bytes {self._offset} to {end} are not those that were written"

    def _read(self) -> int:
        """Read the block and return the number of bytes that the file has of it."""
        count = 0
        while count < self._num_bytes:
            rest = self._memory[count:]
            got = os.preadv(self._descriptor, [rest.data], self._offset + count)
            count += got
            if got == 0 or count % _ALIGN:  # the file ends here
                break
        return count

    def result(self) -> _Memory:
        """Return the bytes read. Raises DamagedError."""
        self._done.result()
        if self._damage:
            raise DamagedError(self._damage)
        return self._memory[: self._num_bytes]

    def cancelled(self) -> _Memory:
        """Return the memory once the read has ended."""
        self._done.exception()
        return self._memory


def open_direct(path: Path) -> int:
    """Open a file for reading past the page cache, or through it if that is not possible; return the
    descriptor.

    Raises OSError, also for links and anything that is not a regular file.
    """
    with suppress(OSError):
        descriptor = open_regular(path, os.O_DIRECT | os.O_NOFOLLOW)
        try:
            os.preadv(
                descriptor, [mmap.mmap(-1, _ALIGN)], 0
            )  # some file systems open O_DIRECT, but cannot read
        except OSError:
            os.close(descriptor)
        else:
            return descriptor
    return open_regular(path, os.O_NOFOLLOW)
