"""Train bf16 weights with exact fp32 masters in 8 bytes per parameter; clip with one look at the gradients.

python examples/compact_states.py
python examples/compact_states.py --state-dtype bf16 --hidden 1024 --steps 100
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import nn

import gemini
from gemini.optim.kernels import sum_of_squares


def clipping_scale(params: list[nn.Parameter], max_norm: float) -> float | None:
    """Return what to divide the gradients by so that their norm is at most ``max_norm``.

    One read of the gradients gives the norm and says whether all are finite: None if not.
    """
    norm = math.sqrt(sum(sum_of_squares(p.grad) for p in params if p.grad is not None))
    return max(1.0, norm / max_norm) if math.isfinite(norm) else None


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of all optimizer states; step counts are no arrays."""
    return sum(
        value.nbytes for state in optimizer.state.values() for name, value in state.items() if name != "step"
    )


def train(options: argparse.Namespace, state_dtype: str) -> tuple[list[float], float]:
    """Train with states of ``state_dtype``; return the losses, and the bytes held per parameter."""
    torch.manual_seed(0)
    hidden = options.hidden
    model = nn.Sequential(nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, hidden)).bfloat16()
    params = list(model.parameters())
    optimizer = gemini.CPUAdam(params, lr=1e-3, state_dtype=state_dtype, master_remainders=True)
    losses = []
    for _ in range(options.steps):
        batch = torch.randn(64, hidden, dtype=torch.bfloat16)
        loss = (model(batch).float() - batch.float()).square().mean()
        loss.backward()
        scale = clipping_scale(params, options.max_norm)
        if scale is not None:  # else: skip this step, as a loss scaler would
            optimizer.step(grad_scale=scale)  # applied on the way in, without a pass of its own
        weights = sum(p.nbytes + p.grad.nbytes for p in params if p.grad is not None)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, (weights + state_bytes(optimizer)) / sum(p.numel() for p in params)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--max-norm", type=float, default=0.1)
    parser.add_argument("--state-dtype", default="int8", choices=("int8", "bf16"))
    options = parser.parse_args()

    losses = {}
    for state_dtype in ("fp32", options.state_dtype):
        losses[state_dtype], held = train(options, state_dtype)
        print(
            f"{state_dtype} states: {held:5.2f} bytes per parameter (weight, gradient, remainder, moments), "
            f"loss {losses[state_dtype][0]:.4f} to {losses[state_dtype][-1]:.4f}"
        )
    difference = losses[options.state_dtype][-1] / losses["fp32"][-1] - 1
    print(f"last loss against fp32 states: {difference:+.3%}")
    if not abs(difference) < 0.02:
        raise SystemExit("compact states changed the training by 2 % or more")


if __name__ == "__main__":
    main()
