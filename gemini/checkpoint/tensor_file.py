"""Safetensors files whose tensors are written piece by piece, in any order: extra memory none.

The safetensors library writes whole dictionaries of tensors; here the values pass straight from a pinned
chunk, or from staging, to the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch

from gemini.checkpoint.checksum import Part
from gemini.checkpoint.sealed_file import SealedFile, Staging
from gemini.checkpoint.structure import is_text
from gemini.errors import CheckpointError

# What the safetensors library here reads and writes: more types with each of its releases.
TYPE_NAMES: dict[torch.dtype, str] = {
    dtype: name for name, dtype in safetensors.torch._TYPES.items() if dtype is not None
}
_METADATA = "__metadata__"
_ALIGN = 4096  # of the first tensor in the file: memory that starts on a page is written from where it is


def hold_the_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have equal values, of whatever types; NaN equals NaN."""
    if one.shape != other.shape:
        return False
    if one.dtype == other.dtype and torch.equal(_bytes(one), _bytes(other)):
        return True
    wide = torch.complex128 if one.is_complex() or other.is_complex() else torch.float64
    first, second = one.to(wide), other.to(wide)
    return bool(((first == second) | (first.isnan() & second.isnan())).all())


def values_differ(where: object, one: str, other: str) -> CheckpointError:
    """Return what to raise where files hold two names of one tied tensor with different values."""
    return CheckpointError(
        f"{where} holds {one!r} and {other!r} with different values, but they are one tied tensor of the "
        "model: leave one of the two names out of the files, or build the model without tying them"
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that a file is to hold, its elements in row order."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """A new safetensors file with room for given tensors. Errors are those of :class:`SealedFile`."""

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
        """Create the file, to be written through ``staging``, and write its header. Where it is ``shared``,
        several processes do, each for other elements; the one that ``leads`` writes the header;
        ``several_hosts``: they are not all on this machine. ``private``: as of :class:`SealedFile`.

        Raises:
            CheckpointError: a tensor has a type or a name that the format does not know.
        """
        ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)  # keeps every tensor aligned
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
        """Write ``values`` (of the tensor's type, taken in row order) from element ``first`` of ``name``.

        They are used before this returns. Every element must be written once.
        """
        if values.numel():
            self._file.write(*self._run(name, first, values))

    def lend(self, name: str, first: int, values: torch.Tensor) -> None:
        """Write ``values`` as :meth:`write` does; they stay as they are until :meth:`settle` has returned."""
        if values.numel():
            self._file.lend(*self._run(name, first, values))

    def settle(self) -> None:
        """Wait until nothing that was lent is in use any more."""
        self._file.settle()

    def offset(self, name: str, first: int) -> int:
        """Return where in the file element ``first`` of ``name`` lies."""
        tensor, begin = self._places[name]
        return begin + first * tensor.dtype.itemsize

    def finish(self) -> list[Part]:
        """Make the file durable, close it and return what was written here."""
        return self._file.finish()

    def close(self) -> None:
        """Close the file, finished or not. Idempotent."""
        self._file.close()

    def _run(self, name: str, first: int, values: torch.Tensor) -> tuple[memoryview, int]:
        """Return the bytes of ``values`` and where in the file they belong."""
        assert values.dtype == self._places[name][0].dtype, name
        # A view may say that its elements are conjugated, or negated, which its memory does not.
        values = values.resolve_conj().resolve_neg()
        raw = values.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data
        return raw, self.offset(name, first)


@contextmanager
def settled(files: Iterable[TensorFile]) -> Iterator[None]:
    """Wait at the end of the block, whatever comes, until nothing that was lent to ``files`` is in use."""
    with ExitStack() as stack:
        for file in set(files):
            stack.callback(file.settle)
        yield


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], staging: Staging) -> list[Part]:
    """Write a file of ordinary tensors; return what was written."""
    specs = [TensorSpec(name, value.dtype, tuple(value.shape)) for name, value in tensors.items()]
    file = TensorFile(path, specs, {}, staging)
    try:
        for name, value in tensors.items():
            file.write(name, 0, value.detach())
        return file.finish()
    finally:
        file.close()


def require_holdable(tensors: Sequence[TensorSpec], metadata: Mapping[str, str] | None = None) -> None:
    """Raise CheckpointError, which says the way out, for a type or a name that the format does not know."""
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
    """Raise CheckpointError for a tensor that is no array of elements."""
    if tensor.layout != torch.strided:
        raise CheckpointError(
            f"{name!r} is {tensor.layout}, which a safetensors file cannot hold: keep its parts (indices and "
            "values) in buffers, or it out of the state with register_buffer(..., persistent=False)"
        )


def _header(tensors: Sequence[TensorSpec], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """Return the bytes before the tensors, and where in the file each tensor begins."""
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
