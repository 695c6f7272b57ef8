"""A module that calls itself within its own forward pass, as a trainer's step does, makes one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import gemini


class Stepping(nn.Module):
    """Has a method that calls the module itself, as well as its parts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.parts(inputs)
        return output

    def step(self, inputs: torch.Tensor) -> torch.Tensor:
        return (self(inputs) + self.parts[0](inputs)).square().mean()


def managed(**options: Any) -> tuple[Stepping, Any]:
    model = Stepping()
    sizes = {"min_chunk_size_mb": 0.01, "search_range_mb": 0.01, "non_model_bytes": 0}
    return model, gemini.manage(model, device_bytes="100KiB", host_bytes="1MiB", **sizes, **options)


def test_steps_within_steps_have_the_numbers_and_the_plan_of_plain_ones() -> None:
    (model, handle), plain = managed(), Stepping()
    optimizer = gemini.GeminiAdamOptimizer(model, lr=1e-2)
    other = gemini.CPUAdam(plain.parameters(), lr=1e-2)
    for _step in range(3):
        loss, want = handle.forward(model.step, (torch.ones(2, 64),), {}), plain.step(torch.ones(2, 64))
        assert torch.equal(loss, want)
        loss.backward()
        want.backward()
        optimizer.step()
        other.step()
        other.zero_grad()
    assert not handle.stats()["warmup"]
    got = handle.state_dict()
    assert all(torch.equal(got[name], value) for name, value in plain.state_dict().items())


@torch.no_grad()
def test_an_evaluation_within_one_keeps_its_order() -> None:
    model, handle = managed()
    for _evaluation in range(3):
        handle.forward(model.step, (torch.ones(2, 64),), {})
    outer = handle.memstats("eval")
    assert outer is not None
    assert outer.num_moments == 7  # the six layers, and the first one again after them
