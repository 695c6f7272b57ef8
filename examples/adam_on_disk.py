"""Keep optimizer states of an ordinary, unmanaged model in a file; the numbers stay the same.

python examples/adam_on_disk.py
python examples/adam_on_disk.py --fraction 1.0 --hidden 2048
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from torch import nn

import gemini


def train(hidden: int, steps: int, fraction: float, directory: str | None) -> tuple[nn.Module, list[float]]:
    """Train with ``fraction`` of the optimizer-state bytes in a file under ``directory``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, hidden))
    optimizer = gemini.HybridAdam(
        model.parameters(), lr=1e-3, nvme_offload_fraction=fraction, nvme_offload_dir=directory
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)  # a plain torch optimizer
    losses = []
    for _ in range(steps):
        batch = torch.randn(8, hidden)
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    optimizer.close()  # gives the file back
    return model, losses


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--fraction", type=float, default=0.5, help="share of optimizer-state bytes in a file"
    )
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as directory:
        on_disk, losses = train(options.hidden, options.steps, options.fraction, directory)
    in_memory, want = train(options.hidden, options.steps, 0.0, None)

    print("losses  " + "  ".join(f"{loss:.5f}" for loss in losses))
    pairs = zip(on_disk.parameters(), in_memory.parameters(), strict=True)
    if losses != want or not all(torch.equal(left, right) for left, right in pairs):
        raise SystemExit("the states on disk changed the numbers")
    print(f"identical to all states in memory, with {options.fraction:.0%} of them in a file")


if __name__ == "__main__":
    main()
