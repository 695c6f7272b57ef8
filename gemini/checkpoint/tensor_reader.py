"""Reading safetensors files piece by piece into memory of bounded size.

The library maps whole files, and what is touched of them counts as the process's memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gemini.checkpoint.part import BLOCK_BYTES
from gemini.checkpoint.read_ahead import BlockFile, ReadAhead
from gemini.checkpoint.sealed_file import DamagedError, Seal, making_sense_of, reading
from gemini.checkpoint.structure import table, whole_number
from gemini.checkpoint.tensor_file import TYPE_NAMES
from gemini.system.files import open_regular, parse_json

_TYPES = {name: dtype for dtype, name in TYPE_NAMES.items()}
_MAX_HEADER_BYTES = 10**8  # the format's own limit


@dataclass(frozen=True)
class StoredTensor:
    """Where a file holds a tensor: ``begin`` is its first byte in the file."""

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
    """The tensors of one safetensors file, best read in their order in it. Not thread-safe; close it.

    Raises:
        DamagedError: it cannot be opened or read, or what was to be had of it is not what was written.
    """

    def __init__(self, path: Path, seal: Seal, ahead: ReadAhead) -> None:
        """``ahead``: what the file is read with."""
        self._file = BlockFile(path, seal, ahead)
        try:
            self.tensors = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def pieces(
        self, name: str, first: int = 0, count: int | None = None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (element, values) of ``count`` elements of ``name`` from ``first``, flat; None: to its end.

        Values are valid until the next are asked for, here or of another file.
        """
        stored = self.tensors[name]
        size = stored.dtype.itemsize
        last = stored.numel if count is None else first + count
        assert 0 <= first <= last <= stored.numel, name
        # What follows a whole tensor is wanted next; what follows a part of one may not be.
        read_on = last == stored.numel
        while first < last:
            raw = self._bytes(stored.begin + first * size, (last - first) * size, read_on)
            yield first, torch.from_numpy(raw).view(stored.dtype)
            first += len(raw) // size

    def read(self, name: str, first: int = 0, count: int | None = None) -> torch.Tensor:
        """Return a copy of what :meth:`pieces` yields."""
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
        """Return at most ``count`` bytes of the file, whole elements, from ``offset`` on. Blocks after them
        are read meanwhile if ``read_on``."""
        index, first = divmod(offset, BLOCK_BYTES)
        stop = None if read_on else -(-(offset + count) // BLOCK_BYTES)
        return self._file.block(index, stop)[first : first + count]


def stored_tensors(path: Path, seal: Seal) -> dict[str, StoredTensor]:
    """Return what the header of a file says, whose checksum is not looked at. Raises DamagedError."""
    with reading(path):
        descriptor = open_regular(path, os.O_NOFOLLOW)
        try:
            return _read_header(path, seal.num_bytes, lambda end: os.pread(descriptor, end, 0))
        finally:
            os.close(descriptor)


def _read_header(path: Path, size: int, head: Callable[[int], bytes]) -> dict[str, StoredTensor]:
    """Return what the header says of a file of ``size`` bytes, of which ``head`` returns the first so many.
    Raises DamagedError for what the format does not allow: tensors that overlap, bytes that are none's."""
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
