"""No part of a boosted model is saved under the names of the whole, by whatever is called."""

from __future__ import annotations

import copy
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_on_ranks
from safetensors.torch import load_file
from torch import nn

from gemini import CheckpointError, ConfigError, CPUAdam
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


# -- what modules keep beside tensors ------------------------------------------------------------------------


class Counting(Block):
    """Has a number in its state that is no tensor."""

    count = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Counted(Net):
    mark = ""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counting() for _ in range(2))

    def get_extra_state(self) -> str:
        return self.mark

    def set_extra_state(self, state: str) -> None:
        self.mark = state

    def said(self) -> list[Any]:
        return [self.mark, *(getattr(block, "count", 0) for block in self.blocks)]


def save_and_load_extra(options: dict[str, Any], path: str) -> tuple[list[Any], list[Any], str]:
    found = []
    booster = Booster(plugin=HybridParallelPlugin(**options))
    for begins in (True, False):
        torch.manual_seed(0)
        net = Counted()
        model, *_ = booster.boost(net, CPUAdam(net.parameters()))
        if begins:
            net.mark = "ours"
            for number, block in enumerate(net.blocks, 3):
                if isinstance(block, Counting):
                    block.count = number
            booster.save_model(model, path)
        else:
            booster.load_model(model, path)
            found.append(net.said())
    whole = Counted()
    booster.load_model(whole, path)
    torch.manual_seed(0)
    other = Net()
    model, *_ = booster.boost(other, CPUAdam(other.parameters()))
    booster.save_model(model, path)
    try:
        net = Counted()
        booster.load_model(booster.boost(net, CPUAdam(net.parameters()))[0], path)
    except CheckpointError as error:
        return found[0], whole.said(), str(error)
    return found[0], whole.said(), ""


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"tp_size": 2, "tp_plan": PLAN, "zero_stage": 1}, [["ours", 3, 4]] * 2),
        ({"pp_size": 2, "num_microbatches": 2}, [["ours", 3, 0], ["ours", 0, 4]]),
    ],
)
def test_extra_states_of_all_modules_are_saved_and_loaded(
    options: dict[str, Any], parts: list[list[Any]], tmp_path: Path
) -> None:
    for found, wanted in zip(
        run_on_ranks(save_and_load_extra, 2, options, str(tmp_path / "whole")), parts, strict=True
    ):
        assert found[0] == wanted
        assert found[1] == ["ours", 3, 4]
        assert "no extra state" in found[2]


def copy_of_parts(zero_stage: int, path: str) -> tuple[bool, ...]:
    torch.manual_seed(0)
    plugin = HybridParallelPlugin(tp_size=2, tp_plan=PLAN, zero_stage=zero_stage)
    net, batch, booster = Net(), torch.ones(2, 8), Booster(plugin=plugin)
    for block in net.blocks:
        block.norm = nn.Identity()
    begun = {name: value.clone() for name, value in net.state_dict().items()}
    model, *_ = booster.boost(net, CPUAdam(net.parameters()))
    want = model(batch).detach()
    averaged = copy.deepcopy(model)
    same = torch.equal(averaged(batch), want)
    with torch.no_grad():
        for param in averaged.parameters():
            param.mul_(0.5)
    found = [same, torch.equal(model(batch).detach(), want)]
    for saved, by in ((averaged, 0.5), (averaged.module, 0.5), (model.module, 1.0)):
        booster.save_model(saved, path)
        files = load_file(path)
        found.append(all(torch.equal(files[name], value * by) for name, value in begun.items()))
    return tuple(found)


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_a_copy_of_parts_is_of_the_same_ranks_and_has_its_own_weights(
    zero_stage: int, tmp_path: Path
) -> None:
    path = str(tmp_path / "model.safetensors")
    assert run_on_ranks(copy_of_parts, 2, zero_stage, path) == [(True,) * 5] * 2
