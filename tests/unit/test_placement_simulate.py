"""``gemini simulate``: figures that are consistent, and options that are refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gemini.cli.main import main
from gemini.cli.simulate import POLICIES
from gemini.memstats import Trace

TRACES = sorted((Path(__file__).parents[2] / "benchmarks" / "traces").glob("*.json"))
VIT = next(path for path in TRACES if path.stem == "vit")
PLACE = ("--device-bytes", "30%", "--disk-bytes", "200%")


def simulate(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    """Run the command on one trace and return its figures."""
    assert main(["simulate", str(VIT), "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_a_shipped_trace_is_a_small_real_step(path):
    trace = Trace.load(path)
    assert path.stat().st_size < 300_000
    assert set(trace.phases) == {"forward", "backward", "optimizer"}
    assert {link.name for link in trace.links} == {"disk_read", "disk_write"}
    assert sum(trace.seconds) > 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("overlap", ["--overlap", "--no-overlap"])
def test_a_step_is_computing_and_waiting_within_the_budgets(capsys, policy, overlap):
    found = simulate(capsys, *PLACE, overlap, "--policy", policy)
    parts = found["compute_seconds"] + sum(found["stall_seconds"].values())
    assert found["step_seconds"] == pytest.approx(parts, rel=0.05)  # a step may end in the next one
    for tier, budget in found["budget_bytes"].items():
        assert found["peak_bytes"][tier] <= budget


def test_no_policy_is_faster_than_the_plan_and_lru_is_the_slowest(capsys):
    seconds = {policy: simulate(capsys, *PLACE, "--policy", policy)["step_seconds"] for policy in POLICIES}
    assert min(seconds, key=seconds.__getitem__) == "plan"
    assert max(seconds, key=seconds.__getitem__) == "lru"


def test_where_everything_fits_only_computing_is_left(capsys):
    found = simulate(capsys, "--disk-bytes", "100%", "--compute-scale", "2")
    assert found["step_seconds"] == pytest.approx(2 * sum(Trace.load(VIT).seconds))
    assert not any(found["link_bytes"].values())


def test_a_given_link_replaces_the_recorded_one(capsys):
    slow = simulate(capsys, *PLACE, "--link", "disk_read=100MB/s", "--policy", "opt")
    fast = simulate(capsys, *PLACE, "--link", "disk_read=10GB/s", "--policy", "opt")
    assert slow["link_seconds"]["disk_read"] > 10 * fast["link_seconds"]["disk_read"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--device-bytes", "x%"), "write a share as 20%"),
        (("--link", "h2d=fast"), "write it as h2d=25GB/s"),
        (("--link", "pcie=25GB/s"), "there is no link 'pcie'"),
        (("--compute-scale", "0"), "it must be a number > 0"),
        (("--compute-scale", "inf"), "it must be a number > 0"),
        (("--compute-scale", "nan"), "it must be a number > 0"),
        (("--host-bytes", "100%"), "the speed of h2d and d2h is unknown"),
        (("--host-bytes", "100%", "--link", "h2d=2GB/s"), "give --link d2h=2GB/s"),
        (("--device-bytes", "inf%"), "write a share as 20% or 150%"),
        (("--device-bytes", "nan%"), "write a share as 20% or 150%"),
        (("--device-bytes", "1e300%"), "no machine has that much"),
        (("--device-bytes", "10%"), "raise device_bytes or host_bytes"),
    ],
)
def test_what_cannot_be_simulated_is_refused(capsys, arguments, words):
    assert main(["simulate", str(VIT), *arguments]) == 2
    assert words in capsys.readouterr().err
