"""Write a file, or a directory of files, from tensors that all ranks contribute to. The result is complete or
absent, and every rank or no rank raises.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from gemini.checkpoint.sealed_file import Staging, write_sealed
from gemini.checkpoint.tensor_file import TensorFile, require_holdable
from gemini.errors import CheckpointError, ConfigError, GeminiError, IoError
from gemini.parallel.booster.checkpoint.tensor_source import TensorSource
from gemini.parallel.booster.ranks import Ranks
from gemini.system.durable import rename

logger = logging.getLogger(__name__)


_MIB = 2**20


@dataclass(frozen=True)
class FileLayout:
    """The files to write. ``shard_bytes`` is the largest size of a file in a directory; None means one file
    and no directory. ``prefix`` begins the names of files.
    """

    shard_bytes: int | None
    prefix: str

    def index_name(self, kind: str) -> str:
        """Return the name of the index, which maps tensors to files; ``kind`` is for example ``"model"``."""
        return f"{self.prefix}{kind}.safetensors.index.json"

    def shard_name(self, kind: str, generation: int, number: int, count: int) -> str:
        """Return the name of a file in transformers' format, numbered if an earlier save has that name."""
        again = f"-{generation}" if generation else ""
        return f"{self.prefix}{kind}{again}-{number + 1:05d}-of-{count:05d}.safetensors"

    def own_names(self, kind: str) -> re.Pattern[str]:
        """Return a pattern that matches every :meth:`shard_name` and its temporary name."""
        return re.compile(
            rf"{re.escape(self.prefix + kind)}(-\d+)?-\d{{5,}}-of-\d{{5,}}\.safetensors(\.tmp)?"
        )


def layout(shard: bool, prefix: str | None, size_per_shard: int) -> FileLayout:
    """Return the layout for the arguments of a save.

    Raises:
        ConfigError: they contradict each other, or a name or size is impossible.
    """
    if prefix and not shard:
        raise ConfigError(
            f"prefix={prefix!r} names the files of a directory; pass shard=True, or put the prefix into the "
            "path"
        )
    if prefix and ("/" in prefix or prefix.startswith(".")):
        raise ConfigError(f"prefix is {prefix!r}; give the beginning of a file name, without directories")
    if not size_per_shard > 0:
        raise ConfigError(f"size_per_shard is {size_per_shard}; give a number of MB above 0")
    return FileLayout(int(size_per_shard * _MIB) if shard else None, f"{prefix}." if prefix else "")


def require_true(name: str, value: bool, reason: str) -> None:
    """Raise ConfigError for an argument that must be True."""
    if not value:
        raise ConfigError(f"{name}=False is not supported: {reason}; leave it out")


def split(sources: Sequence[TensorSource], shard_bytes: int) -> list[list[TensorSource]]:
    """Split ``sources`` into groups of at most ``shard_bytes``. A larger one forms a group of its own.
    Returns at least one group.
    """
    shards: list[list[TensorSource]] = [[]]
    room = shard_bytes
    for source in sources:
        if shards[-1] and source.spec.nbytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(source)
        room -= source.spec.nbytes
    return shards


def save_tensors(
    checkpoint: str | os.PathLike[str],
    kind: str,
    sources: Sequence[TensorSource],
    metadata: Mapping[str, str],
    layout: FileLayout,
    ranks: Ranks,
    companions: Mapping[str, str] | None = None,
) -> None:
    """Write ``sources`` and ``metadata`` by ``layout``. The previous checkpoint stays loadable until the end.

    Every rank runs the streams of all sources in the same order, because a stream may gather its tensor from
    all of them; the first rank writes. ``companions`` are further text files of a directory.

    Raises:
        IoError: the first rank cannot write; CheckpointError on the others.
        CheckpointError: a tensor has a type or a name that files cannot have, or the path is taken by
            something else.
    """
    require_holdable([source.spec for source in sources], metadata)
    files = _RankFiles(ranks)
    path = Path(checkpoint)
    if layout.shard_bytes is None:
        files.attempt(lambda: _check_is_file(path))
        files.write(path, sources, metadata)
    else:
        _write_directory(path, kind, split(sources, layout.shard_bytes), metadata, layout, files, companions)
    files.finish()


def save_text(path: str | os.PathLike[str], text: str, ranks: Ranks) -> None:
    """Write a text file from the first rank. Raises as :func:`save_tensors`."""
    files = _RankFiles(ranks)
    files.attempt(lambda: _check_is_file(Path(path)))
    files.attempt(lambda: _replace_text(Path(path), text))
    files.finish()


