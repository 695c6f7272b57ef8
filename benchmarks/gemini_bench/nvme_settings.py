"""The settings of the cases of ``gemini bench nvme``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gemini.errors import ConfigError
from gemini.jobs.gpt.model import GPTConfig
from gemini_bench.trainee import GPT2_124M

STATE_BYTES = 8  # of a parameter: two fp32 moments
_MIB = 2**20


@dataclass(frozen=True)
class Settings:
    """The job, how often it is measured, and sizes.

    A process takes ``warmup_steps``, then ``blocks`` times one step that does not count and ``block_steps``
    that do, all in a row: what a step leaves to the next is then in the next one's time.
    ``ring_bytes`` and ``batch_bytes``: what the bare disk is measured with, as HybridAdam's states.
    ``device_share`` and ``room_share``: of the model data; DEVICE in 'alldisk', and what it has beyond
    parameters and gradients in 'managed'. ``memory_numel``: of the smaller model in 'memory', large enough
    for HybridAdam's whole ring; smaller ones get less.

    Raises:
        ConfigError: a value that cannot be measured with.
    """

    model: GPTConfig = GPT2_124M
    batch: int = 4
    seq: int = 128
    rounds: int = 3
    warmup_steps: int = 3
    blocks: int = 2
    block_steps: int = 3
    ring_bytes: int = 32 * _MIB
    batch_bytes: int = 4 * _MIB
    device_share: float = 0.25
    room_share: float = 0.15
    stream_numel: int = 1_000_000_000
    stream_repeats: int = 5
    memory_numel: int = 170_000_000
    memory_repeats: int = 2

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ConfigError(f"--rounds is {self.rounds}; it must be 1 or more")

    def quick(self) -> Settings:
        """Return tiny settings of which only the number of rounds stays."""
        return dataclasses.replace(
            self,
            model=GPTConfig(layers=2, hidden=64, heads=2),
            batch=2,
            seq=16,
            rounds=min(self.rounds, 1),
            warmup_steps=2,
            blocks=1,
            block_steps=1,
            stream_numel=min(self.stream_numel, 1_000_000),
            stream_repeats=1,
            memory_numel=250_000,
            memory_repeats=1,
        )

    @property
    def num_steps(self) -> int:
        """The number of steps of one process."""
        return self.warmup_steps + self.blocks * (1 + self.block_steps)

    def to_options(self, **more: Any) -> dict[str, Any]:
        """Return the options for a worker."""
        return {"settings": dataclasses.asdict(self), **more}

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Settings:
        """Return the settings from the result of ``to_options``."""
        values = options["settings"]
        return cls(**{**values, "model": GPTConfig(**values["model"])})
