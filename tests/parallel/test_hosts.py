"""ZeRO over hosts that share nothing but one wire and a directory: two network namespaces."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hosts_job
import psutil
import pytest
import torch
from forked_ranks import Ended, Job, launch
from hosts import Host, two_hosts
from hosts_job import RECIPE, SPOILED, Order, wide
from pairs import first
from processes import run_on_ranks
from sharded_harness import assert_near, assert_same, batch, train_plain, wrap

from gemini.checkpoint import load
from gemini.checkpoint.directory import complete_checkpoints

HERE = Path(__file__).resolve().parent
CUT = {"save_after": 3, "cut_in": 3}
TIMEOUT_SECONDS = 10.0  # of the process group of a job that loses its wire
LATE_SECONDS = 20.0  # what a busy machine may take besides

_Reports = list[dict[str, Any]]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    """Two hosts, joined by a wire."""
    with two_hosts(tmp_path) as joined:
        yield joined


def _launch(hosts: tuple[Host, Host], order: Order, ranks: int) -> tuple[list[Ended], _Reports]:
    """Run a job with ``ranks`` ranks on each host; return how it ended and what each rank has seen."""
    job = Job(hosts_job.main, (order,), ranks, {"OMP_NUM_THREADS": "1"})
    reports = [order.report(rank) for rank in range(2 * ranks)]
    for report in reports:
        report.unlink(missing_ok=True)
    directory = Path(order.directory).parent
    ended = launch(hosts, job, directory=directory, timeout=180.0)
    assert all(report.exists() for report in reports), "".join(host.output for host in ended)
    return ended, [torch.load(report) for report in reports]


def _lose_the_wire(hosts: tuple[Host, Host], order: Order, ranks: int) -> _Reports:
    """Run a job until the wire is cut in the middle of a step; return what each rank has seen."""
    ended, reports = _launch(hosts, replace(order, **CUT, timeout=TIMEOUT_SECONDS), ranks)
    assert [job.returncode for job in ended] == [1, 1], ended
    for report in reports:
        _assert_raised_in_time(report, reports[0]["cut"])
    assert [path.name for path in order.checkpoints.iterdir()] == ["step-00000003"]
    assert list(order.offloaded.iterdir()) == []
    return reports


def _assert_raised_in_time(report: dict[str, Any], lost: float) -> None:
    """Check how a rank ended after the wire, or another rank, was lost."""
    assert "imed out" in report["error"] or "onnection" in report["error"]
    # Twice: a rank that gave up one transfer may wait for another one, to leave no memory in use.
    assert report["ended"] - lost < 2 * TIMEOUT_SECONDS + LATE_SECONDS


def _go_on(hosts: tuple[Host, Host], order: Order, ranks: int, begun: _Reports) -> _Reports:
    """Run the job again and compare both parts of the training with one that nobody disturbed, bit for bit
    with ranks that share a machine, and nearly with one process."""
    hosts[0].set_link("up")
    ended, reports = _launch(hosts, order, ranks)
    assert [job.returncode for job in ended] == [0, 0], ended
    calm = replace(order, directory=f"{order.directory}-calm")
    for before, report, want in zip(
        begun, reports, run_on_ranks(hosts_job.train, 2 * ranks, calm, timeout=240.0), strict=True
    ):
        assert before["several"]
        assert not want["several"]
        assert {**before["losses"], **report["losses"]} == want["losses"]
        assert_same(report["weights"], want["weights"])
        losses, weights = train_plain(wide, replace(RECIPE, steps=order.steps))
        assert_near(report["weights"], weights)
        assert list(want["losses"].values()) == pytest.approx(losses, rel=1e-5)
    return reports


@pytest.mark.dear("ranks on two hosts train three times, started for this case")
def test_shards_on_two_hosts_outlive_the_wire_and_load_on_one(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    order = Order(str(tmp_path / "job"))
    begun = _lose_the_wire(hosts, order, 1)
    assert [report["boot_id"] for report in begun] == [host.boot_id for host in hosts]
    for report in begun:
        assert any(report["synchronous"])
    model, optimizer = wrap(wide, RECIPE)
    with model:
        assert load(order.checkpoints, model, optimizer)["step"] == 3
        assert_same(model.state_dict(), begun[0]["saved"])
        loss = model(batch(3)).square().mean().item()
    resumed = _go_on(hosts, order, 1, begun)
    assert loss == pytest.approx(resumed[0]["losses"][3], rel=1e-5)


@pytest.mark.dear("ranks on two hosts train three times, started for this case")
@pytest.mark.parametrize("spoil", first(SPOILED, 2))
def test_a_save_that_loses_the_wire_or_a_rank_leaves_checkpoints_that_load(
    hosts: tuple[Host, Host], tmp_path: Path, spoil: str
) -> None:
    order = Order(str(tmp_path / "job"))
    saving = replace(order, save_after=3, spoil=spoil, timeout=TIMEOUT_SECONDS)
    ended, begun = _launch(hosts, saving, 1)
    assert all(job.returncode for job in ended), ended
    (lost,) = (report["cut"] for report in begun if "cut" in report)
    killed = {"first rank killed": [0], "last rank killed": [1]}.get(spoil, [])
    for rank, report in enumerate(begun):
        if rank not in killed:
            _assert_raised_in_time(report, lost)
    # All ranks had said that theirs was written: then it is there, although nobody could be told.
    whole = ["step-00000003", *(["step-00000004"] if spoil == "cut when published" else [])]
    assert [path.name for path in reversed(complete_checkpoints(order.checkpoints))] == whole
    left = {path.name for path in order.checkpoints.iterdir()} - set(whole)
    assert left == ({"step-00000004.partial"} if 0 in killed else set())
    resumed = _go_on(hosts, order, 1, begun)
    assert min(resumed[0]["losses"]) == 2 + len(whole)


@pytest.mark.dear("ranks on two hosts train three times, started for this case")
def test_copies_on_two_hosts_exchange_their_gradients_mean_alone(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    order = Order(str(tmp_path / "job"), copies=2)
    begun = _lose_the_wire(hosts, order, 2)
    # For each of its two shards a host sends one half to be added, and the sum of the other half, in fp32.
    mean_bytes = sum(4 * parameter.numel() for parameter in wide().parameters())
    resumed = _go_on(hosts, order, 2, begun)
    for report in begun + resumed:
        assert report["crossed"]
        for crossed in report["crossed"]:
            # To gather the parameters over the hosts once would send as many bytes again.
            assert mean_bytes <= crossed <= 1.25 * mean_bytes, (mean_bytes, report["crossed"])


_TALK = """
import socket, sys
kind, address = getattr(socket, sys.argv[1]), eval(sys.argv[2])
with socket.socket(kind) as server, socket.socket(kind) as client:
    if sys.argv[3] == "listen":
        server.bind(address)
        server.listen()
        print("listening", flush=True)
        sys.stdin.read()
    client.settimeout(5)
    print(client.connect_ex(address))
