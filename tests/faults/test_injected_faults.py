"""Run files of tests in a process whose reads and writes can be made to fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def shim(tmp_path: Path) -> Path:
    """Compile fault_shim.c."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs Linux and a C compiler to make system calls fail")
    library = tmp_path / "fault_shim.so"
    source = str(HERE / "fault_shim.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), source, "-ldl"], check=True)
    return library


@pytest.mark.dear("a file of tests in a process of its own, in which calls can be made to fail")
@pytest.mark.parametrize("script", ["injected_faults.py", "injected_offload_faults.py"])
def test_a_failed_transfer_is_raised_and_loses_nothing(script: str, shim: Path, tmp_path: Path) -> None:
    """Every test of the script passes; its output says which did not."""
    environment = {
        **os.environ,
        "LD_PRELOAD": str(shim),
        "GEMINI_FAULT_SHIM": str(shim),
        "GEMINI_IO_BACKEND": "threads",  # io_uring makes no calls that could be intercepted
        "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--basetemp",
        str(tmp_path / "inner"),
    ]
    done = subprocess.run(
        [*command, str(HERE / script)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
