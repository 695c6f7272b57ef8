"""Recorded routings: which experts each token of a mixture of experts used, and generators of two more kinds.

A routing is an array ``[sequences, passes, layers, experts per token]``: the sequences are decoded side by
side, one token of each per pass. A batch of B is the first B sequences. A layer uses the union of their
experts in a pass. ``benchmarks/traces/routings.py`` writes the files in ``benchmarks/traces/routings``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from gemini.errors import ConfigError

ROUTINGS = Path(__file__).resolve().parents[1] / "traces" / "routings"
SEED = 46
SEQUENCES = 8
LAYERS = 6
GENERATED_PASSES = 512

Uses = npt.NDArray[np.bool_]  # [passes, layers, experts]


@dataclass(frozen=True)
class Routing:
    """The experts of every token, ascending per token; ``num_experts`` of each layer."""

    experts: npt.NDArray[np.uint8]
    num_experts: int

    def uses(self, batch: int, passes: int | None = None) -> Uses:
        """Return which experts the first ``batch`` sequences use, per pass and layer."""
        experts = self.experts[:batch, :passes]
        _, num_passes, num_layers, _ = experts.shape
        used = np.zeros((num_passes, num_layers, self.num_experts), dtype=np.bool_)
        grid = np.ogrid[:num_passes, :num_layers]
        for sequence in experts:
            used[grid[0][..., None], grid[1][..., None], sequence] = True
        return used

    def save(self, path: Path) -> None:
        """Write the file that :func:`load` reads."""
        np.savez_compressed(path, experts=self.experts, num_experts=np.int64(self.num_experts))


def load(path: Path) -> Routing:
    """Read a routing. Raise ConfigError for a file that is none."""
    try:
        with np.load(path, allow_pickle=False) as file:
            experts, num_experts = file["experts"], int(file["num_experts"])
    except (OSError, KeyError, ValueError, TypeError, EOFError, BadZipFile) as error:
        raise ConfigError(
            f"{path} is no routing ({error}); benchmarks/traces/routings.py writes them"
        ) from None
    if experts.dtype != np.uint8 or experts.ndim != 4 or not experts.size:
        raise ConfigError(
            f"{path} holds {experts.dtype}{list(experts.shape)}; a routing is uint8, "
            "[sequences, passes, layers, experts per token]"
        )
    if int(experts.max()) >= num_experts:
        raise ConfigError(f"{path} names expert {int(experts.max())} of {num_experts}")
    return Routing(experts, num_experts)


def shipped() -> dict[str, Routing]:
    """Return the recorded routings by name. Raise ConfigError outside a checkout."""
    found = {path.stem: load(path) for path in sorted(ROUTINGS.glob("*.npz"))}
    if not found:
        raise ConfigError(f"there are no routings in {ROUTINGS}: run this benchmark from a checkout")
    return found


@dataclass(frozen=True)
class Local:
    """Experts repeat soon, and none is a lasting favourite.

    Each sequence and layer keeps its experts in order of last use. A token takes the expert at depth
    ``floor(E u ** (1 / locality))``, u uniform, until it has enough: a cache of x E experts per layer, least
    recently used, hits ``x ** locality`` of the uses.
    """

    num_experts: int = 128
    per_token: int = 8
    locality: float = 0.19

    def token_stream(self, seed: int, layer: int, sequence: int, passes: int) -> list[list[int]]:
        """Return the experts of each token of a sequence in one layer."""
        rng = random.Random(f"local {seed} {layer} {sequence}")
        order = list(range(self.num_experts))
        rng.shuffle(order)
        stream = []
        for _ in range(passes):
            depths: set[int] = set()
            while len(depths) < self.per_token:
                depths.add(int(self.num_experts * rng.random() ** (1 / self.locality)))
            used = [order[depth] for depth in sorted(depths)]
            for depth in sorted(depths, reverse=True):
                del order[depth]
            order[:0] = used
            stream.append(sorted(used))
        return stream


@dataclass(frozen=True)
class Skewed:
    """Lasting favourites, and no locality in time: tokens draw from a Zipf law, without repetition.

    The expert of rank r has weight ``r ** -exponent``; each layer ranks its experts anew, sequences alike.
    """

    num_experts: int = 64
    per_token: int = 8
    exponent: float = 1.0

    def token_stream(self, seed: int, layer: int, sequence: int, passes: int) -> list[list[int]]:
        """Return the experts of each token of a sequence in one layer."""
        ranked = list(range(self.num_experts))
        random.Random(f"skewed {seed} {layer}").shuffle(ranked)
        rng = random.Random(f"skewed {seed} {layer} {sequence}")
        inverse = [(rank + 1) ** self.exponent for rank in range(self.num_experts)]
        stream = []
        for _ in range(passes):
            # The earliest of exponential clocks of these rates: a draw by weight without repetition.
            clocks = [-math.log(1.0 - rng.random()) * mean for mean in inverse]
            first = sorted(range(self.num_experts), key=clocks.__getitem__)[: self.per_token]
            stream.append(sorted(ranked[rank] for rank in first))
        return stream


def generate(
    kinds: Sequence[Local | Skewed], passes: int, *, sequences: int = SEQUENCES, seed: int = SEED
) -> Routing:
    """Generate a routing; ``kinds`` has one entry per layer, all of one ``num_experts`` and ``per_token``."""
    streams = [
        [kind.token_stream(seed, layer, sequence, passes) for layer, kind in enumerate(kinds)]
        for sequence in range(sequences)
    ]
    return Routing(np.array(streams, dtype=np.uint8).transpose(0, 2, 1, 3).copy(), kinds[0].num_experts)
