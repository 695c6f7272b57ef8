"""torch.distributed.checkpoint takes managed models and their optimizers, both ways, as it takes others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from processes import own_part, run_on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

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
