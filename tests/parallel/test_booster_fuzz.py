"""Files of others, changed at random: a booster loads them, or refuses them and changes nothing."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import resealed
import torch
from booster_models import TINY, Tied, assert_same, boosted, plain, tied, train
from mutants import MUTANTS, SEED, mutate, nothing_raw, replace

from gemini.parallel import Booster, GeminiPlugin, TorchDDPPlugin


class AnyNote(Tied):
    """A model whose own state may be anything."""

    def set_extra_state(self, state: Any) -> None:
        self.note = {"any": state}


def _change(file: Path, chance: random.Random) -> None:
    """Change a file: what it says, where it is one of ours, or its bytes."""
    if file.suffix == ".pt" or chance.random() < 0.2:
        replace(file, chance)
    elif file.suffix == ".json":
        document = json.loads(file.read_text())
        mutate(document, chance)
        file.write_text(json.dumps(document))
    else:
        document = resealed.read(file)
        inner = [key for key in document.get("__metadata__", {}) if key.startswith("gemini.")]
        if inner and chance.random() < 0.6:
            said = json.loads(document["__metadata__"][inner[0]])
            mutate(said, chance)
            document["__metadata__"][inner[0]] = json.dumps(said)
        else:
            mutate(document, chance)
        resealed.write(file, document)


def _check(saved: Path, load: Callable[[Path], None], held: Callable[[], dict[str, Any]], seed: str) -> None:
    """Load mutants of what is saved: where one is refused everything is as before."""
    mutant = saved.with_name(f"mutant-{saved.name}")
    for number in range(MUTANTS // 16):
        chance = random.Random(f"{SEED} {seed} {number}")
        if saved.is_dir():
            shutil.rmtree(mutant, ignore_errors=True)
            shutil.copytree(saved, mutant)
            _change(chance.choice(sorted(mutant.iterdir())), chance)
        else:
            mutant.unlink(missing_ok=True)
            shutil.copy(saved, mutant)
            _change(mutant, chance)
        before = held()
        with nothing_raw() as refused:
            load(mutant)
        if refused:
            assert_same(held(), before)


@pytest.mark.parametrize("plugin", [TorchDDPPlugin, GeminiPlugin])
@pytest.mark.parametrize("shard", [False, True], ids=["file", "directory"])
def test_a_changed_model_is_loaded_or_refused(plugin: Any, shard: bool, tmp_path: Path) -> None:
    booster, model, _ = boosted(plugin(), AnyNote())
    saved = tmp_path / "model"
    booster.save_model(model, saved, shard, True, "", TINY)  # type: ignore[arg-type]

    def load(path: Path) -> None:
        booster.load_model(model, path, strict=False)

    _check(saved, load, lambda: plain(model.state_dict()), f"model {shard}")


@pytest.mark.parametrize("plugin", [TorchDDPPlugin, GeminiPlugin])
def test_a_changed_optimizer_is_loaded_or_refused(plugin: Any, tmp_path: Path) -> None:
    booster, model, optimizer = boosted(plugin(), tied())
    train(booster, model, optimizer, range(2))
    saved = tmp_path / "optimizer.safetensors"
    booster.save_optimizer(optimizer, saved)

    def held() -> dict[str, Any]:
        state = optimizer.state_dict()["state"]
        return {f"{key}.{name}": value for key, entry in state.items() for name, value in entry.items()}

    _check(saved, lambda path: booster.load_optimizer(optimizer, path), held, "optimizer")


def test_a_changed_pickle_is_loaded_or_refused(tmp_path: Path) -> None:
    for old in (False, True):
        saved = tmp_path / f"{old}.pt"
        torch.save(tied(1).state_dict(), saved, _use_new_zipfile_serialization=not old)
        state = {k: v for k, v in tied(1).state_dict().items() if isinstance(v, torch.Tensor)}
        torch.save(state, saved, _use_new_zipfile_serialization=not old)
        model = tied()

        def load(path: Path, model: Any = model) -> None:
            Booster().load_model(model, path, strict=False)

        _check(saved, load, lambda model=model: plain(model.state_dict()), f"pickle {old}")


def test_a_changed_scheduler_is_loaded_or_refused(tmp_path: Path) -> None:
    booster, _, optimizer = boosted(TorchDDPPlugin(), tied())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2])
    saved = tmp_path / "scheduler.json"
    booster.save_lr_scheduler(scheduler, saved)
    _check(saved, lambda path: booster.load_lr_scheduler(scheduler, path), dict, "scheduler")


@pytest.mark.parametrize("load", ["load_model", "load_optimizer", "load_lr_scheduler"])
def test_what_is_no_file_is_not_waited_for(load: str, tmp_path: Path) -> None:
    booster, model, optimizer = boosted(TorchDDPPlugin(), tied())
    held = {"load_model": model, "load_optimizer": optimizer}.get(load)
    held = held or torch.optim.lr_scheduler.MultiStepLR(optimizer, [1])
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("fifo", "zero"):
        with nothing_raw() as refused:
            getattr(booster, load)(held, tmp_path / name)
        assert "no regular file" in str(refused[0])
