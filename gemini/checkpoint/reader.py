"""Reads parts of a complete checkpoint; the whole of it is never in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from gemini.checkpoint import contents, plain_data
from gemini.checkpoint.directory import MANIFEST, check_contents, read_json, read_manifest
from gemini.checkpoint.sealed_file import DamagedError, Seal, making_sense_of
from gemini.checkpoint.structure import (
    Ranges,
    StateArray,
    arrays_of,
    check_files,
    check_manifest,
    check_objects,
    check_tensors,
    check_values,
    expected_tensors,
    table,
)
from gemini.checkpoint.tensor_reader import ReadAhead, StoredTensor, TensorReader, stored_tensors
from gemini.errors import CheckpointError


class CheckpointReader:
    """Weights, states and settings of the checkpoint in a directory. Use as a context manager.

    ``weights``: file by name, buffers included. ``states[state][parameter]``: its ranges, as
    docs/notes/checkpoint.md has them. Nothing is returned of a block that is not what was written.

    Raises:
        DamagedError: a file is missing, has another size, what was to be read of it is damaged, or what the
            files say cannot be.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = read_manifest(path)
        with making_sense_of(path / contents.MODEL_INDEX):
            self.weights: dict[str, str] = self._json(contents.MODEL_INDEX)["weight_map"]
        with making_sense_of(path / contents.OPTIMIZER_INDEX):
            self.states: Ranges = self._json(contents.OPTIMIZER_INDEX)["states"]
        with making_sense_of(path):
            check_values(self.manifest, self.weights, self.states)
            check_manifest(self.manifest)
            self._expected = expected_tensors(self.manifest, self.weights, self.states)
            check_files(self.manifest, self._expected)
        self._files: dict[str, TensorReader] = {}
        self._ahead: ReadAhead | None = None

    def verify(self) -> None:
        """Read every file and compare its checksums, and its header with the indexes. Raises DamagedError
        naming the first that differs."""
        check_contents(self.path, self.manifest)
        self.check_headers()

    def check_headers(self, index: int = 0, count: int = 1) -> None:
        """Compare what says where values are: the first block of every file with weights; the ``index``-th of
        ``count`` parts of the headers of moments, and of what ranks wrote down. Raises DamagedError."""
        weights = set(self.weights.values())
        for file in sorted(weights):
            self._file(file)
        for file in sorted(self._expected.keys() - weights)[index::count]:
            # Its block is compared before a value of it is used; reading it here, too, would double that.
            self._check_tensors(file, stored_tensors(self.path / file, self._seal(file)))
        saved = self.manifest["ranks"]
        for rank in range(saved)[index::count]:
            self._json(contents.part_file(rank, saved))

    def objects(self) -> dict[str, Any]:
        """Return param groups, the scheduler's state and extra states as they were saved."""
        with making_sense_of(self.path / MANIFEST):
            try:
                found = {name: plain_data.decode(data) for name, data in self.manifest["objects"].items()}
            except CheckpointError as error:
                raise ValueError(str(error)) from error
            check_objects(found, self.manifest)
        return found

    def rng(self, rank: int = 0, num_ranks: int = 1) -> dict[str, Any]:
        """Return the random number generators' states of a rank; of rank 0 where there were other ranks."""
        saved = self.manifest["ranks"]
        file = contents.part_file(rank if saved == num_ranks else 0, saved)
        with making_sense_of(self.path / file):
            return table(self._json(file)["rng"])

    def weight(self, name: str) -> torch.Tensor:
        """Return a copy of a weight or buffer."""
        return self._file(self.weights[name]).whole(name)

    def weight_pieces(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first element, values) of a weight, flat, in row order; valid until the next."""
        return self._file(self.weights[name]).pieces(name)

    def spec(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return type and shape of a weight or buffer."""
        stored = self._file(self.weights[name]).tensors[name]
        return stored.dtype, stored.shape

    def stride(self, param: str) -> tuple[int, ...]:
        """Return the stride, in elements, that the order of a parameter's flat states follows."""
        return tuple(self.manifest["parameters"][param]["stride"])

    def arrays(self, param: str) -> dict[str, StateArray]:
        """Return what there is of the states of a parameter."""
        return arrays_of(self.manifest, param)

    def state_pieces(
        self, state: str, param: str, start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (number of the first, values) of values ``[start, stop)`` of a flat state, from
        any rank's files; each is valid until the next."""
        for first, last, file, name in self.states[state].get(param, ()):  # none: it has no elements
            begin, end = max(start, first), last if stop is None else min(stop, last)
            if begin < end:
                for at, values in self._file(file).pieces(name, begin - first, end - begin):
                    yield first + at, values

    def state(self, state: str, param: str) -> torch.Tensor:
        """Return a copy of a parameter's state in the parameter's shape and memory order, or of the values of
        its blocks, flat."""
        array = self.arrays(param)[state]
        shape = self.manifest["parameters"][param]["shape"]
        if array.per_block:
            full = torch.empty(array.numel(math.prod(shape)), dtype=array.dtype, device="cpu")
        else:
            full = torch.empty_strided(shape, self.stride(param), dtype=array.dtype, device="cpu")
        flat = torch.as_strided(full, (full.numel(),), (1,))
        for first, values in self.state_pieces(state, param):
            flat[first : first + values.numel()] = values
        return full

    def close(self) -> None:
        """Close all files. Idempotent."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _file(self, name: str) -> TensorReader:
        if name not in self._files:
            self._ahead = self._ahead or ReadAhead()
            file = TensorReader(self.path / name, self._seal(name), self._ahead)
            self._files[name] = file
            self._check_tensors(name, file.tensors)
        return self._files[name]

    def _check_tensors(self, name: str, held: Mapping[str, StoredTensor]) -> None:
        with making_sense_of(self.path / name):
            kinds = {tensor: (stored.dtype, stored.shape) for tensor, stored in held.items()}
            check_tensors(kinds, self._expected[name])

    def _json(self, name: str) -> dict[str, Any]:
        return read_json(self.path / name, self._seal(name))

    def _seal(self, name: str) -> Seal:
        if name not in self.manifest["files"]:
            raise DamagedError(f"{self.path} has no file {name!r}, which one of its indexes names")
        return Seal.read(self.manifest["files"][name])
