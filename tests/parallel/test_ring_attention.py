"""Ring attention: what torch's attention over the whole sequence computes, to rounding."""

from __future__ import annotations

import pytest
from processes import run_on_ranks
from sequence_harness import Case, attend
from tensor_harness import TOLERANCE

CASES = [
    Case(),
    Case(causal=True),
    Case(mask="padding"),
    Case(mask="rows"),
    Case(mask="whole"),
    Case(mask="added"),
    Case(mask="heads"),
    Case(mask="own padding"),
    Case(mask="nothing"),
    Case(key_length=24),
    Case(heads=6, key_heads=2, causal=True),
    Case(heads=6, key_heads=1, mask="rows"),
]


def attend_to_all(zigzag: bool) -> dict[str, dict[str, float]]:
    return {str(case): attend("ring", case, zigzag) for case in CASES}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("zigzag", [False, True])
def test_ring_computes_what_the_whole_attention_does(zigzag: bool, size: int) -> None:
    for found in run_on_ranks(attend_to_all, size, zigzag):
        for case, errors in found.items():
            assert max(errors.values()) <= TOLERANCE, (case, errors)
