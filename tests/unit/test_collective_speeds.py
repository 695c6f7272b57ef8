"""Speeds between ranks: what records say, what follows for other groups, and what no file may say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forecast_models import machine

from gemini.cli.main import main
from gemini.errors import ConfigError
from gemini.forecast.machine import MachineSpeeds
from gemini.memstats.collectives import KINDS, CollectiveSpeed, CollectiveSpeeds, Figure

ALPHA, BETA = 1e-4, 1e9  # of one message over one link
RECORD = {"kind": "send", "ranks": 2, "latency_seconds": 1e-4, "bytes_per_second": 1e9}
RING = {  # messages one after another, and bytes of a rank per byte passed to the call
    "all_reduce": lambda n: (2 * (n - 1), 2 * (n - 1) / n),
    "all_gather": lambda n: (n - 1, n - 1),
    "reduce_scatter": lambda n: (n - 1, (n - 1) / n),
    "all_to_all": lambda n: (n - 1, (n - 1) / n),
    "send": lambda n: (1, 1),
}


def on_a_ring(kind: str, ranks: int) -> CollectiveSpeed:
    messages, sent = RING[kind](ranks)
    return CollectiveSpeed(kind, ranks, Figure(messages * ALPHA, "measured"), Figure(BETA / sent, "measured"))


def speeds(*sizes: int) -> CollectiveSpeeds:
    return CollectiveSpeeds(tuple(on_a_ring(kind, size) for kind in KINDS for size in sizes))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("ranks", "source"),
    [(2, "measured"), (3, "interpolated"), (6, "interpolated"), (8, "measured"), (64, "extrapolated")],
)
def test_groups_of_a_ring_are_estimated_exactly_and_say_how(kind: str, ranks: int, source: str) -> None:
    messages, sent = RING[kind](ranks)
    known = speeds(2, 8)
    assert known.seconds(kind, ranks, 10**7) == pytest.approx(messages * ALPHA + sent * 10**7 / BETA)
    found = known.speed(kind, ranks)
    assert (found.latency_seconds.source, found.bytes_per_second.source) == (source, source)
    assert found.computing_share == Figure(1.0, "default")


def test_a_group_between_two_lies_between_their_speeds_per_message() -> None:
    slow = replace(on_a_ring("send", 8), latency_seconds=Figure(3 * ALPHA), computing_share=Figure(0.5))
    between = CollectiveSpeeds((on_a_ring("send", 2), slow)).speed("send", 4)
    assert between.latency_seconds.value == pytest.approx(2 * ALPHA)
    assert between.computing_share == Figure(pytest.approx(0.75), "interpolated")


def test_one_rank_alone_exchanges_nothing() -> None:
    assert CollectiveSpeeds().seconds("all_reduce", 1, 10**9) == 0


@pytest.mark.parametrize(
    ("kind", "ranks", "what"),
    [("gossip", 2, "all_reduce"), ("send", 0, "0 ranks"), ("send", 2, "docs/plan.md")],
)
def test_what_cannot_be_estimated_is_refused(kind: str, ranks: int, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        CollectiveSpeeds().speed(kind, ranks)


def test_a_machine_keeps_its_collectives_and_one_without_is_read(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    given = replace(machine(), collectives=speeds(2, 4))
    given.save(path)
    assert MachineSpeeds.load(path) == given
    document = json.loads(path.read_text())
    del document["collectives"]
    path.write_text(json.dumps(document))
    assert MachineSpeeds.load(path) == machine()


def test_a_bare_number_counts_as_given() -> None:
    (found,) = CollectiveSpeeds.from_json([RECORD]).records
    assert found == CollectiveSpeed("send", 2, Figure(1e-4, "given"), Figure(1e9, "given"))


@pytest.mark.parametrize(
    "collectives",
    [
        7,
        {},
        [3],
        [{"kind": "send"}],
        [RECORD, RECORD],
        [{**RECORD, "kind": ["send"]}],
        [{**RECORD, "wheels": 4}],
        *([{**RECORD, "ranks": value}] for value in (1, -2, 2.0, True, 10**400, "2", None)),
        *([{**RECORD, "latency_seconds": value}] for value in (float("nan"), -1, 1e300, True, "1\n", [], {})),
        *([{**RECORD, "bytes_per_second": value}] for value in (0, float("inf"), 10**400, None)),
        [{**RECORD, "computing_share": 1.5}],
        [{**RECORD, "computing_share": {"value": 0.5, "source": "extrapolated"}}],
        [{**RECORD, "computing_share": {"value": 0.5, "source": ["given"]}}],
    ],
)
def test_collectives_that_no_machine_has_are_one_line(
    collectives: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machine.json"
    machine().save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "collectives": collectives}))
    with pytest.raises(ConfigError, match="collectives"):
        MachineSpeeds.load(path)
    assert main(["plan", "gpt:layers=1,hidden=8,heads=1", "--machine", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("gemini: error: ")
    assert error.count("\n") == 1
