"""Over ranks a checkpoint of GeminiTrainer has the files of all of them, and a run goes on from it."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))

from processes import close_workers, run_on_ranks
from trainer_runs import arguments, figures, ours, tight

from gemini.errors import CheckpointError


@pytest.fixture(autouse=True, scope="module")
def _workers_end() -> Any:
    yield
    close_workers()


def train(directory: str, resume: bool | str) -> list[Any]:
    """Train on this rank, as torchrun would start it; return the figures, or what was raised."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    said = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in said.items()}, MASTER_PORT="29557")
    try:
        args = arguments(Path(directory), save_strategy="steps", save_steps=1, save_total_limit=2)
        return figures(ours(args, resume=resume, **tight(f"{directory}-tier")))
    except CheckpointError as error:
        return [str(error)]
    finally:
        for name in (*said, "MASTER_PORT"):
            del os.environ[name]


def test_ranks_save_one_checkpoint_and_go_on_from_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    want, _ = run_on_ranks(train, 2, str(run), False)
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint-2", "checkpoint-3"]
    files = {path.name for path in (run / "checkpoint-3").iterdir()}
    assert files >= {"rng_state_0.pth", "rng_state_1.pth", "gemini", "gemini.json", "scheduler.pt"}
    (run / "checkpoint-3" / "rng_state_1.pth").unlink()
    for said in run_on_ranks(train, 2, str(run), str(run / "checkpoint-3")):
        assert "rng_state_1.pth is not there" in said[0]
    assert run_on_ranks(train, 2, str(run), True)[0] == want
    shutil.rmtree(run / "checkpoint-3" / "gemini")
    assert run_on_ranks(train, 2, str(run), True)[0] == want
