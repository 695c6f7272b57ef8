"""What a booster saves: readable by anybody, by every plugin, and complete or not there."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from booster_models import (
    TINY,
    Tied,
    assert_same,
    boosted,
    every_layout,
    every_plugin,
    mlp,
    names_in,
    plain,
    tied,
    train,
)
from permissions import modes_respected
from safetensors.torch import load_file, load_model, save_file
from torch import nn

from gemini import CheckpointError, ConfigError, checkpoint, handle_of
from gemini.parallel import Booster, GeminiPlugin, TorchDDPPlugin
from gemini.parallel.booster import Plugin


def index_of(directory: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((directory / "model.safetensors.index.json").read_text())
    return document


@every_plugin
@every_layout
@pytest.mark.parametrize("mixed_precision", [None, "bf16"])
def test_model_is_the_same_in_an_unboosted_and_in_a_boosted_model(
    plugin: Callable[..., Plugin], shard: bool, mixed_precision: str | None, tmp_path: Path
) -> None:
    booster, model, optimizer = boosted(plugin(), tied(), mixed_precision)
    train(booster, model, optimizer, range(2))
    model.module.note["seen"] = 7
    booster.save_model(model, tmp_path / "model", shard, True, "", TINY, use_safetensors=True)  # type: ignore[arg-type]
    want = plain(model.state_dict())
    for other in (tied(1), boosted(plugin(), tied(1), mixed_precision)[1]):
        booster.load_model(other, tmp_path / "model")
        got = plain(other.state_dict())
        dtypes = {n: min(value.dtype, got[n].dtype, key=lambda d: d.itemsize) for n, value in want.items()}
        assert_same(*({n: value.to(dtypes[n]) for n, value in state.items()} for state in (got, want)))
        inner = getattr(other, "module", other)
        assert inner.note == {"seen": 7}
        assert inner.head.weight is inner.embed.weight


@every_plugin
def test_directory_is_what_transformers_reads(plugin: Callable[..., Plugin], tmp_path: Path) -> None:
    booster, model, _ = boosted(plugin(), mlp())
    model.module.config = Config()
    booster.save_model(model, tmp_path, shard=True, size_per_shard=TINY)  # type: ignore[arg-type]
    index = index_of(tmp_path)
    state = plain(model.state_dict())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in state.values())
    names = [f"model-{number:05d}-of-00004.safetensors" for number in range(1, 5)]
    assert sorted(set(index["weight_map"].values())) == names
    assert json.loads((tmp_path / "config.json").read_text()) == {"model_type": "tiny"}
    assert sorted(names_in(tmp_path)) == ["config.json", *names, "model.safetensors.index.json"]
    assert_same({k: v for name in names for k, v in load_file(tmp_path / name).items()}, state)


class Config:
    """What a transformers model has as ``config``, as far as it matters here."""

    def to_json_string(self) -> str:
        return '{"model_type": "tiny"}\n'


def test_no_file_is_larger_than_asked(tmp_path: Path) -> None:
    model = nn.ParameterList(torch.zeros(n) for n in (60_000, 60_000, 100_000, 300_000, 10))
    booster = Booster()
    booster.save_model(model, tmp_path, shard=True, size_per_shard=1)
    sizes = {}
    for file in set(index_of(tmp_path)["weight_map"].values()):
        tensors = load_file(tmp_path / file)
        sizes[file[6:11]] = [sorted(tensors), sum(value.nbytes for value in tensors.values())]
    assert [names for names, _ in (sizes[key] for key in sorted(sizes))] == [["0", "1", "2"], ["3"], ["4"]]
    assert sizes["00001"][1] <= 2**20 < sizes["00002"][1]


def test_prefix_names_the_files(tmp_path: Path) -> None:
    Booster().save_model(mlp(1), tmp_path, shard=True, prefix="teacher")
    assert sorted(names_in(tmp_path)) == [
        "teacher.model-00001-of-00001.safetensors",
        "teacher.model.safetensors.index.json",
    ]
    model = mlp(0)
    Booster().load_model(model, tmp_path)
    assert_same(model.state_dict(), mlp(1).state_dict())


def test_tied_weights_are_stored_once_and_any_reader_ties_them(tmp_path: Path) -> None:
    Booster().save_model(tied(1), tmp_path / "model.safetensors")
    assert "head.weight" not in load_file(tmp_path / "model.safetensors")
    Booster().load_model(model := tied(0), tmp_path / "model.safetensors")
    assert torch.equal(model.head.weight, tied(1).head.weight)

    class Untied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)

    class TiedPair(Untied):
        def __init__(self) -> None:
            super().__init__()
            self.head.weight = self.embed.weight

    Booster().save_model(TiedPair(), tmp_path / "pair.safetensors")
    Booster().load_model(apart := Untied(), tmp_path / "pair.safetensors")
    assert torch.equal(apart.head.weight, apart.embed.weight)
    load_model(again := TiedPair(), str(tmp_path / "pair.safetensors"))  # by safetensors' own
    assert torch.equal(again.head.weight, apart.head.weight)


@every_plugin
def test_two_values_of_a_tied_weight_are_refused_by_both_names(plugin: Any, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    Booster().save_model(tied(1), file)
    state = load_file(file)
    booster, model, _ = boosted(plugin(), tied(2))
    save_file({**state, "head.weight": state["embed.weight"].clone()}, file)
    booster.load_model(model, file, strict=False)  # the rest of the state was in the metadata
    want = plain(model.state_dict())
    save_file({**state, "head.weight": state["embed.weight"] + 1}, file)
    with pytest.raises(CheckpointError, match=r"'embed\.weight' and 'head\.weight' with different values"):
        booster.load_model(model, file, strict=False)
    assert_same(model.state_dict(), want)


def replace_layer(net: nn.Sequential) -> None:
    net[2] = nn.Linear(16, 4)


def exchange_layers(net: nn.Sequential) -> None:
    net[0], net[2] = net[2], net[0]


def take_layer_out(net: nn.Sequential) -> None:
    net[2] = nn.Identity()


def tie_layers(net: nn.Sequential) -> None:
    net[0].weight = net[2].weight


@every_layout
@pytest.mark.parametrize("change", [replace_layer, exchange_layers, take_layer_out, tie_layers])
def test_a_file_holds_what_a_managed_model_has_by_now(
    change: Callable[[nn.Sequential], None], shard: bool, tmp_path: Path
) -> None:
    booster, model, optimizer = boosted(GeminiPlugin(), mlp())
    booster.backward(model(torch.ones(2, 16)).square().sum(), optimizer)
    optimizer.step()
    booster.save_optimizer(optimizer, tmp_path / "optimizer")
    change(model.module)
    want = {name: value.clone() for name, value in model.state_dict().items()}
    booster.save_model(model, tmp_path / "model", shard=shard, size_per_shard=TINY)  # type: ignore[arg-type]
    other = mlp(1)
    change(other)
    for loaded in (model, other):
        with torch.no_grad():
            for param in loaded.parameters():
                param.zero_()
        booster.load_model(loaded, tmp_path / "model")
        assert_same(plain(loaded.state_dict()), want)
    if change is not take_layer_out:  # which leaves names and states as they are
        for act in (booster.save_optimizer, booster.load_optimizer):
            with pytest.raises(CheckpointError, match=r"'\d.weight'.* wrapped, .*adopt\(\)"):
                act(optimizer, tmp_path / "optimizer")
    handle_of(model).adopt()
    assert_same(model.state_dict(), plain(model.state_dict()))
    booster.save_optimizer(optimizer, tmp_path / "after")
    booster.load_optimizer(optimizer, tmp_path / "after")


@pytest.mark.parametrize("plugin", [GeminiPlugin, TorchDDPPlugin])
def test_a_layer_that_came_after_boosting_is_in_the_optimizers_file(plugin: Any, tmp_path: Path) -> None:
    booster, model, optimizer = boosted(plugin(), mlp())
    net = getattr(model, "module", model)
    old = list(net[2].parameters())
    net[2] = nn.Linear(16, 4)
    optimizer.add_param_group({"params": list(net[2].parameters())})
    if plugin is not GeminiPlugin:  # which has let go of the old ones
        with pytest.raises(ConfigError, match=r"two parameters for the name '2\.weight'"):
            booster.save_optimizer(optimizer, tmp_path / "optimizer")
        kept = [param for param in optimizer.param_groups[0]["params"] if all(param is not o for o in old)]
        optimizer.param_groups[0]["params"][:] = kept
    booster.backward(model(torch.ones(2, 16)).square().sum(), optimizer)
    optimizer.step()
    booster.save_optimizer(optimizer, tmp_path / "optimizer")
    booster.load_optimizer(optimizer, tmp_path / "optimizer")


def test_managed_model_is_saved_and_loaded_within_its_budget(tmp_path: Path) -> None:
    plugin = GeminiPlugin(
        placement_policy="const",
        device_bytes="192KiB",
        non_model_bytes=0,
        disk_dir=str(tmp_path),
        min_chunk_size_mb=0.01,
    )
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(16)))
    with boosted(plugin, model)[1] as managed:
        booster = Booster(plugin=plugin)
        booster.save_model(managed, tmp_path / "model", shard=True, size_per_shard=TINY)  # type: ignore[arg-type]
        want = plain(managed.state_dict())
        booster.load_model(managed, tmp_path / "model")
        assert_same(managed.state_dict(), want)
        device = managed.stats()["device"]
        assert device["peak_bytes"] <= device["budget_bytes"] < managed.stats()["model_data_bytes"]


@pytest.mark.parametrize("writer", ["torch", "torch-old", "bin-directory", "gemini"])
@every_plugin
def test_files_of_others_are_recognized(plugin: Callable[..., Plugin], writer: str, tmp_path: Path) -> None:
    want = mlp(1)
    path = tmp_path / "saved"
    if writer.startswith("torch"):
        torch.save(want.state_dict(), path, _use_new_zipfile_serialization=writer == "torch")
    elif writer == "bin-directory":
        path.mkdir()
        state = list(want.state_dict().items())
        for number, part in enumerate((state[:1], state[1:])):
            torch.save(dict(part), path / f"pytorch_model-{number}.bin")
        weight_map = {name: f"pytorch_model-{int(i > 0)}.bin" for i, (name, _) in enumerate(state)}
        (path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    else:
        _, managed, optimizer = boosted(GeminiPlugin(), mlp(1))
        checkpoint.save(path, managed, optimizer)
    booster, model, _ = boosted(plugin(), mlp(0))
    booster.load_model(model, path)
    assert_same(model.state_dict(), want.state_dict())


class Trap:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("save", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value, 2))])
def test_code_in_a_file_is_never_run(save: Callable[..., Any], tmp_path: Path) -> None:
    save({"0.weight": Trap(tmp_path / "sprung")}, tmp_path / "evil.pt")
    with pytest.raises(CheckpointError, match=r"evil\.pt"):
        Booster().load_model(mlp(), tmp_path / "evil.pt")
    assert not (tmp_path / "sprung").exists()


def _lose_shard(directory: Path) -> None:
    (directory / "model-00002-of-00004.safetensors").unlink()


def _lose_index(directory: Path) -> None:
    (directory / "model.safetensors.index.json").unlink()


def _cut_shard(directory: Path) -> None:
    os.truncate(directory / "model-00003-of-00004.safetensors", 90)


def _swap_shard(directory: Path) -> None:
    shards = [directory / f"model-{number:05d}-of-00004.safetensors" for number in (1, 2)]
    shards[0].replace(shards[1])


def _spoil_index(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text('{"weight_map": ["model"]}')


def _leave_directory(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"0.weight": "../secret"}}')


def _grow_model(directory: Path) -> None:
    Booster().save_model(mlp(1, width=8), directory, shard=True)


def _another_index(directory: Path) -> None:
    Booster().save_model(mlp(1), directory, shard=True, prefix="other")


@pytest.mark.parametrize(
    "damage",
    [
        _lose_shard,
        _lose_index,
        _cut_shard,
        _swap_shard,
        _spoil_index,
        _leave_directory,
        _grow_model,
        _another_index,
    ],
)
@every_plugin
def test_damaged_checkpoint_is_refused_and_changes_nothing(
    plugin: Callable[..., Plugin], damage: Callable[[Path], None], tmp_path: Path
) -> None:
    Booster().save_model(mlp(1), tmp_path, shard=True, size_per_shard=TINY)  # type: ignore[arg-type]
    damage(tmp_path)
    booster, model, _ = boosted(plugin(), mlp(0))
    with pytest.raises(CheckpointError):
        booster.load_model(model, tmp_path)
    assert_same(model.state_dict(), mlp(0).state_dict())


@pytest.mark.parametrize("shut", [".", "model", "model/model.safetensors.index.json", "model/{}", "state"])
def test_what_may_not_be_read_is_said(shut: str, tmp_path: Path) -> None:
    Booster().save_model(mlp(1), tmp_path / "model", shard=True, size_per_shard=TINY)  # type: ignore[arg-type]
    Booster().save_model(mlp(1), tmp_path / "state")
    place = tmp_path / shut.format(next(iter(index_of(tmp_path / "model")["weight_map"].values())))
    mode = place.stat().st_mode
    place.chmod(0)
    model = mlp(0)
    with modes_respected():
        for checkpoint in {"model", "state"} if shut == "." else {shut.split("/")[0]}:
            with pytest.raises(CheckpointError, match=r"cannot read .*Permission denied; .*permissions"):
                Booster().load_model(model, tmp_path / checkpoint)
    place.chmod(mode)
    assert_same(model.state_dict(), mlp(0).state_dict())


def test_names_that_do_not_match_are_refused_unless_told_otherwise(tmp_path: Path) -> None:
    Booster().save_model(mlp(1)[:1], tmp_path / "file")
    model = mlp(0)
    with pytest.raises(CheckpointError, match="strict=False"):
        Booster().load_model(model, tmp_path / "file")
    assert_same(model.state_dict(), mlp(0).state_dict())
    Booster().load_model(model, tmp_path / "file", strict=False)
    assert torch.equal(model[0].weight, mlp(1)[0].weight)
    assert torch.equal(model[2].weight, mlp(0)[2].weight)


@pytest.mark.parametrize(
    "arguments",
    [
        {"gather_dtensor": False},
        {"prefix": "a"},
        {"shard": True, "prefix": "../a"},
        {"shard": True, "size_per_shard": 0},
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        Booster().save_model(mlp(), tmp_path / "model", **arguments)
    assert list(tmp_path.iterdir()) == []


@every_layout
def test_without_safetensors_the_same_files_are_written_and_one_warning_says_so(
    shard: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    booster, model = Booster(), mlp(1)
    booster.save_model(model, tmp_path / "default", shard)
    assert caplog.messages == []
    for name in ("asked", "again"):
        booster.save_model(model, tmp_path / name, shard, use_safetensors=False)
    assert len(caplog.messages) == 1
    assert f"use_safetensors=False): {tmp_path / 'asked'} is written as safetensors" in caplog.messages[0]
    files = {
        name: [path.read_bytes() for path in sorted(place.iterdir() if shard else [place])]
        for name in ("default", "asked", "again")
        for place in [tmp_path / name]
    }
    assert files["default"] == files["asked"] == files["again"]
    other = mlp(0)
    Booster().load_model(other, tmp_path / "asked")
    assert_same(other.state_dict(), model.state_dict())


def test_path_of_the_other_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="shard=True"):
        Booster().save_model(mlp(), tmp_path)
    with pytest.raises(CheckpointError, match="another path"):
        Booster().save_model(mlp(), tmp_path / "file", shard=True)
    with pytest.raises(CheckpointError, match="check the path"):
        Booster().load_model(mlp(), tmp_path / "nothing")


def test_type_that_files_cannot_hold_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    model = mlp()
    model.register_buffer("phase", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(CheckpointError, match="phase"):
        Booster().save_model(model, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_checkpoints_are_for_their_owner_only(tmp_path: Path) -> None:
    Booster().save_model(Tied(), tmp_path / "model")
    assert (tmp_path / "model").stat().st_mode & 0o077 == 0
