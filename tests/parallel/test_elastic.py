"""torchrun starts ranks again after one was killed: they go on from the last checkpoint, at any number."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from forked_ranks import run_program

import gemini

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "ranks_that_restart.py"
SMALL = ["--layers", "2", "--hidden", "64", "--device-bytes", "24MiB"]


def _losses(printed: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss ([\d.]+)", printed)}


def _run(ranks: int, directory: Path, *arguments: str) -> dict[int, float]:
    """Run the example as torchrun would start it; return the losses by step."""
    return _losses(run_program(EXAMPLE, *SMALL, "--run-dir", str(directory), *arguments, ranks=ranks))


def _run_under_torchrun(ranks: int, directory: Path, *arguments: str) -> dict[int, float]:
    """Run the example under torchrun, which starts all ranks again when one dies."""
    path = str(Path(gemini.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    launch = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "--max-restarts",
        "2",
    ]
    done = subprocess.run(
        [
            sys.executable,
            *launch,
            "--nproc-per-node",
            str(ranks),
            str(EXAMPLE),
            *SMALL,
            "--run-dir",
            str(directory),
            *arguments,
        ],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return _losses(done.stdout)


@pytest.mark.dear("torchrun starts two ranks twice")
def test_a_killed_rank_leads_to_a_resume_without_anybody_doing_anything(tmp_path: Path) -> None:
    want = _run(2, tmp_path / "calm", "--steps", "5")
    got = _run_under_torchrun(2, tmp_path / "killed", "--steps", "4", "--kill-at", "2")
    assert sorted(got) == [0, 1, 2, 3]
    assert got == {step: loss for step, loss in want.items() if step < 4}
    fewer = _run(1, tmp_path / "killed", "--steps", "5")
    assert fewer == {4: pytest.approx(want[4], abs=1e-4)}


ALONE = """
from datetime import timedelta
from torch import distributed as dist
from gemini.parallel import join_ranks
try:
    join_ranks("gloo", timeout=timedelta(seconds=1))
except dist.DistError as error:
    print(f"nobody came: {error}")
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_waits_for_the_others_no_longer_than_it_is_told(rank: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ours = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    path = str(Path(gemini.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", ALONE],
        env={**os.environ, "PYTHONPATH": path, **ours},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "nobody came" in done.stdout, done.stdout + done.stderr
