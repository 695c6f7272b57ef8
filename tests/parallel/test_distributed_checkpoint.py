"""torch.distributed.checkpoint takes managed models and their optimizers, both ways, as it takes others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from processes import own_part, run_on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

import gemini

TIGHT: dict[str, Any] = {
    "device_bytes": "200KiB",
    "non_model_bytes": 0,
    "min_chunk_size_mb": 0.01,
    "search_range_mb": 0.01,
}


def made(kind: str, directory: Path | str, **options: Any) -> tuple[Any, Any]:
    """Return a new model and its AdamW: ``plain``, ``wrapped`` or managed ``in place``."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)
    )
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if kind == "plain":
        return model, adam
    options = {**TIGHT, "disk_dir": str(directory), **options}
    if kind == "wrapped":
        model = gemini.GeminiDDP(model, **options)
    else:
        gemini.manage(model, **options)
    return model, gemini.GeminiOptimizer(adam, model)


def train(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        inputs, labels = torch.arange(8 * 32.0).reshape(8, 32).add(step).sin(), torch.arange(8)
        nn.functional.cross_entropy(model(own_part(inputs)), own_part(labels)).backward()
        optimizer.step()
        optimizer.zero_grad()


def save(model: Any, optimizer: Any, directory: Any, options: Any, **how: Any) -> None:
    weights, states = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=directory, **how)


def load(model: Any, optimizer: Any, directory: Any, options: Any, **how: Any) -> None:
    weights, states = get_state_dict(model, optimizer, options=options)
    found = {"model": weights, "optimizer": states}
    dcp.load(found, checkpoint_id=directory, **how)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=found["model"],
        optim_state_dict=found["optimizer"],
        options=options,
    )


def whole(model: Any) -> dict[str, torch.Tensor]:
    kept = model if isinstance(model, gemini.GeminiDDP) else vars(model).get("_gemini", model)
    return {name: value.clone() for name, value in kept.state_dict().items()}


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    assert all(torch.equal(value, want[name]) for name, value in got.items())


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize(
    ("first", "second"), [("plain", "wrapped"), ("wrapped", "in place"), ("in place", "plain")]
)
def test_one_saves_and_another_goes_on(first: str, second: str, flat: bool, tmp_path: Path) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    want, adam = made("plain", tmp_path)
    train(want, adam, range(4))
    one, other = made(first, tmp_path), made(second, tmp_path)
    train(*one, range(2))
    save(*one, tmp_path / "saved", options, no_dist=True)
    train(*other, range(7, 8))
    load(*other, tmp_path / "saved", options, no_dist=True)
    train(*other, range(2, 4))
    assert_equal(whole(other[0]), whole(want))


@pytest.mark.parametrize("kind", ["wrapped", "in place"])
def test_masters_are_saved(kind: str, tmp_path: Path) -> None:
    options = StateDictOptions()
    want, one, other = (made(kind, tmp_path, mixed_precision="bf16") for _ in range(3))
    train(*want, range(4))
    train(*one, range(2))
    save(*one, tmp_path / "saved", options, no_dist=True)
    load(*other, tmp_path / "saved", options, no_dist=True)
    train(*other, range(2, 4))
    assert_equal(whole(other[0]), whole(want[0]))


def _on_ranks(kind: str, directory: str) -> list[dict[str, torch.Tensor]]:
    options = StateDictOptions()
    want, one, other = (made(kind, directory) for _ in range(3))
    train(*want, range(4))
    train(*one, range(2))
    save(*one, f"{directory}/saved", options)
    load(*other, f"{directory}/saved", options)
    train(*other, range(2, 4))
    return [whole(other[0]), whole(want[0])]


@pytest.mark.parametrize("kind", ["wrapped", "in place"])
def test_ranks_save_together_and_go_on(kind: str, tmp_path: Path) -> None:
    for got, want in run_on_ranks(_on_ranks, 2, kind, str(tmp_path)):
        assert_equal(got, want)


def _own_state_on_ranks(directory: str) -> tuple[str, bool, bool]:
    model, optimizer = made("in place", directory)
    train(model, optimizer, range(2))
    weights = whole(model)
    try:
        dcp.save({"model": model.state_dict()}, checkpoint_id=f"{directory}/refused")
        said = ""
    except dcp.api.CheckpointException as error:
        said = str(error)
    states = (gemini.handle_of(model).state_dict(), get_model_state_dict(model))
    for name, state in zip(("handle", "helper"), states, strict=True):
        dcp.save({"model": state}, checkpoint_id=f"{directory}/{name}")
    same = []
    for name in ("handle", "helper"):
        train(model, optimizer, range(2, 3))
        dcp.load({"model": model.state_dict()}, checkpoint_id=f"{directory}/{name}")  # into the chunks
        got = whole(model)
        same.append(all(torch.equal(got[key], value) for key, value in weights.items()))
    return said, *same


def test_a_state_whose_weights_ranks_would_read_alone_is_refused_with_two_that_go(tmp_path: Path) -> None:
    for said, *same in run_on_ranks(_own_state_on_ranks, 2, str(tmp_path)):
        assert "get_model_state_dict(model)" in said
        assert "gemini.handle_of(model).state_dict()" in said
        assert same == [True, True]


def test_the_own_state_of_a_managed_module_is_saved_and_loaded_by_one_process(tmp_path: Path) -> None:
    model, optimizer = made("in place", tmp_path)
    train(model, optimizer, range(2))
    want = whole(model)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "saved", no_dist=True)
    train(model, optimizer, range(2, 3))
    dcp.load({"model": model.state_dict()}, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert_equal(whole(model), want)
