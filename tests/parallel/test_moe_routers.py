"""Routers of mixtures of experts, against slow and readable ones; capacity, padding, noise, balance."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gemini import ConfigError
from gemini.parallel.moe import (
    Capacity,
    NormalNoiseGenerator,
    Top1Router,
    Top2Router,
    TopKRouter,
    UniformNoiseGenerator,
)

small = settings(max_examples=40, deadline=None)
sizes = st.tuples(st.integers(1, 24), st.integers(2, 6))  # tokens, experts


def logits_of(tokens: int, experts: int, seed: int, *, ties: bool = False) -> Tensor:
    found = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))
    return found.round() if ties else found


def slow_choices(scores: list[float], k: int) -> list[int]:
    """The best experts of one token, the lower one first where scores are equal."""
    return sorted(range(len(scores)), key=lambda expert: (-scores[expert], expert))[:k]


def slow_kept(chosen: list[list[int]], capacity: int) -> list[list[bool]]:
    """Go through all first choices, then all second ones; an expert takes the first ``capacity``."""
    taken: dict[int, int] = {}
    kept = [[False] * len(each) for each in chosen]
    for place in range(len(chosen[0])):
        for token, experts in enumerate(chosen):
            taken[experts[place]] = taken.get(experts[place], 0) + 1
            kept[token][place] = taken[experts[place]] <= capacity
    return kept


def slow_capacity(k: int, factor: float, tokens: int, experts: int, minimum: int) -> int:
    wanted = math.floor(k * factor * tokens / experts)
    return max(wanted + 1 if wanted % 2 else wanted, minimum)


@small
@given(sizes, st.integers(0, 999), st.sampled_from([0.3, 1.25]), st.booleans(), st.booleans())
def test_the_documents_routers_route_as_slow_ones(
    size: tuple[int, int], seed: int, factor: float, training: bool, ties: bool
) -> None:
    tokens, experts = size
    logits = logits_of(*size, seed, ties=ties)
    scores = logits.softmax(-1)
    for k, router in ((1, Top1Router(factor, 0.5, 2)), (2, Top2Router(factor, 0.5, 2))):
        routing = router.train(training)(logits)
        chosen = [slow_choices(row, k) for row in scores.tolist()]
        capacity = slow_capacity(k, factor if training else 0.5, tokens, experts, 2)
        kept = slow_kept(chosen, capacity)
        assert routing.experts.tolist() == chosen
        for token, row in enumerate(chosen):
            wanted = [
                scores[token, expert].item() * here for expert, here in zip(row, kept[token], strict=True)
            ]
            assert routing.weights[token].tolist() == wanted


def test_the_documents_defaults_are_those_of_the_library() -> None:
    for router in (Top1Router(), Top2Router()):
        assert router.capacity == Capacity(1.25, 2.0, 4, "even")
        assert router.noisy_func is None
    assert Top2Router(drop_tks=False).capacity is None
    assert Capacity(1.25, 2.0, 4, "even").of(64, 2, 8, training=True) == 20
    assert Capacity(1.25, 2.0, 4, "even").of(64, 2, 8, training=False) == 32
    assert Capacity(1.0).of(9, 1, 4, training=True) == 3
    assert Capacity(1.0, rounding="even", minimum=4).of(9, 1, 4, training=True) == 4


def test_second_choices_stand_behind_all_first_ones() -> None:
    # Two tokens name expert 0 second, then two name it first; it takes two.
    logits = torch.tensor([[1.0, 2, 0], [1, 2, 0], [2, 0, 1], [2, 0, 1]])
    kept = TopKRouter(2, capacity=Capacity(0.1, minimum=2))(logits).kept
    assert kept is not None
    assert kept.tolist() == [[True, False], [True, False], [True, True], [True, True]]


@small
@given(sizes, st.integers(0, 999), st.sampled_from(["position", "random", "probability"]))
def test_capacity_for_all_tokens_is_no_capacity(size: tuple[int, int], seed: int, drop: str) -> None:
    logits = logits_of(*size, seed)
    free = TopKRouter(2, drop=drop)(logits)  # type: ignore[arg-type]
    held = TopKRouter(2, drop=drop, capacity=Capacity(0.1, minimum=size[0]))(logits)  # type: ignore[arg-type]
    assert held.kept is None
    assert torch.equal(free.weights, held.weights)
    assert torch.equal(free.experts, held.experts)


@small
@given(sizes, st.integers(0, 999), st.sampled_from(["position", "random", "probability"]))
def test_an_expert_takes_as_many_as_it_can_and_no_more(size: tuple[int, int], seed: int, drop: str) -> None:
    routing = TopKRouter(2, drop=drop, capacity=Capacity(1e-3, minimum=2))(logits_of(*size, seed))  # type: ignore[arg-type]
    for expert in range(size[1]):
        named = routing.experts == expert
        kept = named if routing.kept is None else named & routing.kept
        assert kept.sum() == min(2, int(named.sum()))
        if drop == "probability" and routing.kept is not None:
            scores = logits_of(*size, seed).softmax(-1)[:, expert]
            left = scores[(named & ~routing.kept).any(-1)]
            assert not len(left) or scores[kept.any(-1)].min() >= left.max()


@small
@given(sizes, st.integers(0, 999), st.data())
def test_padding_drops_nobody(size: tuple[int, int], seed: int, data: st.DataObject) -> None:
    real = data.draw(st.lists(st.booleans(), min_size=size[0], max_size=size[0]))
    mask, logits = torch.tensor(real), logits_of(*size, seed)
    router = TopKRouter(2, capacity=Capacity(0.6, minimum=1))
    padded, alone = router(logits, token_mask=mask), router(logits[mask])
    assert torch.equal(padded.experts[mask], alone.experts)
    assert torch.equal(padded.weights[mask], alone.weights)
    assert not padded.weights[~mask].any()
    assert torch.equal(padded.counts, alone.counts)
    torch.testing.assert_close(padded.balance_loss, alone.balance_loss)
    torch.testing.assert_close(padded.z_loss, alone.z_loss)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_balance_loss_of_balanced_routing_is_one(score: str, k: int) -> None:
    logits = torch.eye(4).repeat(3, 1)  # each expert is the first of as many tokens ...
    logits += torch.roll(torch.eye(4), 1, 0).repeat(3, 1) / 2  # ... and the second
    routing = TopKRouter(k, score=score)(logits)  # type: ignore[arg-type]
    if k != 4:
        assert len(set(routing.counts.tolist())) == 1
    torch.testing.assert_close(routing.balance_loss, torch.tensor(1.0))
    alone = torch.full((6, 4), -30.0)
    alone[:, 1] = 30.0
    torch.testing.assert_close(TopKRouter(1)(alone).balance_loss, torch.tensor(4.0))


def test_weights_are_divided_by_what_is_chosen_or_kept() -> None:
    logits = logits_of(12, 3, 0)
    scores = logits.softmax(-1)
    capacity = Capacity(0.1, minimum=3)
    found = {how: TopKRouter(2, weights=how, capacity=capacity)(logits) for how in ("none", "chosen", "kept")}  # type: ignore[arg-type]
    kept = found["none"].kept
    assert kept is not None
    chosen = scores.gather(1, found["none"].experts)
    assert torch.equal(found["none"].weights, chosen * kept)
    torch.testing.assert_close(found["chosen"].weights, chosen / chosen.sum(-1, keepdim=True) * kept)
    assert ((found["kept"].weights.sum(-1) - kept.any(-1).float()).abs() < 1e-6).all()


def test_a_bias_changes_the_choice_and_no_weight() -> None:
    logits = logits_of(8, 4, 3)
    for score in ("softmax", "sigmoid"):
        routing = TopKRouter(1, score=score)(logits, bias=torch.tensor([0.0, 0, 9, 0]))  # type: ignore[arg-type]
        assert (routing.experts == 2).all()
        probabilities = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
        assert torch.equal(routing.weights[:, 0], probabilities[:, 2])


def test_noise_is_of_training_alone_and_the_documents_weights_have_it() -> None:
    logits = logits_of(50, 4, 1)
    for weights_from, has_noise in (("clean", False), ("noisy", True)):
        router = TopKRouter(1, noisy_func=NormalNoiseGenerator(4, std=3.0), weights_from=weights_from)  # type: ignore[arg-type]
        torch.manual_seed(0)
        routing = router(logits)
        clean = logits.softmax(-1).gather(1, routing.experts)
        assert torch.equal(routing.weights, clean) != has_noise
        assert torch.equal(router.eval()(logits).experts, TopKRouter(1)(logits).experts)
        assert not torch.equal(routing.experts, TopKRouter(1)(logits).experts)
    assert Top2Router().weights_from == Top1Router().weights_from == "noisy"


def test_noises_have_the_documented_size() -> None:
    torch.manual_seed(0)
    zeros, ones = torch.zeros(20000, 1), torch.ones(20000, 1)
    assert NormalNoiseGenerator(8)(zeros).std().item() == pytest.approx(1 / 8, rel=0.05)
    factors = UniformNoiseGenerator(eps=0.1)(ones)
    assert 0.9 <= factors.min() < 0.91 < 1.09 < factors.max() <= 1.1


@pytest.mark.parametrize("policy", ["first", "random"])
def test_random_drops_other_tokens_in_training_alone(policy: str) -> None:
    logits = torch.tensor([[1.0, 0.0]]).repeat(40, 1)
    router = Top1Router(0.2, 0.2, select_policy=policy)  # type: ignore[arg-type]
    torch.manual_seed(0)
    first = torch.arange(40) < 4
    assert torch.equal(router(logits).kept.flatten(), first) == (policy == "first")  # type: ignore[union-attr]
    assert torch.equal(router.eval()(logits).kept.flatten(), first)  # type: ignore[union-attr]


def test_routing_is_in_fp32_under_autocast_and_for_16_bits() -> None:
    logits = logits_of(30, 4, 5).bfloat16()
    wanted = TopKRouter(2)(logits.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = TopKRouter(2)(logits)
    assert torch.equal(found.weights, wanted.weights)
    assert found.weights.dtype == found.z_loss.dtype == torch.float32


def test_what_cannot_be_routed_is_refused_with_a_way_out() -> None:
    for make, said in (
        (lambda: TopKRouter(0), "0 choices"),
        (lambda: TopKRouter(1, weights="chosen"), "no gradient; write weights='none'"),
        (lambda: TopKRouter(2, drop="last"), "drop is 'last'; give one of position"),  # type: ignore[arg-type]
        (lambda: Top1Router(select_policy="any"), "select_policy is 'any'"),  # type: ignore[arg-type]
        (lambda: Top2Router(math.inf), "gives no capacity"),
        (lambda: TopKRouter(3)(torch.zeros(4, 2)), "chooses 3 of 2 experts"),
        (lambda: TopKRouter(1)(torch.zeros(4, 2), token_mask=torch.ones(3)), r"shape \(3,\) for 4 tokens"),
    ):
        with pytest.raises(ConfigError, match=said):
            make()
