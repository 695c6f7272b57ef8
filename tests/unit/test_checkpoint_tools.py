"""Other formats of a checkpoint, and the command that makes, shows and verifies them."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_models import KIB, Model, Run, assert_equal, start
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from gemini.checkpoint.convert import convert
from gemini.cli.main import main
from gemini.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Run, Path]:
    """A bf16 run after two steps under a tight budget, and its checkpoint of several files."""
    run = start(device_bytes=160 * KIB, disk_dir=str(tmp_path), mixed_precision="bf16").train(2)
    return run, run.save(tmp_path / "run", shard_bytes="32KiB", extra={"note": "mine"})


def adamw(model: Model) -> torch.optim.AdamW:
    """Return torch's optimizer with the groups of :func:`checkpoint_models.start`."""
    trained = [param for param in model.parameters() if param.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [param for param in trained if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for param in trained if param.dim() <= 1], "lr": 3e-3},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def check_plain(run: Run, model: Model, optimizer: torch.optim.Optimizer) -> None:
    """Compare what plain torch has loaded with the run's masters and moments, bit for bit."""
    want = {name: value.float() for name, value in run.model.state_dict().items()}
    assert_equal({name: value.float() for name, value in model.state_dict().items()}, want)
    got, moments = optimizer.state_dict()["state"], run.optimizer.state_dict()["state"]
    for index, state in moments.items():
        for name, value in state.items():
            assert torch.equal(got[index][name], value), (index, name)
    assert len(moments) > 5


def test_torch_load_resumes_with_torchs_own_optimizer(saved: tuple[Run, Path], tmp_path: Path) -> None:
    run, path = saved
    convert(path, tmp_path / "state.pt", "torch")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    model = Model()
    optimizer = adamw(model)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    check_plain(run, model, optimizer)
    assert (state["step"], state["extra"]) == (2, {"note": "mine"})
    assert state["scheduler"] == run.scheduler.state_dict()
    assert state["model"]["head.weight"].data_ptr() == state["model"]["tokens.weight"].data_ptr()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_resumes_with_torchs_own_optimizer(saved: tuple[Run, Path], tmp_path: Path) -> None:
    run, path = saved
    convert(path, tmp_path / "dcp", "dcp")
    model = Model()
    optimizer = adamw(model)
    states = get_optimizer_state_dict(model, optimizer)["state"]
    del states["unused"]  # it never had a gradient, so nothing of it was saved
    weights = get_model_state_dict(model)
    for tensor in [*weights.values(), *(value for state in states.values() for value in state.values())]:
        tensor.zero_()
    document = {"model": weights, "optimizer": {"state": states}, "step": 0}
    dcp_load(document, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_model_state_dict(model, document["model"])
    params = dict(model.named_parameters())
    optimizer.state.clear()
    optimizer.state.update((params[name], state) for name, state in document["optimizer"]["state"].items())
    check_plain(run, model, optimizer)
    assert document["step"] == 2


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_reads_a_checkpoint_as_it_is(saved: tuple[Run, Path]) -> None:
    run, path = saved
    want = {name: value for name, value in run.model.state_dict().items() if name != "head.weight"}  # tied
    found = {name: torch.zeros_like(value) for name, value in want.items()}
    dcp_load(found, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    assert_equal(found, want)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_training_goes_on_from_what_dcp_saved(saved: tuple[Run, Path], tmp_path: Path) -> None:
    run, _ = saved
    document = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()["state"]}
    dcp_save(document, checkpoint_id=tmp_path / "dcp", no_dist=True)
    other = start(mixed_precision="bf16", seed=5).train(1)
    found = {"model": other.model.state_dict(), "optimizer": other.optimizer.state_dict()["state"]}
    dcp_load(found, checkpoint_id=tmp_path / "dcp", no_dist=True)
    other.model.load_state_dict(found["model"])
    other.optimizer.load_state_dict({**run.optimizer.state_dict(), "state": found["optimizer"]})
    other.scheduler.load_state_dict(run.scheduler.state_dict())
    for one in (run, other):
        torch.manual_seed(9)
        one.train(1)
    assert_equal(other.model.state_dict(), run.model.state_dict())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_hf_is_what_from_pretrained_reads(saved: tuple[Run, Path], tmp_path: Path, dtype: str) -> None:
    run, path = saved
    convert(path, tmp_path / "hf", "hf", dtype=dtype)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert set(index) == {"metadata", "weight_map"}
    want = run.model.state_dict()
    found = {}
    for file in set(index["weight_map"].values()):
        tensors = load_file(tmp_path / "hf" / file)
        assert {index["weight_map"][name] for name in tensors} == {file}
        found.update(tensors)
    assert set(found) == set(want) - {"head.weight"}  # tied: stored once
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in found.values())
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    for name, value in found.items():
        assert torch.equal(value, want[name].to(kind if want[name].is_floating_point() else value.dtype)), (
            name
        )


