"""What the cases on a GPU that train a model have in common: what they train, tiny settings, their way to a
worker."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gemini_bench.llama import LLAMA_1B, LlamaConfig

TINY = LlamaConfig(vocab=1024, layers=8, hidden=256, heads=4, inner=688)
TINY_CHUNKS = {"search_range_mb": 1, "min_chunk_size_mb": 2}

_MIB = 2**20
_Settings = TypeVar("_Settings", bound="ModelSettings")


@dataclass(frozen=True)
class ModelSettings:
    """What is trained: sequences of ``seq`` tokens. ``keywords``: further ones of GeminiDDP."""

    model: LlamaConfig = LLAMA_1B
    batch: int = 4
    seq: int = 1024
    keywords: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_options(cls: type[_Settings], options: Mapping[str, Any]) -> _Settings:
        """Return the settings that travelled to a worker as a plain dict, maybe among other options."""
        values = {each.name: options[each.name] for each in dataclasses.fields(cls)}
        return cls(**{**values, "model": LlamaConfig(**values["model"])})


@dataclass(frozen=True)
class LinkSettings(ModelSettings):
    """The links are measured, too: ``link_bytes`` in chunks of ``link_chunk_bytes``, so many times."""

    link_chunk_bytes: int = 64 * _MIB
    link_bytes: int = 1024 * _MIB
    link_repeats: int = 7


TINY_LINKS: dict[str, Any] = {
    "link_chunk_bytes": 2 * _MIB,
    "link_bytes": 8 * _MIB,
    "link_repeats": 2,
}