class _RankFiles:
    """The files of one save. If the first rank fails, it keeps its first error and continues with the
    streams, so that no rank waits for it; :meth:`finish` raises on all ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._error: GeminiError | None = None
        self._written: list[Path] = []

    def write(
        self, path: Path, sources: Sequence[TensorSource], metadata: Mapping[str, str], *, final: bool = True
    ) -> None:
        """Write a file of tensors under a temporary name; ``final`` also renames it."""
        temporary = _temporary(path)
        opened: list[TensorFile] = []

        def create() -> None:
            temporary.unlink(missing_ok=True)  # left over from a save that was killed
            self._written.append(temporary)
            specs = [source.spec for source in sources]
            staging = stack.enter_context(closing(Staging()))
            opened.append(stack.enter_context(closing(TensorFile(temporary, specs, metadata, staging))))

        try:
            with ExitStack() as stack:
                self.attempt(create)
                for source in sources:
                    self._stream(source, opened)
                for file in opened:
                    self.attempt(file.finish)
        except BaseException:  # ranks have lost each other in a stream: finish() will not be called
            self._remove_temporaries()
            raise
        if final:
            self.attempt(lambda: _publish(temporary, path))

    def _stream(self, source: TensorSource, opened: Sequence[TensorFile]) -> None:
        """Run a stream to its end; the first rank writes it into the open file."""
        count = 0

        def sink(piece: torch.Tensor) -> None:
            nonlocal count
            for file in opened:
                self.attempt(partial(file.write, source.spec.name, count, piece))
            count += piece.numel()

        source.stream(sink)

    def attempt(self, action: Callable[[], object]) -> None:
        """Run ``action`` on the first rank, unless something failed before."""
        if not self._ranks.is_first or self._error is not None:
            return
        try:
            action()
        except GeminiError as error:
            self._error = error
        except OSError as error:
            reason = error.strerror or str(error)
            self._error = IoError(
                error.errno or 0, f"cannot save the checkpoint: {reason}", str(error.filename or "")
            )

    def finish(self) -> None:
        """Raise the error on every rank if there is one, and remove incomplete files."""
        if self._error is not None:
            self._remove_temporaries()
        self._ranks.agree(self._error)

    def _remove_temporaries(self) -> None:
        for temporary in self._written:
            try:
                temporary.unlink(missing_ok=True)
            except OSError as error:
                logger.warning("%s could not be removed: %s", temporary, error)


def _write_directory(
    directory: Path,
    kind: str,
    shards: list[list[TensorSource]],
    metadata: Mapping[str, str],
    layout: FileLayout,
    files: _RankFiles,
    companions: Mapping[str, str] | None,
) -> None:
    """Write shards under unused names, then replace the index, then remove older shards."""
    files.attempt(lambda: _make_directory(directory))
    generations = [0]  # the first rank's value counts: only it writes
    files.attempt(lambda: generations.append(_free_generation(directory, kind, layout, len(shards))))
    names = [layout.shard_name(kind, generations[-1], number, len(shards)) for number in range(len(shards))]
    for number, (name, shard) in enumerate(zip(names, shards, strict=True)):
        files.write(directory / name, shard, metadata if number == 0 else {}, final=False)
    index = {
        "metadata": {
            **metadata,
            "total_size": sum(source.spec.nbytes for shard in shards for source in shard),
        },
        "weight_map": {
            source.spec.name: name for name, shard in zip(names, shards, strict=True) for source in shard
        },
    }

    def publish() -> None:
        for name in names:
            rename(_temporary(directory / name), directory / name)
        for name, text in (companions or {}).items():
            _replace_text(directory / name, text)
        # The shards must have their names durably before the index refers to them.
        _replace_text(directory / layout.index_name(kind), json.dumps(index, indent=1, sort_keys=True) + "\n")
        _remove_others(directory, layout.own_names(kind), set(names))

    files.attempt(publish)


def _free_generation(directory: Path, kind: str, layout: FileLayout, count: int) -> int:
    """Return the first number with which no shard name is taken."""
    generation = 0
    while any((directory / layout.shard_name(kind, generation, n, count)).exists() for n in range(count)):
        generation += 1
    return generation


def _remove_others(directory: Path, own_names: re.Pattern[str], keep: set[str]) -> None:
    try:
        for path in directory.iterdir():
            if own_names.fullmatch(path.name) and path.name not in keep:
                path.unlink()
    except OSError as error:
        logger.warning("%s is complete, but an older file could not be removed: %s", directory, error)


def _replace_text(path: Path, text: str) -> None:
    temporary = _temporary(path)
    temporary.unlink(missing_ok=True)
    try:
        write_sealed(temporary, text.encode())
        _publish(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _publish(temporary: Path, path: Path) -> None:
    rename(temporary, path)


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def _check_is_file(path: Path) -> None:
    if path.is_dir():
        raise CheckpointError(f"{path} is a directory; pass shard=True, or the path of a file")
    path.parent.mkdir(parents=True, exist_ok=True)


def _make_directory(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is a file, and shard=True writes a directory; choose another path")
    path.mkdir(parents=True, exist_ok=True)
