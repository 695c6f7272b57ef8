"""Reading safetensors files piece by piece into memory of bounded size.

The library maps whole files, and what is touched of them counts as the process's memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from gemini.checkpoint.read_ahead import BLOCK_BYTES, ReadAhead, open_direct
from gemini.checkpoint.sealed_file import DamagedError
from gemini.checkpoint.tensor_file import TYPE_NAMES

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


class TensorReader:
    """The tensors of one safetensors file, best read in their order in it. Not thread-safe; close it.

    Raises:
        DamagedError: it cannot be opened or read, or is no such file.
    """

    def __init__(self, path: Path, ahead: ReadAhead) -> None:
        """``ahead``: what values are read with."""
        self.path = path
        self._ahead = ahead
        try:
            with path.open("rb") as file:
                self._size = os.fstat(file.fileno()).st_size
                self.tensors = self._read_header(file)
            self._descriptor = open_direct(path)
        except OSError as error:
            raise DamagedError(f"cannot read {path}: {error.strerror}") from error

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
        while first < last:
            raw = self._bytes(stored.begin + first * size, (last - first) * size)
            yield first, torch.from_numpy(raw).view(stored.dtype)
            first += len(raw) // size

    def read(self, name: str, first: int = 0, count: int | None = None) -> torch.Tensor:
        """Return a copy of what :meth:`pieces` yields."""
        stored = self.tensors[name]
        values = torch.empty(stored.numel - first if count is None else count, dtype=stored.dtype)
        for at, piece in self.pieces(name, first, count):
            values[at - first : at - first + piece.numel()] = piece
        return values

    def whole(self, name: str) -> torch.Tensor:
        """Return a copy of ``name`` in its shape."""
        return self.read(name).reshape(self.tensors[name].shape)

    def close(self) -> None:
        """Close the file. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            self._ahead.forget(descriptor)
            os.close(descriptor)

    def _read_header(self, file: BinaryIO) -> dict[str, StoredTensor]:
        num_bytes = int.from_bytes(file.read(8), "little")
        if num_bytes > min(_MAX_HEADER_BYTES, self._size - 8):
            raise DamagedError(f"{self.path} is damaged: its header would have {num_bytes} bytes")
        text = file.read(num_bytes)
        found = {}
        try:
            entries = json.loads(text)
            entries.pop("__metadata__", None)
            for name, entry in entries.items():
                begin, end = entry["data_offsets"]
                stored = StoredTensor(_TYPES[entry["dtype"]], tuple(entry["shape"]), 8 + num_bytes + begin)
                nbytes = stored.numel * stored.dtype.itemsize
                if begin < 0 or end - begin != nbytes or stored.begin + nbytes > self._size:
                    raise ValueError(f"{name!r} lies outside")
                found[name] = stored
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedError(f"{self.path} is damaged: {error!r}") from error
        return found

    def _bytes(self, offset: int, count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        """Return at most ``count`` bytes of the file, whole elements, from ``offset`` on."""
        index, first = divmod(offset, BLOCK_BYTES)
        try:
            block = self._ahead.block(self._descriptor, index, self._size)
        except OSError as error:
            raise DamagedError(f"cannot read {self.path}: {error.strerror}") from error
        found = block[first : first + count]
        if len(found) < min(count, BLOCK_BYTES - first):
            raise DamagedError(f"{self.path} is damaged: it ends at byte {offset + len(found)}")
        return found
