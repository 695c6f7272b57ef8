"""Save everything after half of the steps, resume in a new model, and compare with a run that never stopped.

python examples/save_and_resume.py
python examples/save_and_resume.py --directory checkpoints --precision bf16
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn

import gemini
from gemini import checkpoint


def wrap(
    hidden: int, precision: str, device_bytes: str, disk_dir: str
) -> tuple[gemini.GeminiDDP, gemini.GeminiOptimizer]:
    """Return a managed model and its optimizer, from the same seed every time."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * hidden, hidden)
    )
    managed = gemini.GeminiDDP(
        model, mixed_precision=precision, device_bytes=device_bytes, non_model_bytes=0, disk_dir=disk_dir
    )
    adam = gemini.HybridAdam(managed.parameters(), lr=1e-3, weight_decay=0.01)
    return managed, gemini.GeminiOptimizer(adam, managed)


def train(
    managed: gemini.GeminiDDP, optimizer: gemini.GeminiOptimizer, hidden: int, steps: int
) -> list[float]:
    """Run ``steps`` steps on random data (dropout draws from the same generator); return the losses."""
    losses = []
    for _ in range(steps):
        batch = torch.randn(8, hidden)
        loss = (managed(batch).float() - batch).square().mean()
        optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--directory", type=Path, help="keep the checkpoint here (default: a temporary one)")
    options = parser.parse_args()
    half = options.steps // 2

    with tempfile.TemporaryDirectory() as scratch:
        directory = options.directory or Path(scratch) / "checkpoint"

        managed, optimizer = wrap(options.hidden, options.precision, "4MiB", scratch)
        with managed:
            train(managed, optimizer, options.hidden, half)
            path = checkpoint.save(directory, managed, optimizer, extra={"note": "any JSON data"})
            print(f"saved {path.name} after {half} steps")
            want = train(managed, optimizer, options.hidden, options.steps - half)

        # Another budget on purpose: where data lives never changes the numbers.
        managed, optimizer = wrap(options.hidden, options.precision, "64MiB", scratch)
        with managed:
            extra = checkpoint.load(directory, managed, optimizer)
            print(f"resumed at step {managed.stats()['step']} with extra {extra}")
            got = train(managed, optimizer, options.hidden, options.steps - half)

    for index, (resumed, uninterrupted) in enumerate(zip(got, want, strict=True), start=half):
        print(f"step {index}  resumed {resumed!r}  uninterrupted {uninterrupted!r}")
    if got != want:
        raise SystemExit("the resumed run differs")
    print("identical, bit for bit")


if __name__ == "__main__":
    main()