"""


@pytest.mark.parametrize(
    ("family", "address", "reached"),
    [
        ("AF_INET", "('10.77.7.1', 5000)", True),
        ("AF_INET", "('127.0.0.1', 5000)", False),
        ("AF_UNIX", "'\\0gemini-hosts'", False),
    ],
)
def test_hosts_share_nothing_but_the_wire(
    hosts: tuple[Host, Host], family: str, address: str, reached: bool
) -> None:
    first, second = hosts
    talk = [sys.executable, "-c", _TALK, family, address]
    with subprocess.Popen(
        first.command(*talk, "listen"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "listening\n"
        assert (first.run(*talk, "connect") == "0\n", second.run(*talk, "connect") == "0\n") == (
            True,
            reached,
        )
        server.communicate("")


_OWN = """
import pathlib, sys
from hosts import two_hosts
with two_hosts(pathlib.Path(sys.argv[1])) as hosts:
    print(*(host.pid for host in hosts), flush=True)
    sys.stdin.read()
"""


def test_hosts_end_with_the_process_that_made_them(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _OWN, str(tmp_path)],
        env={"PYTHONPATH": str(HERE), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        inside = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
        assert len(inside) == 2
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        assert psutil.wait_procs(inside, timeout=30)[1] == []
    assert all(psutil.pid_exists(host.pid) for host in hosts)
