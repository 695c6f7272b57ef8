"""``gemini.from_pretrained`` of a module that is no model of transformers: files straight into chunks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import gemini
from gemini.errors import CheckpointError, ConfigError, OutOfBudgetError
from gemini.integrations.safetensors_files import SafetensorsFiles


class Net(nn.Module):
    """Has a tied weight, and a buffer that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.body = nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32))
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return a score per token and class."""
        scores: torch.Tensor = self.head(self.body(self.embed(tokens)))
        return scores


def net() -> Net:
    torch.manual_seed(1)
    model = Net()
    model.seen.fill_(4.0)
    return model


def save(model: nn.Module, directory: Path, shards: int = 1) -> Path:
    """Write the state as ``save_pretrained`` does: a tied weight once, shards with an index."""
    state = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    if shards == 1:
        save_file(state, directory / "model.safetensors")
        return directory
    where: dict[str, str] = {}
    for number in range(shards):
        part = dict(list(state.items())[number::shards])
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        save_file(part, directory / name)
        where |= dict.fromkeys(part, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return directory


def tight(directory: Path) -> dict[str, Any]:
    return {"device_bytes": "64KiB", "disk_dir": str(directory), "non_model_bytes": 0}


@pytest.mark.parametrize("shards", [1, 3])
def test_values_are_those_of_the_files(shards: int, tmp_path: Path) -> None:
    want = net()
    got = gemini.from_pretrained(save(want, tmp_path, shards), Net, **tight(tmp_path))
    state = want.state_dict()
    assert got.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in got.state_dict().items())
    assert got.head.weight is got.embed.weight
    assert gemini.handle_of(got).stats()["device"]["peak_bytes"] <= 64 * 1024


def test_what_was_loaded_trains_as_an_unmanaged_model(tmp_path: Path) -> None:
    want = net()
    got = gemini.from_pretrained(save(want, tmp_path), Net, **tight(tmp_path))
    for model, optimizer in (
        (want, gemini.CPUAdam(want.parameters(), lr=1e-2)),
        (got, gemini.GeminiAdamOptimizer(got, lr=1e-2)),
    ):
        for step in range(3):
            tokens = torch.arange(8) + step
            nn.functional.cross_entropy(model(tokens), tokens + 1).backward()
            optimizer.step()
            optimizer.zero_grad()
    gemini.handle_of(got).release()
    assert all(torch.equal(v, want.state_dict()[name]) for name, v in got.state_dict().items())


def test_missing_and_unexpected_names_are_refused_by_name(tmp_path: Path) -> None:
    state = net().state_dict()
    save_file({"embed.weight": state["embed.weight"], "other": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match=r"missing keys .*body\.0\.weight.*unexpected keys .*other"):
        gemini.from_pretrained(tmp_path, Net, **tight(tmp_path))


def test_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    state = {n: v for n, v in net().state_dict().items() if n != "head.weight"}
    save_file(state | {"body.0.bias": torch.ones(5)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"body\.0\.bias.*\(5,\).*\(96,\)"):
        gemini.from_pretrained(tmp_path, Net, **tight(tmp_path))


def test_a_model_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutOfBudgetError):
        gemini.from_pretrained(save(net(), tmp_path), Net, device_bytes="8KiB", non_model_bytes=0)


@pytest.mark.parametrize("option", ["device_map", "tp_plan", "state_dict"])
def test_options_that_budgets_replace_are_refused(option: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=option):
        gemini.from_pretrained(tmp_path, Net, **{option: "auto"})


def test_options_of_transformers_are_refused_for_another_module(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="attn_implementation"):
        gemini.from_pretrained(tmp_path, Net, attn_implementation="eager")


def with_both_names(directory: Path, other: torch.Tensor, shards: int) -> Path:
    """Write a state that has ``other`` under the second name of the tied weight, in the last of the files."""
    save(net(), directory, shards)
    index = directory / "model.safetensors.index.json"
    where = json.loads(index.read_text())["weight_map"] if shards > 1 else {}
    last = directory / max(where.values(), default="model.safetensors")
    save_file({**load_file(last), "head.weight": other.contiguous()}, last)
    if where:
        index.write_text(json.dumps({"weight_map": {**where, "head.weight": last.name}}))
    return directory


@pytest.mark.parametrize("shards", [1, 3])
def test_two_values_of_one_tied_weight_are_refused_by_both_names(shards: int, tmp_path: Path) -> None:
    other = net().embed.weight.detach().clone()
    other[-1, -1] += 1e-3
    with_both_names(tmp_path, other, shards)
    with pytest.raises(CheckpointError, match=r"'embed\.weight' and 'head\.weight'.*without tying"):
        gemini.from_pretrained(tmp_path, Net, **tight(tmp_path))


@pytest.mark.parametrize("shards", [1, 3])
def test_both_names_with_equal_values_load(shards: int, tmp_path: Path) -> None:
    with_both_names(tmp_path, net().embed.weight.detach().double(), shards)
    got = gemini.from_pretrained(tmp_path, Net, **tight(tmp_path))
    assert torch.equal(got.state_dict()["head.weight"], net().embed.weight)


def test_tied_buffers_and_nan_are_compared_as_weights_are(tmp_path: Path) -> None:
    class Buffers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4))
            self.register_buffer("one", torch.zeros(3))
            self.register_buffer("other", self.one)

    state = {"weight": torch.ones(4), "one": torch.tensor([1.0, float("nan"), 2.0])}
    file = tmp_path / "model.safetensors"
    save_file({**state, "other": state["one"].clone()}, file)
    got = gemini.from_pretrained(tmp_path, Buffers, **tight(tmp_path))
    assert torch.equal(got.other.nan_to_num(), state["one"].nan_to_num())
    save_file({**state, "other": state["one"].nan_to_num()}, file)
    with pytest.raises(CheckpointError, match="'one' and 'other'"):
        gemini.from_pretrained(tmp_path, Buffers, **tight(tmp_path))


@pytest.mark.parametrize("last", ["embed.weight", "head.weight"])
def test_a_state_dict_with_two_values_of_a_tied_weight_loads_as_in_torch(last: str, tmp_path: Path) -> None:
    state = net().state_dict()
    state["head.weight"] = state["head.weight"] + 1
    state[last] = state.pop(last)  # in torch the order of modules counts, not this one
    want, got = Net(), Net()
    want.load_state_dict(state)
    gemini.manage(got, **tight(tmp_path))
    got.load_state_dict(state)
    assert torch.equal(got.state_dict()["embed.weight"], want.embed.weight)


def test_a_directory_without_files_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        gemini.from_pretrained(tmp_path, Net)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    save(net(), tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match="cannot read"):
        gemini.from_pretrained(tmp_path, Net)


def test_an_index_that_names_what_no_file_holds_is_refused(tmp_path: Path) -> None:
    save(net(), tmp_path, 2)
    index = tmp_path / "model.safetensors.index.json"
    where = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": where | {"gone": next(iter(where.values()))}}))
    with pytest.raises(CheckpointError, match="gone"):
        gemini.from_pretrained(tmp_path, Net)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 4)])
def test_every_type_and_shape_is_read_as_it_was_written(
    dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path
) -> None:
    tensor = (torch.rand(shape) * 4).to(dtype)
    save_file({"one": tensor, "before": torch.ones(3)}, tmp_path / "model.safetensors")
    with SafetensorsFiles.of_directory(tmp_path) as files:
        read = files["one"].read()
    assert read.dtype == dtype
    assert torch.equal(read.to(torch.float64), tensor.to(torch.float64))
