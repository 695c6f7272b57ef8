"""Expected: what is reserved for chunks that are not there yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gemini.chunk.chunk import ChunkKind, ChunkSpec
from gemini.errors import ConfigError
from gemini.system.config import format_bytes


class Expected:
    """Bytes of addresses and of places in the DISK file, by the kind of chunk; and addresses to spare, for
    chunks that nobody foresaw."""

    def __init__(self, specs: Sequence[ChunkSpec], spare_bytes: int) -> None:
        self._bytes: Counter[ChunkKind] = Counter()
        self._spare_bytes = spare_bytes
        self._add(specs)

    def refuse(self, nbytes: int) -> None:
        """Raise ConfigError where there are no addresses for further chunks of ``nbytes`` together."""
        if nbytes > self._spare_bytes:
            raise ConfigError(
                f"what came into the model needs addresses for {format_bytes(nbytes)}, and of those reserved "
                f"beside the model's at wrapping {format_bytes(self._spare_bytes)} are left; wrap the model "
                "anew, with all that it has now"
            )

    def add(self, specs: Sequence[ChunkSpec]) -> None:
        """Expect further chunks, for which there are addresses."""
        self._spare_bytes -= sum(spec.nbytes for spec in specs)
        self._add(specs)

    def bytes_of(self, specs: Sequence[ChunkSpec]) -> int:
        """Return what is reserved for ``specs``, if they come now."""
        wanted: Counter[ChunkKind] = Counter()
        for spec in specs:
            wanted[spec.kind] += spec.nbytes
        return (wanted & self._bytes).total()

    def take(self, spec: ChunkSpec) -> bool:
        """Say whether a chunk that comes now was expected; it is so no more."""
        if self._bytes[spec.kind] < spec.nbytes:
            return False
        self._bytes[spec.kind] -= spec.nbytes
        return True

    def _add(self, specs: Sequence[ChunkSpec]) -> None:
        for spec in specs:
            self._bytes[spec.kind] += spec.nbytes
