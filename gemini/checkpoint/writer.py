"""A checkpoint being written: every rank its states, all of them the weights, one the manifest, last."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from gemini.checkpoint import contents
from gemini.checkpoint.checksum import Part, parts_of
from gemini.checkpoint.directory import (
    SAVE_CHARACTERS,
    Keep,
    check_keep,
    encoded,
    found_in,
    new_save,
    partial_checkpoint,
    prune,
    publish,
    read_json,
    saving_in,
    seal,
)
from gemini.checkpoint.sealed_file import Staging, sealed, write_sealed
from gemini.checkpoint.structure import Ranges, check_values, kept_states
from gemini.checkpoint.tensor_file import TensorFile, TensorSpec, write_tensors
from gemini.comm.ranks import Rank
from gemini.errors import CheckpointError

Range = tuple[int, int, str, str]  # first and last element, file, name of the tensor in it


class CheckpointWriter:
    """What one rank writes. Fill the files that :meth:`add_file` returns; leaving the block seals them.

    ``states[state][parameter]`` says where ranges of flat parameters went, ``weights[name]`` where whole
    weights did.
    """

    def __init__(self, path: Path, rank: Rank, save: str) -> None:
        """``save``: the identity of this save, which all ranks and all parts have."""
        self.path = path
        self.rank = rank
        self.save = save
        self.final = path
        self.manifest: Mapping[str, Any] = {}
        self.rng: Mapping[str, Any] = {}
        self.weights: dict[str, str] = {}
        self.states: dict[str, dict[str, list[Range]]] = {}
        self._weight_bytes = 0
        self._staging = Staging()
        self._open: dict[str, TensorFile] = {}
        self._written: dict[str, list[Part]] = {}

    def describe(self, manifest: Mapping[str, Any], rng: Mapping[str, Any]) -> None:
        """Take what the manifest says besides files, of which rank 0's counts, and this rank's generators."""
        self.manifest, self.rng = manifest, rng

    def add_file(
        self, name: str, tensors: Sequence[TensorSpec], metadata: Mapping[str, str] | None = None
    ) -> TensorFile:
        """Return a new file with room for ``tensors``, all of which must be written."""
        self._open[name] = TensorFile(self.path / name, tensors, metadata or {}, self._staging)
        return self._open[name]

    def add_weights(
        self, name: str, tensors: Sequence[TensorSpec], metadata: Mapping[str, str], *, leads: bool = True
    ) -> TensorFile:
        """Return a file with room for whole weights, to which several ranks write, other elements each; one
        of them ``leads``: it is the one that says what is in the file."""
        if leads:
            self.weights.update((tensor.name, name) for tensor in tensors)
            self._weight_bytes += sum(tensor.nbytes for tensor in tensors)
        self._open[name] = TensorFile(
            self.path / name,
            tensors,
            metadata,
            self._staging,
            shared=True,
            leads=leads,
            several_hosts=self.rank.several_hosts,
        )
        return self._open[name]

    def add_buffers(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write ordinary tensors of the model's state."""
        self.weights.update(dict.fromkeys(tensors, name))
        self._weight_bytes += sum(tensor.nbytes for tensor in tensors.values())
        self._written[name] = write_tensors(self.path / name, tensors, self._staging)

    def finish_part(self) -> str:
        """Make all files durable and write down what they hold."""
        for name in list(self._open):
            self._written[name] = self._open.pop(name).finish()
        document = {
            "files": self._written,
            "weights": self.weights,
            "weight_bytes": self._weight_bytes,
            "states": self.states,
            "rng": self.rng,
        }
        write_sealed(self.path / contents.part_file(self.rank.index, self.rank.count), encoded(document))
        return ""

    def close(self) -> None:
        """Close what is still open, unfinished. Idempotent."""
        for file in self._open.values():
            file.close()
        self._open.clear()
        self._staging.close()


