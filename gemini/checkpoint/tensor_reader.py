"""Reading safetensors files piece by piece into memory of bounded size.

The library maps whole files, and what is touched of them counts as the process's memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from gemini.checkpoint.part import BLOCK_BYTES
from gemini.checkpoint.read_ahead import BlockFile, ReadAhead
from gemini.checkpoint.sealed_file import DamagedError, Seal
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
        path, size = self._file.path, self._file.seal.num_bytes
        num_bytes = int.from_bytes(self._file.head(min(8, size)), "little")
        if num_bytes > min(_MAX_HEADER_BYTES, size - 8):
            raise DamagedError(f"{path} is damaged: its header would have {num_bytes} bytes")
        text = self._file.head(8 + num_bytes)[8:]
        found = {}
        try:
            entries = json.loads(text)
            entries.pop("__metadata__", None)
            for name, entry in entries.items():
                begin, end = entry["data_offsets"]
                stored = StoredTensor(_TYPES[entry["dtype"]], tuple(entry["shape"]), 8 + num_bytes + begin)
                nbytes = stored.numel * stored.dtype.itemsize
                if begin < 0 or end - begin != nbytes or stored.begin + nbytes > size:
                    raise ValueError(f"{name!r} lies outside")
                found[name] = stored
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedError(f"{path} is damaged: {error!r}") from error
        return found

    def _bytes(
        self, offset: int, count: int, read_on: bool
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        """Return at most ``count`` bytes of the file, whole elements, from ``offset`` on. Blocks after them
        are read meanwhile if ``read_on``."""
        index, first = divmod(offset, BLOCK_BYTES)
        stop = None if read_on else -(-(offset + count) // BLOCK_BYTES)
        return self._file.block(index, stop)[first : first + count]
