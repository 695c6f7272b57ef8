"""The meter counts what operators compute and what is held."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from gemini.forecast.meter import Meter, Period
from gemini.runtime.intercept.cpu_operators import CpuAttention

KIB = 1024


def meta(*shape: int, **options: bool) -> torch.Tensor:
    return torch.empty(*shape, device="meta", **options)


def test_a_storage_counts_once_and_as_long_as_it_is_held() -> None:
    given = meta(256)
    with Meter() as meter:
        meter.open_period()
        made = given + 1
        views = [made.view(16, 16), made[1:]]
        meter.open_period()
        del made, views
        other = given * 2
        meter.open_period()
        del other
    assert [period.peak_bytes for period in meter.finish()] == [KIB, KIB, KIB]


def test_inputs_and_what_is_written_to_them_are_no_data_of_the_step() -> None:
    given, other = meta(256), meta(256)
    with Meter() as meter:
        meter.open_period()
        given.add_(other)
        given.view(16, 16).mul_(2)
    assert meter.finish()[0].peak_bytes == 0


def test_what_comes_before_the_first_moment_belongs_to_the_last_period() -> None:
    given = meta(256)
    with Meter() as meter:
        early = given + 1
        meter.open_period()
        del early
        meter.open_period()
    first, last = meter.finish()
    assert first.operations.total() == 0
    assert last.operations.total() == 1
    assert last.peak_bytes == KIB


def test_arithmetic_of_forward_and_backward_is_what_torch_counts() -> None:
    def train(device: str) -> None:
        module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(device)
        module(torch.ones(3, 8, device=device)).sum().backward()

    with FlopCounterMode(display=False) as real:
        train("cpu")
    with Meter() as meter:
        meter.open_period()
        train("meta")
    assert _flops(meter.finish()[0]) == real.get_total_flops() > 0


def test_attention_keeps_what_the_cpu_keeps() -> None:
    query = meta(2, 4, 64, 16, requires_grad=True)
    with CpuAttention(), Meter() as meter:
        meter.open_period()
        out = nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        out.sum()
    plain = 2 * 4 * 64 * 64 * 4  # bytes of all products of queries and keys
    assert meter.finish()[0].peak_bytes < plain
    assert _flops(meter.finish()[0]) == 2 * 2 * 2 * 4 * 64 * 64 * 16


def test_a_truth_value_is_taken_to_be_true() -> None:
    with Meter() as meter:
        assert bool((meta(4) == 0).all())
    assert meter.num_guesses == 1


def _flops(period: Period) -> int:
    return sum(operation.flops * count for operation, count in period.operations.items())
