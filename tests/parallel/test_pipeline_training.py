"""A model in stages, in parts and over data trains as in one process, whatever the schedule and budgets."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from pairs import first
from pipeline_harness import Trained, train_staged, train_whole
from processes import run_on_ranks

STEPS = 3  # one that is watched, one as planned after it, and one that goes on from that
MANY = 6  # of one schedule
TIGHT = {"device_bytes": "150KiB", "host_bytes": "8MiB"}
STYLES = {
    "gpipe": {},
    "1f1b": {},
    "interleaved": {"num_model_chunks": 2},
    "zero_bubble": {"num_model_chunks": 2},
    "zbv": {},
    "dualpipev": {},
}


def steps_of(style: str) -> int:
    return MANY if style == "1f1b" else STEPS


@cache
def whole(steps: int, tied: bool = True) -> Trained:
    return train_whole(steps, tied=tied)


@cache
def staged(style: str, tied: bool = True) -> list[Trained]:
    """What two stages train, with room for all."""
    return run_on_ranks(train_staged, 2, steps_of(style), style, {"pp_size": 2}, tied, STYLES[style])


def assert_as_whole(every: list[Trained], wanted: Trained) -> None:
    """Losses and norms on every rank, and the weights that it has, are those of one process."""
    for got in every:
        assert got.losses == pytest.approx(wanted.losses, rel=1e-5)
        assert got.norms == pytest.approx(wanted.norms, rel=1e-6)
        for name, value in got.weights.items():
            assert torch.allclose(value, wanted.weights[name], atol=1e-5), name
    assert set().union(*(got.weights for got in every)) == set(wanted.weights)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("tied", [True, False])
def test_stages_train_as_one_process(style: str, tied: bool) -> None:
    assert_as_whole(staged(style, tied), whole(steps_of(style), tied))


@pytest.mark.parametrize("style", STYLES)
def test_no_budget_changes_a_bit_of_a_layout(style: str) -> None:
    options = {**STYLES[style], "device_bytes": "200KiB", "host_bytes": "8MiB"}
    tight = run_on_ranks(train_staged, 2, steps_of(style), style, {"pp_size": 2}, True, options)
    for got, wanted in zip(tight, staged(style), strict=True):
        assert got.losses == wanted.losses
        assert got.norms == wanted.norms
        assert all(torch.equal(got.weights[name], value) for name, value in wanted.weights.items())
        assert got.moved > 0
        assert got.peak <= 200 * 1024


@pytest.mark.dear("eight ranks")
@pytest.mark.parametrize("style", first(dict.fromkeys(["1f1b", "zero_bubble", "dualpipev", *STYLES]), 3))
def test_data_tensor_and_pipeline_parallelism_together(style: str) -> None:
    sizes = {"pp_size": 2, "tp_size": 2}
    every = run_on_ranks(train_staged, 8, STEPS, style, sizes, True, {**STYLES[style], **TIGHT}, timeout=120)
    assert_as_whole(every, whole(STEPS))
    for got in every:
        assert got.moved > 0
        assert got.peak <= 150 * 1024


@pytest.mark.parametrize("style", STYLES)
def test_gradients_are_exchanged_once_per_step(style: str) -> None:
    every = run_on_ranks(train_staged, 4, STEPS, style, {"pp_size": 2}, True, STYLES[style])
    assert_as_whole(every, whole(STEPS))
    for got in every:
        assert got.more["sent"] == got.more["one exchange"] * STEPS


def test_one_stage_accumulates_over_micro_batches() -> None:
    (got,) = run_on_ranks(
        train_staged, 1, STEPS, "1f1b", {}, True, {"device_bytes": "250KiB", "host_bytes": "8MiB"}
    )
    assert_as_whole([got], whole(STEPS))


def test_tied_weights_stay_the_same_bits_on_both_stages() -> None:
    first, last = staged("1f1b")
    assert torch.equal(first.weights["embedding.weight"], last.weights["head.weight"])


@pytest.mark.parametrize("no_sync", [False, True])
def test_gradients_of_several_batches_are_added(no_sync: bool) -> None:
    options = {"batches": 2, "no_sync": no_sync, "num_microbatches": 2}
    every = run_on_ranks(train_staged, 4, STEPS, "1f1b", {"pp_size": 2}, True, options)
    wanted = whole(STEPS)
    for got in every:
        assert got.norms == pytest.approx([2 * norm for norm in wanted.norms], rel=1e-6)
        for name, value in got.weights.items():  # clipping takes the factor out again
            assert torch.allclose(value, wanted.weights[name], atol=1e-5), name
        exchanges = got.more["sent"] / (got.more["one exchange"] * STEPS)
        assert exchanges == 1 if no_sync else 1 < exchanges <= 2  # tied weights wait for the step
