# Example: EX30, Command line
# Repair: gemini instead of colossalai, sizes that take a moment
# Run: python examples/documents/commands.py  # starts 2 processes
# Shows: check says what is built, run starts ranks, benchmark measures the modes of tensor parallelism
import subprocess
import sys
import tempfile
from pathlib import Path

GEMINI = [sys.executable, "-m", "gemini"]


def gemini(*arguments):
    done = subprocess.run([*GEMINI, *arguments], capture_output=True, text=True, check=True)
    print(done.stdout)
    return done.stdout


assert "CUDA part" in gemini("check", "-i")

PROGRAM = "import os; os.write(1, f\"rank {os.environ['RANK']}\\n\".encode())"
with tempfile.TemporaryDirectory() as directory:
    train = Path(directory, "train.py")
    train.write_text(PROGRAM)
    ranks = gemini("run", "--nproc_per_node", "2", str(train)).splitlines()
assert sorted(ranks) == ["rank 0", "rank 1"]

sizes = [f"--{name}=1" for name in ("layers", "steps", "batch")]
assert "1d" in gemini("benchmark", "--gpus", "2", *sizes, "--length=8", "--hidden=16", "--device=cpu")
