"""The rule of expected next use, on the shipped routings and against its reference."""

from __future__ import annotations

import random

import numpy as np
import pytest

from gemini.errors import ConfigError
from gemini_bench import routing, use_rate
from gemini_bench.routing import Local, Skewed, generate
from gemini_bench.routing_cache import (
    MOST_OVER_BEST,
    POLICIES,
    Exact,
    Expected,
    Lfu,
    Lru,
    capacity,
    points,
    reads,
)
from gemini_bench.use_rate import CERTAIN, UseRate

SHIPPED = routing.shipped()
PASSES = 96  # of the recordings' 512 and more: the cases are cheap


@pytest.fixture(scope="module", params=sorted(SHIPPED))
def simulated(request):
    """Every point of one routing."""
    one = {request.param: SHIPPED[request.param]}
    return list(points(one, PASSES, ("LRU", "LFU", "expected")))


def test_the_rule_reads_at_most_a_twentieth_more_than_the_better_of_lru_and_lfu(simulated):
    assert max(point.over_best for point in simulated) <= MOST_OVER_BEST


def test_lru_reads_every_expert_where_a_pass_uses_more_than_fit_and_the_rule_does_not(simulated):
    tight = [point for point in simulated if point.batch == 8 and point.share <= 1 / 4]
    assert all(point.read["LRU"] > 0.97 * point.used for point in tight)
    wider = [point for point in tight if point.share == 1 / 4]
    assert all(point.read["expected"] < 0.7 * point.used for point in wider)


def test_no_policy_reads_less_than_the_one_that_knows_the_future():
    uses = SHIPPED["trained"].uses(4, PASSES)
    room = capacity(uses, 1 / 4)
    least = reads(uses, room, Exact(uses))
    assert all(reads(uses, room, policy(uses)) >= least for policy in POLICIES.values())


@pytest.mark.parametrize("share", [1 / 8, 1 / 2])
def test_each_kind_is_best_served_by_the_policy_that_fits_it(share):
    for name, better, worse in (("local", Lru, Lfu), ("skewed", Lfu, Lru)):
        uses = SHIPPED[name].uses(1, 256)
        room = capacity(uses, share)
        assert reads(uses, room, better(uses)) < 0.9 * reads(uses, room, worse(uses)), name


def test_the_vectors_hold_the_numbers_of_the_reference():
    uses = _short(SHIPPED["trained"].uses(4, 80))
    _, layers, experts = uses.shape
    vectors, reference = Expected(uses), UseRate([experts] * layers)
    for number, of_pass in enumerate(uses):
        for layer, used in enumerate(of_pass):
            vectors.note(number, layer, used)
            reference.note(layer, {int(expert) for expert in np.flatnonzero(used)})
        layer = number % layers
        want = [
            [
                reference.score(row, expert, (row - layer) % layers or layers, layers)
                for expert in range(experts)
            ]
            for row in range(layers)
        ]
        assert vectors.scores(number, layer).tolist() == want
        assert vectors.counts.tolist() == reference.counts


def test_asking_changes_nothing():
    asked, silent = UseRate([16]), UseRate([16])
    rng = random.Random(1)
    for _ in range(200):
        used = set(rng.sample(range(16), 3))
        for rate in (asked, silent):
            rate.note(0, used)
        for expert in rng.sample(range(16), 8):
            asked.score(0, expert, 1, 4)
    assert [asked.estimate(0, e) for e in range(16)] == [silent.estimate(0, e) for e in range(16)]
    assert asked.counts == silent.counts


def test_the_order_in_which_a_pass_names_its_experts_does_not_matter():
    one, other = UseRate([8]), UseRate([8])
    for used in ([1, 5, 2], [7, 0], [5, 3, 1], [2]):
        one.note(0, used)
        other.note(0, used[::-1])
    assert [one.rates(0, e) for e in range(8)] == [other.rates(0, e) for e in range(8)]
    assert one.counts == other.counts


@pytest.mark.parametrize("every", [1, 3, 20])
def test_an_estimate_is_the_share_of_passes_that_use_an_expert(every):
    rate = UseRate([2])
    seen = []
    for number in range(2000):
        rate.note(0, {0} if number % every == 0 else set())
        seen.append(rate.estimate(0, 0, 1))
    assert np.mean(seen[-60:]) / CERTAIN == pytest.approx(1 / every, rel=0.02)


def test_an_expert_of_every_pass_is_as_far_as_its_layer():
    rate = UseRate([4])
    for _ in range(2000):
        rate.note(0, {2})
    assert rate.score(0, 2, 5, 24) == 5
    assert rate.score(0, 3, 5, 24) == 24 * CERTAIN - 24 + 5


def test_scores_stay_in_64_bits_and_rates_in_16():
    rate = UseRate([3])
    for number in range(3000):
        rate.note(0, {0} if number < 2500 else {1})
    assert all(0 <= r < use_rate.ONE for e in range(3) for r in rate.rates(0, e))
    assert rate.score(0, 2, 1 << 40, 1 << 40) < 1 << 63


@pytest.mark.parametrize(("kind", "estimate"), [(Local(num_experts=64), 0), (Skewed(), 1)])
def test_counting_finds_the_estimate_that_fits_the_routing(kind, estimate):
    uses = generate([kind] * 2, 160, sequences=1).uses(1)
    policy = Expected(uses)
    for number, of_pass in enumerate(uses):
        for layer, used in enumerate(of_pass):
            policy.note(number, layer, used)
    assert policy.counts.argmax() == estimate


@pytest.mark.parametrize(("name", "kind"), [("local", Local()), ("skewed", Skewed())])
def test_the_generators_still_write_what_is_shipped(name, kind):
    for layer, sequence in ((0, 0), (5, 7)):
        again = kind.token_stream(routing.SEED, layer, sequence, 40)
        assert SHIPPED[name].experts[sequence, :40, layer].tolist() == again


def test_each_token_uses_as_many_experts_as_the_routing_says():
    for name, recorded in SHIPPED.items():
        assert (np.diff(recorded.experts.astype(int), axis=-1) > 0).all(), name
        per_token = recorded.experts.shape[-1]
        assert (recorded.uses(1, 50).sum(axis=2) == per_token).all(), name


@pytest.mark.parametrize("damage", ["empty", "text", "keys", "type", "range", "object", "missing"])
def test_a_file_that_is_no_routing_is_refused_in_one_line(tmp_path, damage):
    path = tmp_path / "bad.npz"
    experts = np.zeros((1, 2, 3, 4), dtype=np.uint8)
    if damage == "empty":
        path.touch()
    elif damage == "text":
        path.write_text("experts")
    elif damage == "keys":
        np.savez(path, experts=experts)
    elif damage == "type":
        np.savez(path, experts=experts.astype(float), num_experts=8)
    elif damage == "range":
        np.savez(path, experts=experts + 8, num_experts=8)
    elif damage == "object":
        np.savez(path, experts=np.array([{}], dtype=object), num_experts=8, allow_pickle=True)
    with pytest.raises(ConfigError) as raised:
        routing.load(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_routing_survives_its_file(tmp_path):
    made = generate([Skewed(num_experts=8, per_token=2)] * 2, 5, sequences=2)
    made.save(tmp_path / "made.npz")
    again = routing.load(tmp_path / "made.npz")
    assert again.num_experts == 8
    assert (again.experts == made.experts).all()


def _short(uses):
    return uses[:, :3]