@contextmanager
def new_checkpoint(
    directory: str | os.PathLike[str], step: int, *, rank: Rank | None = None, keep: int = 2
) -> Iterator[CheckpointWriter]:
    """Yield what to write one rank's files with; on leaving the block the checkpoint is complete everywhere.

    All ranks call it together. Where the block raises on one of them it raises on all, what was written is
    removed and the earlier checkpoints stay. Parts of a model go each to a directory: all are complete before
    one of them has its name, and all have theirs before an older one is removed.

    Raises:
        IoError: the directory cannot be written.
        CheckpointError: another process is saving there, or another rank failed.
    """
    check_keep(keep)
    rank = rank or Rank()
    rank.require_same_directory(directory)
    stays = _kept(rank, Path(directory), keep)
    with ExitStack() as stack:

        def begin() -> str:
            if rank.index:
                return ""
            return new_save() + str(stack.enter_context(partial_checkpoint(directory, step, stays)))

        begun = [texts[0] for texts in rank.collect_parts(begin)]
        path = Path(begun[rank.part][SAVE_CHARACTERS:])
        writer = CheckpointWriter(path, rank, begun[0][:SAVE_CHARACTERS])
        try:
            yield writer
        except BaseException as error:
            rank.tell_failure(error)
            raise
        else:
            rank.agree(writer.finish_part)
        finally:
            writer.close()
        _lead(rank, lambda: _seal(writer))
        writer.final = Path(_lead(rank, lambda: publish(path)))
        stays = _kept(rank, path.parent, keep)
        _lead(rank, lambda: prune(path.parent, stays))


def _lead(rank: Rank, action: Callable[[], object]) -> str:
    """Run ``action`` on rank 0; return what it returned, as text, on all of them once it has succeeded."""
    return rank.agree(lambda: "" if rank.index else str(action()))


def _kept(rank: Rank, root: Path, number: int) -> Keep:
    """Return which checkpoints stay, here and in the directories of the other parts."""
    if rank.parts is None:
        return Keep(number)

    def saves() -> str:
        with saving_in(root):
            return "" if rank.index else json.dumps([found.save for found in found_in(root) if found.save])

    held = [set(json.loads(texts[0])) for texts in rank.collect_parts(saves)]
    return Keep(number, frozenset(set.intersection(*held)))


def _seal(writer: CheckpointWriter) -> None:
    """Put together what the ranks wrote, and make it complete."""
    written: dict[str, list[Part]] = {}
    weights: dict[str, str] = {}
    states: Ranges = {state: {} for state in kept_states(writer.manifest)}
    total = 0
    for index in range(writer.rank.count):
        name = contents.part_file(index, writer.rank.count)
        part = read_json(writer.path / name)
        raw = (writer.path / name).read_bytes()
        for file, runs in part["files"].items():
            written.setdefault(file, []).extend(Part(*run) for run in runs)
        written[name] = parts_of(memoryview(raw), 0)
        weights.update(part["weights"])
        total += part["weight_bytes"]
        for state, ranges in part["states"].items():
            for param, found in ranges.items():
                states[state].setdefault(param, []).extend(found)
    _check(writer.manifest, weights, states)
    files = {name: sealed(writer.path / name, parts) for name, parts in written.items()}
    for name, document in (
        (contents.MODEL_INDEX, {"metadata": {"total_size": total}, "weight_map": weights}),
        (contents.OPTIMIZER_INDEX, {"states": states}),
    ):
        files[name] = write_sealed(writer.path / name, encoded(document))
    manifest = {**writer.manifest, "ranks": writer.rank.count, "files": files}
    if writer.rank.parts is not None:
        manifest["part"] = contents.part_of(writer.rank)
    seal(writer.path, manifest, writer.save)


def _check(manifest: Mapping[str, Any], weights: Mapping[str, str], states: Ranges) -> None:
    """Raise CheckpointError unless every weight is there, and every element of a state once; sort ranges."""
    for ranges in states.values():
        for found in ranges.values():
            found.sort()
    try:
        check_values(manifest, weights, states)
    except ValueError as error:
        raise CheckpointError(f"what was to be saved is not all there: {error}") from error
