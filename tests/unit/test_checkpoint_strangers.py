"""Checkpoints from strangers: checksums are right, and names, links and numbers lead elsewhere."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import resealed
import torch
from checkpoint_models import Run, assert_same, start

from gemini.checkpoint.contents import MODEL_INDEX, OPTIMIZER_INDEX
from gemini.checkpoint.convert import convert
from gemini.checkpoint.inspect import describe, verdict
from gemini.checkpoint.sealed_file import DamagedError
from gemini.cli.main import main

pytestmark = pytest.mark.usefixtures("one_thread")

WEIGHTS = "model-00001-of-00001.safetensors"
STATES = "optimizer-rank-00000-of-00001-00001.safetensors"


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Run, Path]:
    """A run after three steps, with checkpoints of the second and the third, which is returned."""
    run = start(width=4).train(2)
    run.save(tmp_path / "run")
    return run, run.train(1).save(tmp_path / "run")


def refused(run: Run, path: Path) -> None:
    """Every reader refuses the checkpoint, writes nothing, and a load takes the one before."""
    there = set(path.parents[1].rglob("*"))
    for look in (describe, verdict):
        assert look(path)["damage"]
    for form in ("hf", "torch", "dcp"):
        with pytest.raises(DamagedError):
            convert(path, path.parents[1] / "home" / "models" / "out", form)
    assert set(path.parents[1].rglob("*")) == there
    for command in ("inspect", "verify"):
        assert main(["ckpt", command, str(path)]) == 1
    other = start(seed=7, width=4)
    other.load(path.parent)
    assert other.model.manager.step == 2
    run.load(path.parent)
    assert_same(other, run)


@pytest.mark.parametrize(
    "name", ["../../planted.py", "{outside}/planted.py", "sub/planted.py", "planted.py", "."]
)
@pytest.mark.parametrize("kind", [WEIGHTS, STATES])
def test_no_name_leads_out_of_a_checkpoint(
    saved: tuple[Run, Path], tmp_path: Path, name: str, kind: str
) -> None:
    run, path = saved
    (path / "sub").mkdir()
    name = name.format(outside=tmp_path)
    shutil.move(path / kind, path / name if name != "." else tmp_path / "moved")
    index = MODEL_INDEX if kind == WEIGHTS else OPTIMIZER_INDEX
    (path / index).write_text((path / index).read_text().replace(f'"{kind}"', f'"{name}"'))
    resealed.edit(path, "manifest.json", lambda manifest: _rename(manifest["files"], kind, name))
    refused(run, path)


def _rename(files: dict[str, Any], old: str, new: str) -> None:
    files[new] = files.pop(old)


@pytest.mark.parametrize("name", [WEIGHTS, STATES, MODEL_INDEX, "manifest.json", "seal.json"])
def test_links_are_no_files_of_a_checkpoint(saved: tuple[Run, Path], tmp_path: Path, name: str) -> None:
    run, path = saved
    shutil.move(path / name, tmp_path / "elsewhere")
    (path / name).symlink_to(tmp_path / "elsewhere")
    refused(run, path)


def _lose_range(index: Any) -> None:
    del index["states"]["exp_avg"]["up.weight"]


def _overlap(index: Any) -> None:
    (first,) = index["states"]["exp_avg"]["up.weight"]
    index["states"]["exp_avg"]["up.weight"] = [first, first]


def _gap(index: Any) -> None:
    index["states"]["exp_avg"]["up.weight"][0][0] = 1


def _lose_name(index: Any) -> None:
    del index["weight_map"]["norm.running_mean"]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (OPTIMIZER_INDEX, _lose_range),
        (OPTIMIZER_INDEX, _overlap),
        (OPTIMIZER_INDEX, _gap),
        (OPTIMIZER_INDEX, lambda index: index.pop("states")),
        (MODEL_INDEX, _lose_name),
        (MODEL_INDEX, lambda index: index["weight_map"].pop("up.bias")),
        (MODEL_INDEX, lambda index: index["weight_map"].update(other=WEIGHTS)),
        (WEIGHTS, lambda header: header["up.bias"].update(dtype="I32")),
        (WEIGHTS, lambda header: header["up.bias"].update(data_offsets=header["norm.bias"]["data_offsets"])),
        (WEIGHTS, lambda header: header.update(spare={"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})),
        (STATES, lambda header: header.pop("up.bias.exp_avg[0:24]")),
        ("manifest.json", lambda manifest: manifest["optimizer_steps"].pop("up.bias")),
        ("manifest.json", lambda manifest: manifest["buffers"].pop("norm.running_mean")),
        ("manifest.json", lambda manifest: manifest["parameters"]["mix"].update(stride=[4, 4])),
        ("manifest.json", lambda manifest: manifest.update(ranks=2**62)),
        ("manifest.json", lambda manifest: manifest.update(step="2")),
        ("manifest.json", lambda manifest: manifest["objects"].pop("param_groups")),
    ],
)
def test_what_contradicts_itself_is_damaged(
    saved: tuple[Run, Path], name: str, change: Callable[[Any], None]
) -> None:
    _, path = saved
    resealed.edit(path, name, change)
    other = start(seed=7, width=4)
    before = {key: value.clone() for key, value in other.model.state_dict().items()}
    with pytest.raises(DamagedError):
        other.load(path)
    for key, value in other.model.state_dict().items():
        assert torch.equal(value, before[key])
    other.load(path.parent)
    assert other.model.manager.step == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.update(rng=None),
        lambda document: document["rng"].pop("python"),
        lambda document: document["rng"]["numpy"]["state"].update(pos=10**6),
        lambda document: document["rng"].update(torch="00"),
    ],
)
def test_verify_finds_states_of_generators_that_loading_refuses(
    saved: tuple[Run, Path], change: Callable[[Any], None]
) -> None:
    _, path = saved
    assert verdict(path)["damage"] is None
    resealed.edit(path, "rank-00000-of-00001.json", change)
    with pytest.raises(DamagedError):
        start(seed=7, width=4).load(path)
    assert "rank-00000-of-00001.json" in verdict(path)["damage"]
