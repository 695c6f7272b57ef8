"""One file or a directory of files, and what they are called."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gemini.errors import ConfigError
from gemini.parallel.booster.checkpoint.tensor_source import TensorSource

_MIB = 2**20


@dataclass(frozen=True)
class Layout:
    """``shard_bytes`` is the largest size of a file in a directory; None is one file and no directory."""

    shard_bytes: int | None
    prefix: str

    def index_name(self, kind: str) -> str:
        """Return the name of the file that says which file holds what; ``kind`` is ``"model"`` for
        example."""
        return f"{self.prefix}{kind}.safetensors.index.json"

    def shard_name(self, kind: str, generation: int, number: int, count: int) -> str:
        """Return the name of a file, as transformers calls it unless an earlier save has the name."""
        again = f"-{generation}" if generation else ""
        return f"{self.prefix}{kind}{again}-{number + 1:05d}-of-{count:05d}.safetensors"

    def own_names(self, kind: str) -> re.Pattern[str]:
        """Return what matches every name of :meth:`shard_name`, and its temporary name."""
        return re.compile(
            rf"{re.escape(self.prefix + kind)}(-\d+)?-\d{{5,}}-of-\d{{5,}}\.safetensors(\.tmp)?"
        )


def layout(shard: bool, prefix: str | None, size_per_shard: int) -> Layout:
    """Return the layout that the arguments of a save ask for.

    Raises:
        ConfigError: they contradict each other, or a name or size cannot be.
    """
    if prefix and not shard:
        raise ConfigError(
            f"prefix={prefix!r} names the files of a directory; pass shard=True, or put it into the path"
        )
    if prefix and ("/" in prefix or prefix.startswith(".")):
        raise ConfigError(f"prefix is {prefix!r}; it is the beginning of a file name")
    if not size_per_shard > 0:
        raise ConfigError(f"size_per_shard is {size_per_shard}; it is a number of MB above 0")
    return Layout(int(size_per_shard * _MIB) if shard else None, f"{prefix}." if prefix else "")


def require_true(name: str, value: bool, reason: str) -> None:
    """Raise ConfigError for an argument that has one value only."""
    if not value:
        raise ConfigError(f"{name}=False is not supported: {reason}; leave it out")


def split(sources: Sequence[TensorSource], shard_bytes: int) -> list[list[TensorSource]]:
    """Return ``sources`` in groups of at most ``shard_bytes``; one that is larger is alone. At least one
    group."""
    shards: list[list[TensorSource]] = [[]]
    room = shard_bytes
    for source in sources:
        if shards[-1] and source.spec.nbytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(source)
        room -= source.spec.nbytes
    return shards
