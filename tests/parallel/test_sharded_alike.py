"""What must be alike on all ranks is refused where it is not, on all of them and by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_on_ranks
from sharded_harness import SMALL_CHUNKS, WIDTH, Recipe, assert_same, mlp, wrap
from torch import distributed as dist

from gemini import GeminiDDP, GeminiError, GeminiOptimizer, checkpoint

OPTIONS: dict[str, tuple[Any, Any, str]] = {
    "disk_dir": ("{tmp}", "{tmp}/missing", "missing"),
    "mixed_precision": (None, "fp15", "fp15"),
    "device": ("cpu", "cuda:9", "cuda"),
}


def _wrap_alone(name: str, tmp: str) -> tuple[str, list[str]]:
    mine: Any = OPTIONS[name][dist.get_rank()]
    options = {**SMALL_CHUNKS, name: mine.format(tmp=tmp) if isinstance(mine, str) else mine}
    try:
        GeminiDDP(mlp(), **options)
    except GeminiError as error:
        return str(error), [path.name for path in Path(tmp).iterdir()]
    return "", []


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_fails_on_one_rank_is_heard_of_on_all(name: str, tmp_path: Path) -> None:
    (other, left), (own, _) = run_on_ranks(_wrap_alone, 2, name, str(tmp_path), timeout=30)
    assert OPTIONS[name][2] in own
    assert other.startswith("rank 1 of 2 failed: ")
    assert own in other
    assert left == []


def _settings(change: str) -> tuple[str, dict[str, torch.Tensor], int]:
    recipe = Recipe()
    model, optimizer = wrap(mlp, recipe)
    message = ""
    with model:
        for step in range(2):
            optimizer.backward(model(torch.ones(2, WIDTH)).square().mean())
            if step == 1 and dist.get_rank() == 1:
                CHANGES[change](optimizer)
            try:
                _finish(optimizer, change, odd=step == 1 and dist.get_rank() == 1)
            except GeminiError as error:
                message = str(error)
                for group in optimizer.param_groups:
                    group.update(recipe.adam, betas=(0.9, 0.999))
                _finish(optimizer, change, odd=False)
        model.manager.chunks.table.check_invariants()
        return message, {k: v.clone() for k, v in model.state_dict().items()}, model.manager.step


def _finish(optimizer: GeminiOptimizer, change: str, *, odd: bool) -> None:
    if change == "max_norm":
        optimizer.clip_grad_by_norm(2.0 if odd else 1.0)
    optimizer.step()


CHANGES: dict[str, Callable[[GeminiOptimizer], object]] = {
    "lr": lambda optimizer: optimizer.param_groups[0].update(lr=0.5),
    "betas": lambda optimizer: optimizer.param_groups[0].update(betas=(0.5, 0.5)),
    "weight_decay": lambda optimizer: optimizer.param_groups[0].update(weight_decay=0.5),
    "max_norm": lambda _: None,
}


@pytest.mark.parametrize("change", CHANGES)
def test_settings_that_differ_are_refused_and_the_step_can_be_repeated(change: str) -> None:
    (first, weights, steps), (second, others, _) = run_on_ranks(_settings, 2, change)
    assert first == second
    assert change in first
    assert "rank 0: " in first
    assert "rank 1: " in first
    assert steps == 2
    assert_same(weights, others)


def _load_apart(tmp: str) -> list[str]:
    model, optimizer = wrap(mlp, Recipe())
    said = []
    with model:
        optimizer.backward(model(torch.ones(2, WIDTH)).square().mean())
        optimizer.step()
        own, link = Path(tmp, f"of-{dist.get_rank()}"), Path(tmp, f"link-{dist.get_rank()}")
        Path(tmp, "all").mkdir(exist_ok=True)
        link.symlink_to(Path(tmp, "all"))
        for use in (checkpoint.save, checkpoint.load):
            try:
                use(str(own), model, optimizer)
            except GeminiError as error:
                said.append(str(error))
            use(str(link), model, optimizer)
        said += [path.name for path in Path(tmp).iterdir() if path.name.startswith("of-")]
    return said


def test_another_directory_to_save_to_or_load_from_is_refused(tmp_path: Path) -> None:
    first, second = run_on_ranks(_load_apart, 2, str(tmp_path))
    assert first == second
    assert len(first) == 2
    for message in first:
        assert f"rank 0 '{tmp_path}/of-0', rank 1 '{tmp_path}/of-1'" in message
