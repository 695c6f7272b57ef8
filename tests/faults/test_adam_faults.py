"""Run injected_adam_faults.py in a process whose reads and writes can be made to fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_injected_faults import HERE, shim

__all__ = ["shim"]  # a fixture


@pytest.mark.dear("a file of tests in a process of its own, in which calls can be made to fail")
def test_adam_on_a_failing_disk(shim: Path, tmp_path: Path) -> None:
    """Every test of injected_adam_faults.py passes; its output says which did not."""
    environment = {
        **os.environ,
        "LD_PRELOAD": str(shim),
        "GEMINI_FAULT_SHIM": str(shim),
        "GEMINI_IO_BACKEND": "threads",
        "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--basetemp", str(tmp_path / "inner"), str(HERE / "injected_adam_faults.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
