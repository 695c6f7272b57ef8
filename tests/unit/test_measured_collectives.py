"""``gemini plan --measure-ranks``: speeds between ranks, as they are measured, fitted, shown and kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from gemini.cli.main import main
from gemini.forecast.machine import MachineSpeeds
from gemini.memstats.collectives import KINDS
from gemini.parallel.collective_speeds import fitted, mean_seconds, passed_numel

SIZES = (4096, 65536, 524288, 4194304)


@pytest.mark.dear("it starts two ranks, each of which imports torch")
def test_two_ranks_are_measured_without_a_model_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    kept = tmp_path / "here.json"
    assert main(["plan", "--measure-ranks", "2", "--save-machine", str(kept)]) == 0
    assert "OMP_NUM_THREADS" not in os.environ
    records = MachineSpeeds.load(kept).collectives.records
    assert [(each.kind, each.ranks) for each in records] == [(kind, 2) for kind in KINDS]
    for each in records:
        assert each.latency_seconds.source == each.bytes_per_second.source == "measured"
        beside = each.kind in ("all_gather", "all_to_all")
        assert each.computing_share.source == ("measured" if beside else "default")
        assert 0 <= each.computing_share.value <= 1
        assert 0 < each.seconds(SIZES[-1]) < 60
    said = capsys.readouterr().out
    assert all(kind in said for kind in KINDS)


def test_a_line_is_found_again() -> None:
    latency, rate = fitted([(n, 2e-4 + n / 3e9) for n in SIZES])
    assert latency == pytest.approx(2e-4)
    assert rate == pytest.approx(3e9)


def test_small_messages_count_as_much_as_large_ones() -> None:
    times = [(n, 1e-4 + n / 1e9) for n in SIZES]
    latency, _ = fitted([*times[:-1], (times[-1][0], 1.2 * times[-1][1])])
    assert latency == pytest.approx(1e-4, rel=0.1)


@pytest.mark.parametrize("seconds", [(4.0, 3.0, 2.0, 1.0), (1.0, 1.0, 1.0, 1.0), (1e-6, 1e-3, 0.2, 1.0)])
def test_times_of_no_line_give_the_rate_of_the_largest_message(seconds: tuple[float, ...]) -> None:
    assert fitted(list(zip(SIZES, seconds, strict=True))) == (0.0, pytest.approx(SIZES[-1] / seconds[-1]))


def test_a_collective_counts_from_when_its_ranks_begin_on_average_a_message_from_when_it_is_sent() -> None:
    one_step = [[[0.0, 5.0]], [[2.0, 4.0]]]  # of two ranks: begin and end
    times = torch.tensor([one_step], dtype=torch.float64)
    assert mean_seconds("all_reduce", times) == pytest.approx(4.0)
    assert mean_seconds("send", times) == pytest.approx(3.0)


def test_a_few_long_collectives_are_in_the_mean_and_the_longest_of_twenty_is_not() -> None:
    ends = torch.tensor([1.0] * 17 + [0.0, 2.0, 99.0], dtype=torch.float64)
    times = torch.stack([torch.zeros_like(ends), ends], dim=-1).expand(1, 2, 20, 2)
    assert mean_seconds("all_gather", times) == pytest.approx((17 + 2) / 18)


@pytest.mark.parametrize("ranks", [2, 3, 7, 16])
def test_every_rank_has_an_equal_part_of_what_is_passed(ranks: int) -> None:
    for nbytes in SIZES:
        whole = passed_numel("reduce_scatter", nbytes, ranks)
        assert whole % ranks == 0
        assert nbytes - 4 * ranks < 4 * whole <= nbytes
        assert passed_numel("all_gather", nbytes, ranks) == whole // ranks


@pytest.mark.parametrize("text", ["0", "1", "17", "-2", "2.0", "", "two", "\u0662", "9" * 5000, "2\n", "1e1"])
def test_ranks_that_are_not_measured_are_one_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "here.json"
    assert main(["plan", f"--measure-ranks={text}", "--save-machine", str(kept)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("gemini: error: --measure-ranks is ")
    assert error.count("\n") == 1
    assert "2 to 16" in error
    assert not kept.exists()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([], "give a MODEL"),
        (["--save-machine", "x.json"], "give a MODEL"),
        (["--measure-ranks", "2", "--tp", "2"], "--tp cut a model: give a MODEL"),
        (["--measure-ranks", "2", "--machine", "x.json"], "leave one out"),
        (["gpt2", "--measure-ranks", "2", "--tp", "2"], "--measure-ranks does not go with --tp"),
    ],
)
def test_what_measuring_cannot_go_with_is_one_line(
    arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert what in error
    assert error.count("\n") == 1