@pytest.mark.parametrize("form", ["hf", "torch", "dcp"])
def test_a_damaged_checkpoint_is_not_converted(saved: tuple[Run, Path], tmp_path: Path, form: str) -> None:
    _, path = saved
    file = sorted(path.glob("model-00001*"))[0]
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    with pytest.raises(CheckpointError, match=file.name):
        convert(path, tmp_path / "out", form)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize("umask", [0o002, 0o027])
@pytest.mark.parametrize("form", ["hf", "torch", "dcp"])
def test_the_umask_says_who_may_read_what_is_converted(
    saved: tuple[Run, Path], tmp_path: Path, form: str, umask: int
) -> None:
    before = os.umask(umask)
    try:
        convert(saved[1], tmp_path / "out", form)
    finally:
        os.umask(before)
    made = [tmp_path / "out", *(tmp_path / "out").rglob("*")]
    modes = {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in made}
    assert modes <= {(True, 0o777 & ~umask), (False, 0o666 & ~umask)}


def test_what_is_there_is_not_overwritten(saved: tuple[Run, Path], tmp_path: Path) -> None:
    _, path = saved
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ConfigError, match="exists"):
        convert(path, tmp_path / "out", "torch")
    assert (tmp_path / "out").read_text() == "mine"


def test_inspect_says_what_is_there(saved: tuple[Run, Path], capsys: pytest.CaptureFixture[str]) -> None:
    run, path = saved
    newest = run.train(1).save(path.parent)
    assert main(["ckpt", "inspect", str(path.parent), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [entry["path"] for entry in found] == [str(newest), str(path)]
    assert [entry["step"] for entry in found] == [3, 2]
    model = Model()
    assert found[0]["num_parameters"] == sum(param.numel() for param in model.parameters())
    assert found[0]["aliases"] == {"head.weight": "tokens.weight"}
    assert found[1]["bytes"] == sum(
        file.stat().st_size for file in path.iterdir() if file.name not in ("manifest.json", "seal.json")
    )
    assert main(["ckpt", "inspect", str(path.parent)]) == 0
    shown = capsys.readouterr().out
    assert newest.name in shown
    assert "head.weight is tokens.weight" in shown


def test_verify_finds_the_damaged_one(saved: tuple[Run, Path], capsys: pytest.CaptureFixture[str]) -> None:
    run, path = saved
    newest = run.train(1).save(path.parent)
    assert main(["ckpt", "verify", str(path.parent)]) == 0
    file = sorted(newest.glob("optimizer-rank*"))[0]
    content = bytearray(file.read_bytes())
    content[-5] ^= 4
    file.write_bytes(content)
    capsys.readouterr()
    assert main(["ckpt", "verify", str(path.parent), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [entry["damage"] is None for entry in found] == [False, True]
    assert file.name in found[0]["damage"]
    assert main(["ckpt", "verify", str(path)]) == 0
    assert main(["ckpt", "inspect", str(path.parent)]) == 0


def test_the_command_finds_the_checkpoints_of_a_run(
    saved: tuple[Run, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, path = saved
    (tmp_path / "training").mkdir()
    path.parent.rename(tmp_path / "training" / "checkpoint")
    target = tmp_path / "deep" / "state.pt"
    assert main(["ckpt", "convert", str(tmp_path / "training"), str(target), "--to", "torch", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"] == target.stat().st_size


@pytest.mark.parametrize("command", [["inspect"], ["verify"], ["convert", "out", "--to", "hf"]])
def test_no_checkpoint_is_an_error(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ckpt", command[0], str(tmp_path), *command[1:]]) == 2
    assert "no complete checkpoint" in capsys.readouterr().err
