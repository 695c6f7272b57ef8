"""Checkpoints of a model in parts are those of the whole model: any reader takes them, bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gemini import GeminiDDP, GeminiOptimizer, HybridAdam, checkpoint
from gemini.checkpoint import CheckpointReader
from gemini.checkpoint.inspect import verdict
from gemini.checkpoint.saving import CheckpointWriter
from gemini.comm.ranks import Rank
from gemini.errors import CheckpointError, IoError
from gemini.jobs.finetune import parts_checkpoint
from gemini.jobs.finetune.parts_checkpoint import PartOfModel
from gemini.optim.kernels import STATE_DTYPES, StateFormat
from gemini.parallel.booster import Booster, HybridParallelPlugin

TWO_STAGES = {"tp": 1, "pp": 2, "sp": 1}


class Net(nn.Module):
    """Tied weights, a buffer, and a layer that does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(20, 20), nn.Linear(20, 20, bias=False)
        self.frozen = nn.Linear(20, 30).requires_grad_(False)
        self.last.weight = self.first.weight
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.frozen(self.last(torch.tanh(self.first(x))))


class Run:
    """A small model, boosted or in chunks of its own, with its optimizer and schedule."""

    def __init__(self, state_dtype: str = "fp32", *, boosted: bool, sizes: dict[str, int] = TWO_STAGES):
        torch.manual_seed(1)
        net = Net()
        trained = [param for param in net.parameters() if param.requires_grad]
        adam = HybridAdam(trained, lr=0.05, weight_decay=0.01, state_dtype=state_dtype)
        self.model: nn.Module
        self.optimizer: Any
        self.part: PartOfModel | None = None
        if boosted:
            plugin = HybridParallelPlugin()
            booster = Booster(plugin=plugin)
            self.model, self.optimizer, *_ = booster.boost(net, adam)
            form = StateFormat(state_dtype)
            self.part = PartOfModel(booster, plugin, self.model, self.optimizer, form, Rank(), sizes)
        else:
            self.model = GeminiDDP(net)
            self.optimizer = GeminiOptimizer(adam, self.model)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def train(self, steps: range) -> Run:
        for step in steps:
            x = torch.randn(4, 20, generator=torch.Generator().manual_seed(step))
            self.optimizer.backward(self.model(x).square().mean())
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
        return self

    def save(self, directory: Path, step: int = 2) -> None:
        if self.part is None:
            extra = {"step": step}
            checkpoint.save(directory, self.model, self.optimizer, scheduler=self.scheduler, extra=extra)
        else:
            parts_checkpoint.save(directory, self.part, self.scheduler, {"step": step})

    def load(self, directory: Path) -> dict[str, Any]:
        if self.part is None:
            return dict(checkpoint.load(directory, self.model, self.optimizer, scheduler=self.scheduler))
        return parts_checkpoint.load(directory, self.part, self.scheduler)

    def state(self) -> dict[str, Any]:
        """Return copies of all weights, moments and rates, and close the model."""
        assert isinstance(self.model, GeminiDDP)
        state = self.model.module.state_dict(keep_vars=True)
        found = {name: value.detach().clone() for name, value in state.items()}
        kept = copy.deepcopy(self.optimizer.state_dict())
        for number, entry in kept["state"].items():
            found |= {f"{number} {name}": value for name, value in entry.items()}
        found["lr"] = torch.tensor([group["lr"] for group in kept["param_groups"]])
        self.model.close()
        return found


def assert_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_any_of_both_goes_on_from_the_checkpoint_of_either(state_dtype: str, tmp_path: Path) -> None:
    want = Run(state_dtype, boosted=False).train(range(4)).state()
    for saved in (False, True):
        directory = tmp_path / str(saved)
        Run(state_dtype, boosted=saved).train(range(2)).save(directory)
        assert verdict(checkpoint.latest(directory))["damage"] is None
        for loaded in (False, True):
            run = Run(state_dtype, boosted=loaded)
            assert run.load(directory)["step"] == 2
            assert_same(run.train(range(2, 4)).state(), want)


def test_damage_is_found_before_a_value_is_read_and_the_one_before_is_taken(tmp_path: Path) -> None:
    run = Run(boosted=True).train(range(1))
    run.save(tmp_path, 1)
    run.train(range(1, 2)).save(tmp_path, 2)
    weights = next((tmp_path / "step-00000002").glob("model-0*.safetensors"))
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    fresh = Run(boosted=True)
    assert fresh.load(tmp_path)["step"] == 1
    want = Run(boosted=True).train(range(1)).state()
    assert_same(fresh.state(), want)


def test_random_numbers_go_on_for_the_same_parts_alone(tmp_path: Path) -> None:
    Run(boosted=True).train(range(1)).save(tmp_path)
    drawn = torch.rand(3)
    for sizes in (TWO_STAGES, {**TWO_STAGES, "tp": 2}):
        run = Run(boosted=True, sizes=sizes)
        torch.manual_seed(9)
        run.load(tmp_path)
        assert torch.equal(torch.rand(3), drawn) == (sizes == TWO_STAGES)


def test_what_fails_while_it_is_written_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(boosted=True).train(range(1))
    run.save(tmp_path, 1)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "add_buffers", full)
        with pytest.raises(IoError, match="No space left"):
            run.save(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    for step in (3, 4):
        run.save(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_a_checkpoint_of_other_groups_is_refused(tmp_path: Path) -> None:
    Run(boosted=False).train(range(1)).save(tmp_path)
    run = Run(boosted=True)
    assert run.part is not None
    with CheckpointReader(checkpoint.latest(tmp_path)) as reader:
        reader.manifest["group_members"][0].reverse()
        states = parts_checkpoint._StatesOfCheckpoint(reader, reader.objects())
        with pytest.raises(CheckpointError, match="go on with the options of the run that saved it"):
            states.document(run.part.plugin.parts[run.model].whole.members)
