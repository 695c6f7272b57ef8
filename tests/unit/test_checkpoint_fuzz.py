"""Whatever is done to a checkpoint and sealed again: it is whole for every reader, or refused."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import resealed
import torch
from checkpoint_models import Run, assert_equal, start
from mutants import MUTANTS, SEED, mutate, nothing_raw, replace
from pairs import first

from gemini.checkpoint.convert import convert
from gemini.checkpoint.inspect import describe, verdict

pytestmark = pytest.mark.usefixtures("one_thread")

_POISON = -12345
_SHARDS = 4  # a test each, so that it is known soon which mutant is at fault


def make(mutant: Path, chance: random.Random) -> None:
    """Change a checkpoint, once or twice, and seal it again."""
    files = sorted(file.name for file in mutant.iterdir() if file.name != "seal.json")
    for _ in range(chance.choice([1, 1, 2])):
        file = mutant / chance.choice(files + 2 * ["manifest.json", "optimizer.index.json"])
        if chance.random() < 0.15 and file.name != "manifest.json":
            replace(file, chance)
            break
        document = resealed.read(file)
        mutate(document, chance)
        resealed.write(file, document)
    resealed.reseal(mutant)


def poison(run: Run) -> None:
    """Have what no step leaves in everything that a load is to bring."""
    state = run.model.state_dict()
    run.model.load_state_dict({name: torch.full_like(value, _POISON) for name, value in state.items()})
    states = run.optimizer.state_dict()
    for entry in states["state"].values():
        for moment in ("exp_avg", "exp_avg_sq"):
            entry[moment].fill_(_POISON)
    run.optimizer.load_state_dict(states)


def held(run: Run) -> tuple[Any, Any]:
    return {name: value.clone() for name, value in run.model.state_dict().items()}, run.optimizer.state_dict()


def poisoned(run: Run) -> list[str]:
    """Return the names of what has something left of :func:`poison`."""
    weights, states = held(run)
    found = [name for name, value in weights.items() if (value == _POISON).any()]
    return found + [
        f"{key}.{moment}"
        for key, entry in states["state"].items()
        for moment in ("exp_avg", "exp_avg_sq")
        if (entry[moment] == _POISON).any()
    ]


@pytest.mark.dear("a quarter of all edits of a checkpoint, each loaded in whole")
@pytest.mark.parametrize("shard", first(range(_SHARDS), 2))
def test_an_edited_checkpoint_is_whole_or_refused(tmp_path: Path, shard: int, record_property: Any) -> None:
    run = start(width=4).train(2)
    whole = run.save(tmp_path / "run", shard_bytes="1KiB", extra={"a": [1, {"b": "c"}]})
    poison(run)
    before = held(run)
    mutant = tmp_path / "mutant" / whole.name
    refused = 0
    for number in range(shard, MUTANTS, _SHARDS):
        chance = random.Random(f"{SEED} {number}")
        shutil.rmtree(tmp_path / "mutant", ignore_errors=True)
        shutil.copytree(whole, mutant)
        make(mutant, chance)
        record_property("mutant", number)
        if chance.random() < 0.1:
            with nothing_raw():
                describe(mutant), verdict(mutant)
            with nothing_raw():
                convert(mutant, tmp_path / "mutant" / "out", chance.choice(["hf", "torch"]))
            assert {path.name for path in tmp_path.iterdir()} == {"run", "mutant"}
        with nothing_raw() as errors:
            run.load(mutant)
        if errors:
            refused += 1
            assert "half-way" not in str(errors[0])
            if number % 16 == shard:
                assert_equal(held(run), before)
        else:
            assert not poisoned(run)
            run.load(whole)
            poison(run)
            before = held(run)  # settings of groups may be more than they were
    assert refused > MUTANTS // _SHARDS // 2
