"""The programs of docs/huggingface.md run as printed, one after the other in one directory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gemini

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "huggingface.md"


def test_programs_run_as_printed(tmp_path: Path) -> None:
    from hf_models import SIZES, saved

    saved(transformers.LlamaConfig(**SIZES), transformers.LlamaForCausalLM, tmp_path / "model")
    program = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S))
    assert program.count("import gemini") == 2
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(gemini.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "checkpoint-4" / "gemini").is_dir()
    assert (tmp_path / "state" / "gemini").is_dir()
