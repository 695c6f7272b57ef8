"""The job script of docs/slurm.md, with stand-ins for srun and scontrol: signalled, requeued, and ended."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hf_models import SIZES, saved

import gemini

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

ROOT = Path(__file__).resolve().parents[2]
STEPS = 100
COMMANDS = {
    "gemini": f'exec {sys.executable} -m gemini.cli.main "$@"',
    # Hands the signal to what it has started, once: when that has made some steps.
    "srun": """
"$@" & run=$!
if [ ! -e signalled ]; then
  touch signalled
  until [ -s out/metrics.jsonl ] || ! kill -0 $run; do read -rt 0.02 < <(:); done
  kill -USR1 $run
fi
wait $run
""",
    "scontrol": 'echo "$@" >> requeued',
}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Return a directory with the script, its recipe, and the commands that SLURM would have."""
    from test_finetune import save_tokenizer

    (script,) = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "slurm.md").read_text(), flags=re.S)
    (tmp_path / "job.sh").write_text(script)
    sizes = {**SIZES, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": 0}
    saved(transformers.LlamaConfig(**sizes), transformers.LlamaForCausalLM, tmp_path / "base")
    save_tokenizer(tmp_path / "base")
    lines = [json.dumps({"text": "all work and no play " * (1 + row % 3)}) for row in range(20)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    (tmp_path / "full.toml").write_text(
        'model = "base"\ndata = "data.jsonl"\noutput = "out"\n'
        f'seq = 24\nbatch = 2\nsteps = {STEPS}\ndevice_bytes = "240KiB"\nforecast = false\n'
    )
    (tmp_path / "bin").mkdir()
    for name, text in COMMANDS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def submit(job: Path) -> subprocess.CompletedProcess[str]:
    """Run the script as SLURM does."""
    environment = {
        **os.environ,
        "PATH": f"{job / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(gemini.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "SLURM_JOB_ID": "17",
        "SLURM_TMPDIR": str(job),
    }
    command = ["bash", "job.sh"]
    return subprocess.run(command, cwd=job, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.dear("a job that is started, signalled and started again")
def test_a_job_that_was_signalled_is_requeued_and_goes_on_to_its_end(job: Path) -> None:
    first = submit(job)
    assert first.returncode == 138, first.stderr
    assert (job / "requeued").read_text() == "requeue 17\n"
    begun = len((job / "out" / "metrics.jsonl").read_text().splitlines())
    assert 0 < begun < STEPS
    second = submit(job)
    assert second.returncode == 0, second.stderr
    assert (job / "requeued").read_text() == "requeue 17\n"
    records = [json.loads(line) for line in (job / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert json.loads((job / "out" / "summary.json").read_text())["first_step"] == begun
    transformers.AutoModelForCausalLM.from_pretrained(job / "out" / "model")
