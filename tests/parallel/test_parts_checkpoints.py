"""Checkpoints of a model in parts on several ranks: all parts are of one save, or nothing is loaded."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from processes import run_on_ranks
from tensor_harness import LANGUAGE_PLAN, Language, gathered, make_mesh
from torch import Tensor, nn
from torch import distributed as dist

from gemini import CheckpointError, CPUAdam, GeminiDDP, GeminiOptimizer, checkpoint
from gemini.parallel import parallelize

CHUNKS = {"min_chunk_size_mb": 0.004, "search_range_mb": 0.004, "device_bytes": "64MiB"}


class Trained:
    """A model of tp=2, and how it goes on."""

    def __init__(self) -> None:
        torch.manual_seed(21)
        mesh = make_mesh(tp=2, dp=dist.get_world_size() // 2)
        self.part = mesh["tp"].get_local_rank()
        model = Language()
        self.partition = parallelize(model, mesh, LANGUAGE_PLAN)
        ranks = self.partition.model_ranks
        self.model = GeminiDDP(model, process_group=mesh["dp"], model_ranks=ranks, **CHUNKS)
        self.optimizer = GeminiOptimizer(CPUAdam(self.model.parameters(), lr=1e-2), self.model)

    def step(self, seed: int) -> None:
        ids = torch.randint(Language.VOCABULARY, (4, 7), generator=torch.Generator().manual_seed(seed))
        loss = nn.functional.cross_entropy(self.model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        self.optimizer.backward(loss)
        self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        return gathered(self.model, self.partition)

    def save(self, root: str, keep: int = 2, part: int | None = None) -> Path:
        own = f"{root}/{self.part if part is None else part}"
        return checkpoint.save(own, self.model, self.optimizer, keep=keep)


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[key], value) for key, value in other.items())


def lose_the_newest_of_part_1(root: str, asynchronous: bool) -> tuple[bool, bool, int]:
    trained, save = Trained(), checkpoint.save_async
    with trained.model:
        trained.step(0)
        trained.save(root)
        wanted = trained.weights()
        trained.step(1)
        if asynchronous:
            save(f"{root}/{trained.part}", trained.model, trained.optimizer).wait()
        else:
            trained.save(root)
        dist.barrier()
        if dist.get_rank() == 1:
            shutil.rmtree(f"{root}/1/step-00000002")
        dist.barrier()
        checkpoint.load(f"{root}/{trained.part}", trained.model, trained.optimizer)
        older = equal(trained.weights(), wanted)
        trained.step(1)
        trained.save(root, keep=1)
        wanted = trained.weights()
        trained.step(2)
        checkpoint.load(f"{root}/{trained.part}", trained.model, trained.optimizer)
        newer = equal(trained.weights(), wanted)
    return older, newer, len(list(Path(root, str(trained.part)).iterdir()))


@pytest.mark.parametrize(("ranks", "asynchronous"), [(2, False), (4, True)])
def test_parts_load_the_newest_save_that_all_of_them_have(
    tmp_path: Path, ranks: int, asynchronous: bool
) -> None:
    found = run_on_ranks(lose_the_newest_of_part_1, ranks, str(tmp_path), asynchronous)
    assert found == [(True, True, 1)] * ranks


def load_what_does_not_belong_together(root: str) -> list[str]:
    trained, said = Trained(), []
    with trained.model:
        trained.step(0)
        first = trained.save(root)
        other = trained.save(f"{root}/again")
        wanted = trained.weights()
        mixed = first if trained.part == 0 else other
        swapped = f"{root}/{1 - trained.part}"
        for directory in (mixed, swapped):
            with pytest.raises(CheckpointError) as caught:
                checkpoint.load(directory, trained.model, trained.optimizer)
            said.append(str(caught.value))
        unchanged = equal(trained.weights(), wanted)
        trained.step(1)
        checkpoint.load(first, trained.model, trained.optimizer)  # one checkpoint, on each rank its own
        assert unchanged
        assert equal(trained.weights(), wanted)
    return said


def test_parts_of_other_saves_and_of_other_ranks_are_refused(tmp_path: Path) -> None:
    for mixed, swapped in run_on_ranks(load_what_does_not_belong_together, 2, str(tmp_path)):
        assert "belong to different saves" in mixed
        assert str(tmp_path / "0") in mixed
        assert str(tmp_path / "again" / "1") in mixed
        assert "has part" in swapped
        assert "this rank has part" in swapped


def save_where_part_1_cannot(root: str) -> tuple[str, list[str]]:
    trained = Trained()
    with trained.model:
        trained.step(0)
        trained.save(root, keep=1)
        trained.step(1)
        if trained.part == 1:
            trained.optimizer.param_groups[0]["note"] = object()
        with pytest.raises(CheckpointError) as caught:
            trained.save(root, keep=1)
    return str(caught.value), sorted(path.name for path in Path(root, str(trained.part)).iterdir())


def test_a_part_that_cannot_be_saved_keeps_the_others_from_being_saved(tmp_path: Path) -> None:
    (first, held), (second, also_held) = run_on_ranks(save_where_part_1_cannot, 2, str(tmp_path))
    assert held == also_held == ["step-00000001"]
    assert "part 1 of 2" in first
    assert "a parameter group" in first
    assert "a parameter group" in second
