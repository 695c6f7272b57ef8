"""Engine on several processes: ranks share gradients, by DDP or by handlers, and parts of layers go along."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import run_on_ranks
from torch import distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from gemini.parallel.engine import AMP_TYPE, get_dataloader, initialize
from gemini.parallel.launch import global_context, launch_from_torch, shutdown
from gemini.parallel.tensor import nn as layers

SHARED = {"gradient_handler": [{"type": "DataParallelGradientHandler"}]}


class Mlp(nn.Module):
    """Layers over the ranks of tensor parallelism; ``unused`` has no gradient on any rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.up, self.down = layers.Linear(8, 16), layers.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def run(config: dict[str, Any], steps: int = 4, spike: bool = False) -> tuple[list[float], list[Any], float]:
    """Train over the launched ranks; return losses, whole weights and the last norm of gradients."""
    launch_from_torch(config)
    model = Mlp()
    parts = layers.partition_of(model) if global_context.tensor_parallel_size > 1 else None
    if dist.get_rank() and parts is None:
        with torch.no_grad():
            model.up.weight.mul_(2)  # the weights of the first rank count
    data = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    loader = get_dataloader(
        TensorDataset(data, data[:, :4]), batch_size=8 // global_context.data_parallel_size
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, loader, _, _ = initialize(model, optimizer, nn.MSELoss(), loader)
    losses, norms = [], []
    clip = engine.optimizer.clip_grad_by_norm
    engine.optimizer.clip_grad_by_norm = lambda norm: norms.append(float(clip(norm)))
    source = iter(loader)
    for step in range(steps):
        if spike and step == 1 and dist.get_rank() == 1:
            model.down.weight.register_hook(lambda grad: grad * torch.inf)
        engine.zero_grad()
        losses.append(float(engine.execute_schedule(source)[2]))
        engine.step()
    state = engine.model.state_dict(keep_vars=True)
    whole = state if parts is None else parts.gather_state(state)
    shutdown()
    return losses, [value.float() for value in whole.values()], norms[-1] if norms else 0.0


CONFIGS = {
    "plain": {},
    "handlers": SHARED,
    "clipped": {"clip_grad_norm": 0.01},
    "accumulated": {"gradient_accumulation": 2, "clip_grad_norm": 0.01},
    "accumulated, handlers": {"gradient_accumulation": 2, **SHARED},
    "zero": {"gradient_accumulation": 2, "zero": {"stage": 1, "precision": "fp32"}},
    "chunks": {
        "gradient_accumulation": 2,
        "clip_grad_norm": 0.01,
        "zero": {"stage": 3, "mixed_precision": None},
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_two_ranks_have_the_weights_of_one(name: str) -> None:
    ((_, want, norm),) = run_on_ranks(run, 1, CONFIGS[name])
    first, second = run_on_ranks(run, 2, CONFIGS[name])
    for _, got, measured in (first, second):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
        assert measured == pytest.approx(norm, rel=1e-4)
    assert all(map(torch.equal, first[1], second[1]))


@pytest.mark.parametrize("extra", [{}, SHARED], ids=["plain", "handlers"])
def test_parts_of_layers_are_clipped_by_the_norm_of_the_whole(extra: dict[str, Any]) -> None:
    config = {"clip_grad_norm": 0.01, **extra}
    ((losses, want, norm),) = run_on_ranks(run, 1, config)
    for got, weights, measured in run_on_ranks(
        run, 2, {**config, "parallel": {"tensor": {"size": 2, "mode": "1d"}}}
    ):
        assert got == pytest.approx(losses, rel=1e-4)
        assert measured == pytest.approx(norm, rel=1e-4)
        torch.testing.assert_close(weights, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", [AMP_TYPE.TORCH, AMP_TYPE.NAIVE])
def test_ranks_with_parts_skip_a_step_together(mode: AMP_TYPE) -> None:
    config = {"fp16": {"mode": mode}, "parallel": {"tensor": {"size": 2, "mode": "1d"}}}
    config["fp16"]["init_scale" if mode is AMP_TYPE.TORCH else "initial_scale"] = 2.0**4
    skipped = run_on_ranks(run, 2, config, 4, True)
    once = run_on_ranks(run, 2, config, 1, False)
    for (_, got, _), (_, want, _) in zip(skipped, once, strict=True):
        assert all(map(torch.equal, got, want))  # nothing after the first step
