"""What GPU memory is cut into, so that the memory of one chunk is good for another."""

from __future__ import annotations

import random

from gemini import _C
from gemini.chunk.gpu_memory import common_block

MIB = 2**20
GRANULARITY = 2 * MIB


def _served(sizes: list[int], unit: int) -> int:
    spans = [-(-size // GRANULARITY) * GRANULARITY for size in sizes]
    return sum(span for span in spans if span % unit == 0 and span // unit <= _C.GpuArena.most_blocks)


def test_blocks_of_a_large_language_model_serve_parameters_and_states_alike() -> None:
    parameters, states = [52 * MIB] * 40, [104 * MIB] * 120  # bf16, fp32
    odd = [126 * MIB, 252 * MIB, 44 * MIB, 46 * MIB, 22 * MIB]  # an embedding, and what ends a run
    assert common_block([*odd, *parameters, *states], GRANULARITY) == 52 * MIB


def test_no_other_blocks_serve_more_bytes() -> None:
    choose = random.Random(0)
    for _ in range(50):
        kinds = [choose.randrange(1, 200 * MIB) for _ in range(choose.randrange(1, 6))]
        sizes = [choose.choice(kinds) for _ in range(30)]
        unit = common_block(sizes, GRANULARITY)
        best = max(
            _served(sizes, other) for other in range(GRANULARITY, max(sizes) + GRANULARITY, GRANULARITY)
        )
        assert _served(sizes, unit) == best


def test_chunks_that_are_none_need_no_blocks() -> None:
    assert common_block([], GRANULARITY) == 0
