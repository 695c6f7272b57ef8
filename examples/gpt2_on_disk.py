"""Train GPT-2 on the CPU with its optimizer states in memory and in a file; compare losses, time and memory.

python examples/gpt2_on_disk.py
python examples/gpt2_on_disk.py --fractions 0 0.5 1 --dir /fast/drive --steps 10
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import gemini
from gemini.jobs.gpt.model import GPT, GPTConfig, language_loss


@dataclass(frozen=True)
class Result:
    """What training with one fraction gave."""

    losses: list[float]
    seconds: float
    resident_bytes: int


def resident_bytes() -> int:
    """Return the memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def train(config: GPTConfig, options: argparse.Namespace, fraction: float) -> Result:
    """Train on random tokens with ``fraction`` of the optimizer-state bytes in a file."""
    torch.manual_seed(0)
    model = GPT(config)
    optimizer = gemini.HybridAdam(
        model.parameters(), nvme_offload_fraction=fraction, nvme_offload_dir=options.dir
    )
    losses = []
    for step in range(options.steps):
        if step == 1:
            start = time.perf_counter()  # the first step also makes the states
        tokens = torch.randint(config.vocab, (options.batch, options.seq + 1))
        loss = language_loss(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Result(losses, (time.perf_counter() - start) / (options.steps - 1), resident_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=50257)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--dir", help="where the file is; default: a temporary directory")
    options = parser.parse_args()

    config = GPTConfig(
        vocab=options.vocab, layers=options.layers, hidden=options.hidden, heads=12, seq=options.seq
    )
    results = []
    for fraction in options.fractions:
        # A process of its own for each, so that memory is what this one needs.
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as process:
            result = process.submit(train, config, options, fraction).result()
        print(
            f"{fraction:4.0%} in a file: {result.seconds:6.3f} s per step, "
            f"{result.resident_bytes / 2**20:6.0f} MiB, losses "
            + " ".join(f"{loss:.4f}" for loss in result.losses)
        )
        results.append(result)
    if any(result.losses != results[0].losses for result in results):
        raise SystemExit("the states on disk changed the numbers")
    print("identical losses")


if __name__ == "__main__":
    main()
