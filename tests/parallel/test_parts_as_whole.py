"""No part of a boosted model is saved under the names of the whole, by whatever is called."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_on_ranks
from torch import nn

from gemini import ConfigError, CPUAdam
from gemini.parallel import Booster, HybridParallelPlugin


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.norm(self.up(x))))
        return out


REFUSED = re.compile("booster.save_model|a GeminiDDP cannot be copied or pickled")
PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def ask(options: dict[str, Any], path: str) -> list[str]:
    """Return what is said to each way in which weights leave; nothing where it is let through."""
    torch.manual_seed(0)
    booster = Booster(plugin=HybridParallelPlugin(**options))
    net = Net()
    want = {name: value.clone() for name, value in net.state_dict().items()}
    model, *_ = booster.boost(net, CPUAdam(net.parameters()))
    module: Any = model.module
    ways = [
        lambda: model.state_dict(),
        lambda: module.state_dict(),
        lambda: module.blocks.state_dict(),
        lambda: torch.save(model, io.BytesIO()),
        lambda: torch.save(module, io.BytesIO()),
        lambda: module.blocks[0].norm.state_dict() and None,
    ]
    if options.get("zero_stage") == 3:
        ways.insert(0, lambda: list(model.state_dict_shard()))
    said = []
    for way in ways:
        try:
            way()
        except ConfigError as error:
            said.append(str(error))
        else:
            said.append("")
    booster.save_model(model, path)
    whole = Net()
    booster.load_model(whole, path)
    assert all(torch.equal(value, want[name]) for name, value in whole.state_dict().items())
    assert model.state_dict(keep_vars=True)
    return said


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_cut_layers_are_refused_and_whole_ones_are_not(tmp_path: Path, zero_stage: int) -> None:
    options: dict[str, Any] = {"tp_size": 2, "tp_plan": PLAN, "zero_stage": zero_stage}
    for said in run_on_ranks(ask, 2, options, str(tmp_path / "whole")):
        assert all(map(REFUSED.search, said[:-1]))
        assert said[-1] == ""


def test_a_model_without_the_layers_of_another_stage_is_refused(tmp_path: Path) -> None:
    options = {"pp_size": 2, "num_microbatches": 2}
    for said in run_on_ranks(ask, 2, options, str(tmp_path / "whole")):
        assert all(map(REFUSED.search, said[:5]))


def test_a_whole_model_is_not_refused(tmp_path: Path) -> None:
    for said in run_on_ranks(ask, 2, {"zero_stage": 1}, str(tmp_path / "whole")):
        assert said == [""] * 6
