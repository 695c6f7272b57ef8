"""Wherever a rank fails, and however: each other rank says why, soon, and none is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import failing_ranks
import pytest
from failing_ranks import ENDS_SECONDS, PLACES

# Forward and backward passes that raise, and a forward pass that dies: test_pipeline_failures.py.
ROWS = [
    *((place, "stop") for place in PLACES),
    *((place, "die") for place in ("backward", "weights", "gather", "exchange", "update", "save")),
    *((place, "raise") for place in ("weights", "gather", "exchange", "update", "save", "save of stages")),
]
GONE = "has given no sign of life for"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("failures")
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, failing_ranks.__file__, str(directory), json.dumps(ROWS)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((directory / "outcomes.json").read_text())
    return found


@pytest.mark.dear("the first case runs the whole table, two ranks for each row")
@pytest.mark.parametrize(("place", "how"), ROWS)
def test_a_failure_is_said_on_every_rank_and_ends_it(place: str, how: str, outcomes: dict[str, Any]) -> None:
    odd = PLACES[place][1]
    failing, other = (outcomes[f"{place}, {how}"][str(rank)] for rank in (odd, 1 - odd))
    assert failing["failed"]
    assert other["code"] == 1, other["said"]
    assert max(failing["seconds"], other["seconds"]) < ENDS_SECONDS
    told = last_error(other)
    if how == "raise":
        assert failing["code"] == 1
        assert "ValueError: a bad sample" in last_error(failing)
        assert "a bad sample" in told
        assert f"rank {odd}" in told
    else:
        assert f"rank {odd} {GONE}" in told
    if how == "die":
        assert failing["code"] == -signal.SIGKILL
    if how == "stop":  # it went on, when the other one had given up
        assert failing["code"] == 1, failing["said"]
        assert "StateError" in last_error(failing)
        assert f"rank {odd} {GONE}" in last_error(failing)


@pytest.mark.parametrize(("place", "how"), [row for row in ROWS if "save" in row[0] and row[1] != "die"])
def test_nothing_of_a_save_that_failed_is_left(place: str, how: str, outcomes: dict[str, Any]) -> None:
    assert outcomes[f"{place}, {how}"]["0"]["left"] == []


def last_error(outcome: dict[str, Any]) -> str:
    """Return the line of the exception that has ended a rank."""
    lines = [line for line in outcome["said"].splitlines() if "Error: " in line]
    return lines[-1] if lines else ""
