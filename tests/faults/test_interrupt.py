"""Ctrl-C anywhere in a step: the books stay right and the next step works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fault_training import (
    KIB,
    adam,
    assert_sound,
    assert_weights,
    loss_of,
    managed,
    train_step,
    undisturbed,
    weights,
)
from interrupts import interrupted

from gemini import checkpoint

# Between any two lines; elsewhere at calls, where CPython looks for signals: an exception between the last
# line of ``with torch.no_grad()`` and its end leaves gradients disabled, with or without this library.
CORE = (
    "line",
    (
        "chunk/manager.py",
        "chunk/disk_file.py",
        "gate/gate.py",
        "runtime/manager.py",
        "step/order.py",
        "recorder.py",
        "gate/pending_work.py",
        "chunk_update.py",
        "optim/rule.py",
    ),
)
REST = (
    "call",
    ("intercept/tensors.py", "backward.py", "model_storage.py", "gemini_optimizer.py", "adopt.py", "ddp.py"),
)


@pytest.mark.parametrize("options", [{}, {"host_bytes": 48 * KIB}], ids=["disk", "host"])
@pytest.mark.parametrize(("where", "stride"), [(CORE, 43), (REST, 5)], ids=["core", "rest"])
def test_the_step_after_an_interrupted_one_is_exact(
    tmp_path: Path, where: tuple[str, tuple[str, ...]], stride: int, options: dict[str, Any]
) -> None:
    want_losses, want = undisturbed(3)
    model = managed(tmp_path, **options)
    optimizer = adam(model)
    for step in (0, 1):
        train_step(model, optimizer, step)
    checkpoint.save(tmp_path / "run", model, optimizer)
    number, came = 1, True
    while came:
        came = interrupted(lambda: train_step(model, optimizer, 2), number, *where)
        optimizer.zero_grad()
        assert_sound(model)
        checkpoint.load(tmp_path / "run", model, optimizer)
        number += stride
    assert number > 20 * stride
    assert train_step(model, optimizer, 2) == want_losses[2]
    assert_weights(weights(model), want)


def test_a_step_interrupted_as_it_begins_can_be_repeated(tmp_path: Path) -> None:
    want_losses, want = undisturbed(3)
    for number in range(1, 40):
        model = managed(tmp_path)
        optimizer = adam(model)
        for step in (0, 1):
            train_step(model, optimizer, step)
        model.state_dict()  # runs what is pending
        assert interrupted(lambda model=model: loss_of(model, 2), number, *CORE)  # type: ignore[misc]
        optimizer.zero_grad()
        assert_sound(model)
        assert train_step(model, optimizer, 2) == want_losses[2]
        assert_weights(weights(model), want)
        model.close()


def test_the_step_and_the_evaluation_after_an_interrupted_one_are_exact(tmp_path: Path) -> None:
    want_losses, want = undisturbed(3)
    model = managed(tmp_path)
    optimizer = adam(model)
    for step in (0, 1):
        train_step(model, optimizer, step)

    @torch.no_grad()
    def evaluate() -> float:
        return loss_of(model, 7).item()

    want_loss = evaluate()
    number, came = 1, True
    while came:
        came = interrupted(evaluate, number, *CORE)
        model.manager.recover()
        assert_sound(model)
        number += 11
    assert number > 20 * 11
    assert evaluate() == want_loss
    assert train_step(model, optimizer, 2) == want_losses[2]
    assert_weights(weights(model), want)


@pytest.mark.dear("a process is interrupted in many places")
def test_an_interrupted_save_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    model = managed(tmp_path)
    optimizer = adam(model)
    train_step(model, optimizer, 0)
    checkpoint.save(tmp_path / "run", model, optimizer)
    number, came = 1, True
    while came:
        train_step(model, optimizer, model.stats()["step"])
        files = ("directory.py", "saving.py", "tensor_file.py", "sealed_file.py")
        save = lambda: checkpoint.save(tmp_path / "run", model, optimizer, keep=1)  # noqa: E731
        came = interrupted(save, number, "call", files)
        number += 11
        assert checkpoint.is_complete(tmp_path / "run")
    assert number > 100
    assert_weights(weights(model), undisturbed(model.stats()["step"])[1])
    names = {file.name for file in (tmp_path / "run").iterdir()}
    assert names == {f"step-{model.stats()['step']:08d}"}
    assert torch.get_num_threads() == 1
