"""What is on disk: files that anyone can read and that only their owner may read."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from checkpoint_models import KIB, Model, Run, assert_equal, assert_same, start
from safetensors.torch import load_file, load_model
from torch import nn

import gemini
from gemini import checkpoint
from gemini.checkpoint import new_checkpoint
from gemini.checkpoint.sealed_file import Staging
from gemini.checkpoint.tensor_file import write_tensors
from gemini.errors import CheckpointError, ConfigError, IoError

MIB = 2**20


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Run, Path]:
    """A run after two steps in several chunks, and its checkpoint."""
    run = start(device_bytes=128 * KIB, disk_dir=str(tmp_path)).train(2)
    return run, run.save(tmp_path / "run", shard_bytes="32KiB")


def read_all(path: Path) -> dict[str, torch.Tensor]:
    index = json.loads((path / "model.safetensors.index.json").read_text())
    return {name: load_file(path / file)[name] for name, file in index["weight_map"].items()}


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_plain_torch_reads_the_weights(tmp_path: Path, precision: str | None) -> None:
    run = start(device_bytes=128 * KIB, disk_dir=str(tmp_path), mixed_precision=precision).train(2)
    weights = read_all(run.save(tmp_path / "run"))
    want = run.model.state_dict()  # fp32, the masters where there are any
    plain = Model()
    result = plain.load_state_dict(weights, strict=False)
    assert result.missing_keys == ["head.weight"]  # tied: stored once
    assert result.unexpected_keys == []
    own = {key: value for key, value in want.items() if key != "head.weight"}
    assert_equal({key: weights[key] for key in own}, own)
    assert plain.head.weight is plain.tokens.weight
    params = dict(plain.named_parameters())
    assert all(torch.equal(params[name], own[name]) for name in params)


def test_the_index_is_hugging_faces(saved: tuple[Run, Path]) -> None:
    _, path = saved
    index = json.loads((path / "model.safetensors.index.json").read_text())
    weights = read_all(path)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in weights.values())
    stored = {name for file in path.glob("model-*.safetensors") for name in load_file(file)}
    assert stored == set(index["weight_map"])
    assert len(set(index["weight_map"].values())) > 2
    names = sorted(file.name for file in path.glob("model-0*"))
    assert names == [f"model-{n + 1:05d}-of-{len(names):05d}.safetensors" for n in range(len(names))]


def test_safetensors_ties_what_was_tied(tmp_path: Path) -> None:
    run = start().train(1)
    path = run.save(tmp_path / "run")
    holder = next(file for file in path.glob("model-0*") if "tokens.weight" in load_file(file))
    plain = nn.ModuleDict({"tokens": nn.Embedding(17, 32), "head": nn.Linear(32, 17, bias=False)})
    plain["head"].weight = plain["tokens"].weight
    missing, _ = load_model(plain, holder, strict=False)
    assert not missing
    assert torch.equal(plain["head"].weight, run.model.state_dict()["head.weight"])


def test_only_the_owner_may_read(saved: tuple[Run, Path]) -> None:
    _, path = saved
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o600}


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_as_many_checkpoints_as_asked_are_kept(tmp_path: Path, keep: int) -> None:
    run = start()
    paths = [run.train(steps).save(tmp_path / "run", keep=keep) for steps in (1, 1, 0, 0)]
    assert len(set(paths[-2:])) == 2  # of one step: the older one stays until the newer is complete
    assert {file.name for file in (tmp_path / "run").iterdir()} == {path.name for path in paths[-keep:]}
    assert checkpoint.latest(tmp_path / "run") == paths[-1]


def test_keeping_none_is_refused(tmp_path: Path) -> None:
    run = start()
    with pytest.raises(ConfigError, match="keep is 0"):
        run.save(tmp_path / "run", keep=0)
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_copied_elsewhere_loads(saved: tuple[Run, Path]) -> None:
    run, path = saved
    moved = path.rename(path.parent.parent / "best")
    other = start(seed=7)
    other.load(moved)
    assert_same(other, run)


def test_a_missing_checkpoint_is_said(tmp_path: Path) -> None:
    run = start()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        run.load(tmp_path / "nothing")
    assert not checkpoint.is_complete(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_leftovers_of_killed_saves_are_removed_and_nothing_else(saved: tuple[Run, Path]) -> None:
    run, path = saved
    (path.parent / "step-00000009.partial").mkdir()
    (path.parent / "step-00000009.partial" / "model-00000.safetensors").write_bytes(b"x")
    (path.parent / "step-00000008").mkdir()  # nothing of ours is in it
    (path.parent / "notes.txt").write_text("mine")
    new = run.train(1).save(path.parent)
    left = {file.name for file in path.parent.iterdir()}
    assert left == {path.name, new.name, "step-00000008", "notes.txt"}
    run.load(path.parent)


def test_no_bytes_of_an_older_larger_file_stay(saved: tuple[Run, Path]) -> None:
    """A smaller file in the place of a larger one must end where its own data ends."""
    run, path = saved
    killed = path.parent / "step-00000003.partial"
    killed.mkdir()
    for file in path.iterdir():
        (killed / file.name).write_bytes(b"stale" * 100_000)
    new = run.train(1).save(path.parent, shard_bytes="32KiB")
    assert {file.name for file in new.iterdir()} == {file.name for file in path.iterdir()}
    for file in new.glob("*.safetensors"):
        header = int.from_bytes(file.read_bytes()[:8], "little")
        assert file.stat().st_size == 8 + header + sum(value.nbytes for value in load_file(file).values())
    other = start(seed=7)
    other.load(path.parent)
    assert_same(other, run)


def test_what_only_looks_like_a_checkpoint_is_the_users(saved: tuple[Run, Path]) -> None:
    run, path = saved
    root, elsewhere = path.parent, path.parent.parent / "elsewhere"
    elsewhere.mkdir()
    mine = ["step-notes.txt", "step-analysis", "step-1.partial", "step-00000004", "step-00000003.partial"]
    mine += ["step-00000002-link", "step-00000005-best", "old-step-00000001"]
    for name in mine[:1] + mine[3:5]:  # the last two are names of ours, but files
        (root / name).write_text("mine")
    for name in mine[1:3] + mine[6:]:
        (root / name).mkdir()
    (root / "step-00000001").symlink_to(elsewhere)
    (root / "step-00000002-link").symlink_to(elsewhere)
    for _ in range(3):
        new = run.train(1).save(root, keep=1)
        run.load(root)
    assert {file.name for file in root.iterdir()} == {new.name, "step-00000001", *mine}
    assert elsewhere.is_dir()


def test_a_second_saver_is_refused(saved: tuple[Run, Path]) -> None:
    run, path = saved
    with new_checkpoint(path.parent, 9) as other:
        with pytest.raises(CheckpointError, match="another save is running"):
            run.save(path.parent)
        other.manifest = {"parameters": {}, "buffers": {}, "optimizer_steps": {}}
    assert run.save(path.parent).exists()


def test_saving_where_no_directory_can_be(tmp_path: Path) -> None:
    run = start()
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/gemini-checkpoint")):
        with pytest.raises(IoError) as caught:
            run.save(place)
        assert caught.value.errno
        assert str(place) in str(caught.value)
    run.train(1)


def test_every_type_and_shape_comes_back(tmp_path: Path) -> None:
    dtypes = [
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.bfloat16,
        torch.float16,
        torch.int32,
        torch.int64,
        torch.float64,
    ]
    tensors = {
        f"{dtype}-{shape}": torch.ones(shape).to(dtype) for dtype in dtypes for shape in [(), (0, 3), (3, 5)]
    }
    with closing(Staging()) as staging:
        write_tensors(tmp_path / "file", tensors, staging)
    assert_equal(load_file(tmp_path / "file"), tensors)


def test_a_type_without_a_name_is_refused(tmp_path: Path) -> None:
    run = start()
    run.save(tmp_path / "run")
    run.model.module.register_buffer("angle", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(CheckpointError, match="angle"):
        run.save(tmp_path / "run")
    assert len(list((tmp_path / "run").iterdir())) == 1


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(16))  # 64 MiB

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("operation", ["save", "load"])
def test_a_checkpoint_needs_little_memory(tmp_path: Path, operation: str) -> None:
    """192 MiB of weights and moments pass through a process that holds 40 MiB of them at a time."""
    with gemini.init_on("meta"):
        module = Wide()
    options: dict[str, Any] = {"non_model_bytes": 0, "min_chunk_size_mb": 4, "search_range_mb": 0}
    model = gemini.GeminiDDP(module, device_bytes=40 * MIB, disk_dir=str(tmp_path), **options)
    optimizer = gemini.GeminiAdamOptimizer(model)
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path / "run", model, optimizer)  # maps everything that the second one needs, too
    peak = PeakMemory()
    if operation == "save":
        checkpoint.save(tmp_path / "run", model, optimizer)
    else:
        checkpoint.load(tmp_path / "run", model, optimizer)
    assert peak.growth_bytes() < 24 * MIB
    model.close()


class PeakMemory:
    """How far the resident memory of the process has grown, at its peak, since this was made."""

    def __init__(self) -> None:
        Path(f"/proc/{os.getpid()}/clear_refs").write_text("5")  # resets VmHWM
        self._before = psutil.Process().memory_info().rss

    def growth_bytes(self) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        peak = next(int(line.split()[1]) * KIB for line in lines if line.startswith("VmHWM"))
        return peak - self._before


def test_a_parameter_without_elements_is_saved_and_loaded(tmp_path: Path) -> None:
    def build() -> tuple[gemini.GeminiDDP, gemini.GeminiOptimizer]:
        module = torch.nn.Linear(4, 4)
        module.empty = torch.nn.Parameter(torch.zeros(0, 4))
        model = gemini.GeminiDDP(module)
        return model, gemini.GeminiAdamOptimizer(model)

    model, optimizer = build()
    with model:
        (model(torch.ones(1, 4)).sum() + model.module.empty.sum()).backward()
        optimizer.step()
        checkpoint.save(tmp_path, model, optimizer)
        want = model.state_dict()
    model, optimizer = build()
    with model:
        checkpoint.load(tmp_path, model, optimizer)
        assert_equal(model.state_dict(), want)
