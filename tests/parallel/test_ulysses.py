"""Ulysses: attention across parts of a sequence has the bits of torch's over the whole one."""

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
    Case(key_length=16),
    Case(heads=8, key_heads=4, causal=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_has_the_bits_of_the_whole_one(case: Case) -> None:
    for errors in run_on_ranks(attend, 2, "ulysses", case):
        assert set(errors.values()) == {0.0}, errors


UNEVEN = [
    Case(heads=3),
    Case(heads=2, causal=True),  # a rank of three has none
    Case(heads=6, key_heads=1, causal=True),
    Case(heads=6, key_heads=2, mask="padding"),
    Case(heads=5, key_heads=5, mask="heads"),
]


@pytest.mark.parametrize("case", UNEVEN, ids=str)
def test_heads_that_ranks_do_not_divide_compute_the_same(case: Case) -> None:
    for errors in run_on_ranks(attend, 3, "ulysses", case):
        assert max(errors.values()) <= TOLERANCE, errors
