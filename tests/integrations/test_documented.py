"""The programs of docs/huggingface.md and docs/lightning.md run as printed, one after the other."""

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

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_programs_with_hugging_face_run_as_printed(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="only the extra 'test' brings it")
    from hf_models import SIZES, saved
    from test_trl import tokenizer

    saved(transformers.LlamaConfig(**SIZES), transformers.LlamaForCausalLM, tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    programs = programs_of("huggingface.md")
    assert len(programs) == 5
    run("\n".join(programs), tmp_path)
    assert (tmp_path / "run" / "checkpoint-4" / "gemini").is_dir()
    assert (tmp_path / "state" / "gemini").is_dir()
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "averaged")


def test_the_program_with_lightning_runs_as_printed(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="only the extra 'test' brings it")
    (program,) = programs_of("lightning.md")
    run(program, tmp_path)
    assert (tmp_path / "run.ckpt" / "gemini").is_dir()


def programs_of(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), flags=re.M | re.S)


def run(program: str, directory: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(gemini.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
