"""torchrun starts ranks again after one was killed: they go on from the last checkpoint, at any number."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gemini

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = str(ROOT / "examples" / "ranks_that_restart.py")
SMALL = ["--layers", "2", "--hidden", "64", "--device-bytes", "24MiB"]


def _run(ranks: int, directory: Path, *arguments: str) -> dict[int, float]:
    """Run the example under torchrun; return the losses by step."""
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
            EXAMPLE,
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
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss ([\d.]+)", done.stdout)}


def test_a_killed_rank_leads_to_a_resume_without_anybody_doing_anything(tmp_path: Path) -> None:
    want = _run(2, tmp_path / "calm", "--steps", "5")
    got = _run(2, tmp_path / "killed", "--steps", "4", "--kill-at", "2")
    assert sorted(got) == [0, 1, 2, 3]
    assert got == {step: loss for step, loss in want.items() if step < 4}
    fewer = _run(1, tmp_path / "killed", "--steps", "5")
    assert fewer == {4: pytest.approx(want[4], abs=1e-4)}
