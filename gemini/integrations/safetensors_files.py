"""Safetensors files of a model, one tensor read at a time: what the library maps counts as the process's
memory."""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from gemini.checkpoint.tensor_file import TYPE_NAMES, hold_the_same
from gemini.errors import CheckpointError, in_words
from gemini.integrations.tensor_reads import TensorReads
from gemini.system.files import open_regular, parse_json, read_regular

_SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_AGAIN = "copy or download the file again"
_MAX_INDEX_BYTES = 2**26
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
        """Return a copy of the tensor, or a part of one."""
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
                raise CheckpointError(f"{file} does not hold {name!r}, as the index says")

    @classmethod
    def of_directory(cls, directory: Path) -> SafetensorsFiles:
        """Open a model's files in ``directory``: one, or shards with an index. Raises as the class."""
        index, single = directory / INDEX, directory / _SINGLE
        if index.is_file():
            named = read_index(index)
            paths = [directory / file for file in sorted(set(named.values()))]
            if any(path.parent != directory for path in paths):
                raise CheckpointError(f"{index} names files that are not next to it")
            return cls(paths, named)
        if not single.is_file():
            raise CheckpointError(
                f"{directory} holds neither {_SINGLE} nor {INDEX}; save the model with "
                "save_pretrained(), or give the directory that has its weights"
            )
        return cls([single])

    def _open(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt"):  # checks the header and the size
                pass
            descriptor = open_regular(path)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read {path}: {error}; {_AGAIN}") from error
        self._stack.callback(os.close, descriptor)
        head = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        entries: dict[str, Any] = json.loads(os.pread(descriptor, head, 8))
        entries.pop("__metadata__", None)
        types = _types()
        for name, entry in entries.items():
            if entry["dtype"] not in types:
                raise CheckpointError(f"{path}: {name!r} has type {entry['dtype']}, which torch has not")
            self._tensors[name] = StoredTensor(
                name,
                path,
                descriptor,
                entry["dtype"],
                types[entry["dtype"]],
                tuple(entry["shape"]),
                8 + head + entry["data_offsets"][0],
                self.reads,
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
        self.reads.close()
        self._stack.close()

    def __enter__(self) -> SafetensorsFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class StoredValues(Mapping[str, torch.Tensor]):
    """The same as tensors, each read anew at every use: what ``load_state_dict`` takes one by one."""

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


def read_index(path: Path) -> dict[str, str]:
    """Return the names of the files that tensors are in, by the tensors' names. Raises CheckpointError where
    the index at ``path`` does not say that."""
    try:
        named: dict[str, str] = parse_json(read_regular(path, _MAX_INDEX_BYTES))["weight_map"]
        if not all(isinstance(file, str) for file in named.values()):
            raise TypeError("a file's name is no text")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {in_words(error)}; {_AGAIN}") from error
    return named


def _types() -> dict[str, torch.dtype]:
    """Return torch's types by their names in the format."""
    return {name: dtype for dtype, name in TYPE_NAMES.items()}
