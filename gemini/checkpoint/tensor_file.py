"""Safetensors files written one tensor at a time, each one piece at a time: extra memory none.

The safetensors library writes whole dictionaries of tensors; here the values pass straight from a pinned
chunk to the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gemini.checkpoint.sealed_file import SealedFile
from gemini.errors import CheckpointError

_TYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGN = 8

Sink = Callable[[torch.Tensor], None]


@dataclass(frozen=True)
class TensorSource:
    """A tensor to be written: ``stream(sink)`` hands its elements, row by row, to ``sink`` piece by piece.

    A piece is used before ``sink`` returns; it may be a view of memory that is only borrowed.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stream: Callable[[Sink], None]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def resident_source(name: str, tensor: torch.Tensor) -> TensorSource:
    """Return the source of an ordinary tensor."""
    return TensorSource(name, tensor.dtype, tuple(tensor.shape), lambda sink: sink(tensor.detach()))


def write_tensors(file: SealedFile, sources: Sequence[TensorSource], metadata: dict[str, str]) -> None:
    """Write ``sources`` to an empty ``file`` in the safetensors format.

    Raises:
        CheckpointError: a tensor has a type that the format does not know.
        IoError: the file cannot be written.
    """
    ordered = sorted(sources, key=lambda source: -source.dtype.itemsize)  # keeps every tensor aligned
    file.write(_header(ordered, {"format": "pt", **metadata}))
    for source in ordered:
        begin = file.num_bytes

        def sink(piece: torch.Tensor, dtype: torch.dtype = source.dtype) -> None:
            assert piece.dtype == dtype
            if piece.numel() > 0:
                flat = piece.contiguous().reshape(-1).view(torch.uint8)
                file.write(flat.numpy().data)

        source.stream(sink)
        assert file.num_bytes - begin == source.nbytes, source.name


def _header(sources: Sequence[TensorSource], metadata: dict[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for source in sources:
        if source.dtype not in _TYPE_NAMES:
            raise CheckpointError(f"{source.name!r} is {source.dtype}, which a safetensors file cannot hold")
        entries[source.name] = {
            "dtype": _TYPE_NAMES[source.dtype],
            "shape": list(source.shape),
            "data_offsets": [offset, offset + source.nbytes],
        }
        offset += source.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % _ALIGN)
    return len(text).to_bytes(8, "little") + text
