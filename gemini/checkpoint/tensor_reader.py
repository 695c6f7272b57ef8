"""Reading safetensors files piece by piece into memory of bounded size.

The library maps whole files, and what is touched of them counts as the process's memory.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

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
    """The tensors of one safetensors file. Not thread-safe; close it.

    Raises:
        DamagedError: it cannot be opened or read, or is no such file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DamagedError(f"cannot read {path}: {error.strerror}") from error
        try:
            self.tensors = self._read_header()
        except BaseException:
            self.close()
            raise

    def read(self, name: str, first: int = 0, count: int | None = None) -> torch.Tensor:
        """Return a copy of ``count`` elements of ``name`` from ``first``, flat; None: to its end."""
        stored = self.tensors[name]
        count = stored.numel - first if count is None else count
        assert 0 <= first <= first + count <= stored.numel, name
        values = torch.empty(count, dtype=stored.dtype)
        if count:
            self._fill(values.view(torch.uint8).numpy(), stored.begin + first * stored.dtype.itemsize)
        return values

    def whole(self, name: str) -> torch.Tensor:
        """Return a copy of ``name`` in its shape."""
        return self.read(name).reshape(self.tensors[name].shape)

    def close(self) -> None:
        """Close the file. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _read_header(self) -> dict[str, StoredTensor]:
        length = np.empty(8, dtype=np.uint8)
        self._fill(length, 0)
        num_bytes = int.from_bytes(length.tobytes(), "little")
        size = os.fstat(self._descriptor).st_size
        if num_bytes > min(_MAX_HEADER_BYTES, size - 8):
            raise DamagedError(f"{self.path} is damaged: its header would have {num_bytes} bytes")
        text = np.empty(num_bytes, dtype=np.uint8)
        self._fill(text, 8)
        found = {}
        try:
            entries = json.loads(text.tobytes())
            entries.pop("__metadata__", None)
            for name, entry in entries.items():
                begin, end = entry["data_offsets"]
                stored = StoredTensor(_TYPES[entry["dtype"]], tuple(entry["shape"]), 8 + num_bytes + begin)
                nbytes = stored.numel * stored.dtype.itemsize
                if begin < 0 or end - begin != nbytes or stored.begin + nbytes > size:
                    raise ValueError(f"{name!r} lies outside")
                found[name] = stored
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedError(f"{self.path} is damaged: {error!r}") from error
        return found

    def _fill(self, buffer: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], offset: int) -> None:
        rest = buffer.data
        while rest:
            try:
                count = os.preadv(self._descriptor, [rest], offset)
            except OSError as error:
                raise DamagedError(f"cannot read {self.path}: {error.strerror}") from error
            if count == 0:
                raise DamagedError(f"{self.path} is damaged: it ends at byte {offset}")
            rest, offset = rest[count:], offset + count
