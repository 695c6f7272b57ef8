"""Train a model whose model data is larger than the memory it may take.

python examples/wrap_a_model.py
python examples/wrap_a_model.py --device-bytes 48MiB --policy const --steps 20
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from torch import nn

import gemini


def build(hidden: int, layers: int) -> nn.Sequential:
    """Return a plain network; nothing in it knows about the runtime."""
    blocks = [nn.Sequential(nn.Linear(hidden, hidden), nn.GELU()) for _ in range(layers)]
    return nn.Sequential(*blocks, nn.Linear(hidden, 1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--policy", default="auto", help="auto, cpu, cuda or const")
    parser.add_argument("--device-bytes", default="64MiB", help="budget for model data and activations")
    parser.add_argument("--device", default="cpu", help="cpu or cuda: what computes, and has the DEVICE tier")
    options = parser.parse_args()

    torch.manual_seed(0)
    inputs = torch.randn(8, options.hidden).to(options.device)
    targets = torch.ones_like(inputs[:, :1])
    with tempfile.TemporaryDirectory() as disk_dir:
        # The lines that matter.
        with gemini.init_on("meta"):  # the model is never whole in memory
            model = build(options.hidden, options.layers)
        with gemini.GeminiDDP(
            model,
            options.device,
            placement_policy=options.policy,
            device_bytes=options.device_bytes,
            disk_dir=disk_dir,
        ) as managed:
            optimizer = gemini.GeminiAdamOptimizer(managed, lr=1e-4, max_norm=1.0)
            for step in range(options.steps):
                loss = nn.functional.mse_loss(managed(inputs), targets)
                optimizer.backward(loss)
                optimizer.step()
                print(f"step {step}  loss {loss.item():.4f}")
            stats = managed.stats()

    print(f"model data {stats['model_data_bytes']:,} bytes in {stats['num_chunks']} chunks")
    for tier in ("device", "host", "disk"):
        use = stats[tier]
        print(f"{tier:6}  peak {use['peak_bytes']:>13,}  budget {use['budget_bytes']:>13,}")
    print(f"waited {stats['stall_seconds']:.2f} s for transfers")


if __name__ == "__main__":
    main()
