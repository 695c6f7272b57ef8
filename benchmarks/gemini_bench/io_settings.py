"""What the cases of ``gemini bench io`` are run with."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gemini.errors import ConfigError
from gemini.offload.async_file import BLOCK_BYTES

_MIB = 2**20


@dataclass(frozen=True)
class Settings:
    """Sizes in bytes. Every contender moves ``size_bytes`` through a buffer used round and round.

    ``repeats``: rounds that count. ``depth``: requests of ``block_bytes`` at the device at one time.
    ``memory_bytes``: size of the file on tmpfs.

    Raises:
        ConfigError: a value that cannot be measured with.
    """

    size_bytes: int = 4096 * _MIB
    repeats: int = 7
    block_bytes: int = _MIB
    depth: int = 8
    buffer_bytes: int = 64 * _MIB
    memory_bytes: int = 1024 * _MIB

    def __post_init__(self) -> None:
        for name in ("repeats", "depth"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} is {getattr(self, name)}; it must be 1 or more")
        if self.block_bytes < BLOCK_BYTES or self.block_bytes % BLOCK_BYTES:
            raise ConfigError(f"--block is {self.block_bytes} bytes; it must be a multiple of {BLOCK_BYTES}")
        if self.size_bytes < self.block_bytes or self.size_bytes % self.block_bytes:
            raise ConfigError(
                f"--size is {self.size_bytes} bytes; it must be a multiple of --block ({self.block_bytes})"
            )

    def buffer(self) -> int:
        """Return the bytes of the buffer: whole blocks, at least one for each request at the device."""
        blocks = max(self.depth, min(self.buffer_bytes, self.size_bytes) // self.block_bytes)
        return blocks * self.block_bytes

    def on_tmpfs(self) -> Settings:
        """Return these settings with the size of the file on tmpfs, in whole blocks."""
        size = min(self.memory_bytes, self.size_bytes) // self.block_bytes * self.block_bytes
        return dataclasses.replace(self, size_bytes=max(size, self.block_bytes))

    def to_options(self, **more: Any) -> dict[str, Any]:
        """Return what a worker gets."""
        return {"settings": dataclasses.asdict(self), **more}

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Settings:
        """Return what ``to_options`` was called on."""
        return cls(**options["settings"])


QUICK = Settings(
    size_bytes=16 * _MIB,
    repeats=1,
    block_bytes=_MIB // 4,
    depth=4,
    buffer_bytes=4 * _MIB,
    memory_bytes=16 * _MIB,
)


def pieces(size_bytes: int, piece_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut a file into pieces, in order: offset and bytes of each; the last may be shorter."""
    for offset in range(0, size_bytes, piece_bytes):
        yield offset, min(piece_bytes, size_bytes - offset)
