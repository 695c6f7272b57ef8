"""Random numbers of a pass through a pipeline.

Modules around the blocks run on several stages and must draw the same numbers there, for example noise that
is added before the blocks and used again behind them. Blocks draw different numbers on each stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from gemini.comm.peers import digest_of
from gemini.system.rng import generator_states, seed_generators, set_generator_states

_NUM_SEEDS = 2**62


def draw_seed() -> int:
    """Draw a seed from torch's generator."""
    return int(torch.randint(_NUM_SEEDS, (), device="cpu"))


@dataclass(frozen=True)
class Draws:
    """The seeds of a micro-batch on one stage: ``around`` the blocks, equal on all stages, and ``inside``."""

    around: int
    inside: int

    @classmethod
    def of(cls, seed: int, micro_batch: int, stage: int) -> Draws:
        """``seed`` is the seed of the pass, which all stages know."""
        return cls(digest_of(f"{seed} {micro_batch}"), digest_of(f"{seed} {micro_batch} {stage}"))


@contextmanager
def drawn(seed: int, device: torch.device) -> Iterator[None]:
    """Draw random numbers from ``seed`` inside the block; restore the generators afterwards."""
    states = generator_states(device)
    seed_generators(device, seed)
    try:
        yield
    finally:
        set_generator_states(device, states)
