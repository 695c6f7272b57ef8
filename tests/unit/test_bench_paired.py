"""Contenders of ``gemini bench adam``: who takes turns, and what pairs of their times say."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from functools import partial

import pytest
import torch

from gemini.errors import StateError
from gemini_bench import paired
from gemini_bench.paired import Contender, Spread, Timings


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paired, "PAUSE_SECONDS", 0.0)


def named(names: str) -> list[Contender]:
    return [Contender(name, lambda: None, 1.0) for name in names]


# -- taking turns --------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_everyone_comes_first_equally_often_and_once_per_round(count: int) -> None:
    contenders = named("abcde"[:count])
    orders = [paired.in_turn(contenders, number) for number in range(2 * count)]
    assert all(Counter(c.name for c in order) == Counter("abcde"[:count]) for order in orders)
    assert set(Counter(order[0].name for order in orders).values()) == {2}


def test_warmup_rounds_run_everyone_and_do_not_count() -> None:
    runs: Counter[str] = Counter()
    contenders = [Contender(name, partial(runs.update, name), 8.0) for name in "ab"]
    found = paired.run_paired(contenders, 3)
    assert runs == dict.fromkeys("ab", 3 + paired.WARMUP_ROUNDS)
    assert {name: len(seconds) for name, seconds in found["seconds"].items()} == {"a": 3, "b": 3}
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize("other", [1.5, math.nan])
def test_contenders_with_different_results_are_refused(other: float) -> None:
    contenders = [
        Contender(name, lambda: None, 1.0, partial(torch.full, (4,), value))
        for name, value in (("a", 1.0), ("b", other))
    ]
    with pytest.raises(StateError, match="'b' and 'a' should compute the same"):
        paired.require_same_job(contenders, 0.1)


def times_of(seconds: Mapping[str, list[float]], nbytes: Mapping[str, float] | None = None) -> Timings:
    return Timings({"seconds": seconds, "nbytes": nbytes or dict.fromkeys(seconds, 28.0)})


def test_ratio_of_pairs_does_not_see_the_machine_drift() -> None:
    times = times_of({"mine": [1.0, 3.0, 50.0], "theirs": [2.0, 6.0, 100.0]})
    assert times.ratio("mine", "theirs") == Spread(0.5, 0.5, 0.5)
    assert times.milliseconds("mine") == Spread(3000.0, 1000.0, 50000.0)


def test_excess_is_microseconds_for_each_of_many() -> None:
    times = times_of({"mine": [1.5, 3.5], "theirs": [1.0, 3.0]})
    assert times.excess("mine", "theirs", 1000) == Spread(500.0, 500.0, 500.0)


def test_share_compares_bytes_per_second() -> None:
    times = times_of({"mine": [1.0], "limit": [1.0]}, {"mine": 14.0, "limit": 28.0})
    assert times.share("mine", "limit").median == 0.5
    assert times.rate("limit").median == 28e-9


@pytest.mark.parametrize("numel", [1, 1000, 2**20 + 3])
def test_arrays_of_one_seed_are_equal_and_apart(numel: int) -> None:
    one, other = (paired.filled(numel, torch.bfloat16, scale=0.1, seed=5) for _ in range(2))
    assert one.numel() == numel
    assert torch.equal(one, other)
    assert one.data_ptr() != other.data_ptr()
