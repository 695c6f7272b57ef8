"""What Lightning tunes with one process it tunes with GeminiStrategy: the size of batches, which it finds by
running out of memory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="only the extra 'test' brings it")

import torch
from hf_models import assert_same
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.tuner import Tuner
from lightning_runs import TIGHT, Classifier, loader, trainer

from gemini.errors import OutOfBudgetError
from gemini.integrations.lightning import GeminiStrategy

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

Raised = Callable[[], Exception]  # made for each raise: an exception keeps what it went through


def of_torch() -> Exception:
    return RuntimeError("DefaultCPUAllocator: can't allocate memory")


def of_ours() -> Exception:
    return OutOfBudgetError("a chunk does not fit")


class Sized(Classifier):
    """Has a batch size, and memory for 8 rows."""

    def __init__(self, lacks: Raised) -> None:
        super().__init__()
        self.batch_size, self._lacks = 2, lacks

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(loader(64).dataset, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return loader(8)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if len(batch[0]) > 8:
            raise self._lacks()
        return super().training_step(batch, index)


@pytest.mark.dear("each try of a batch size is a training of its own")
@pytest.mark.parametrize(("mode", "lacks"), [("power", of_torch), ("binsearch", of_ours), ("power", of_ours)])
def test_the_batch_size_and_what_is_trained_with_it_are_those_of_an_unmanaged_run(
    mode: str, lacks: Raised, tmp_path: Path
) -> None:
    found = []
    for strategy, why in (("auto", of_torch), (GeminiStrategy(**TIGHT), lacks)):
        torch.manual_seed(1)
        made, figures = trainer(tmp_path, strategy, max_epochs=1)
        module = Sized(why)
        size = Tuner(made).scale_batch_size(module, mode=mode, init_val=2, steps_per_trial=2)
        torch.manual_seed(2)
        made.fit(module)
        found.append((size, module, figures.kept))
    assert found[0][0] == found[1][0] == (8 if mode == "power" else 7)
    assert found[0][2] == found[1][2]
    assert_same(found[1][1], found[0][1])


def test_what_the_callback_has_tried_takes_no_memory_from_the_run(tmp_path: Path) -> None:
    finder = BatchSizeFinder(init_val=2, steps_per_trial=2)
    made, _ = trainer(tmp_path, GeminiStrategy(**TIGHT), max_epochs=1, callbacks=[finder])
    module = Sized(of_torch)
    made.fit(module)
    assert finder.optimal_batch_size == module.batch_size == 8
    assert made.global_step == 8
    stats = made.strategy.handle.stats()
    assert stats["withheld_bytes"] == 0
    assert made.strategy.handle.manager.shortage.count > 0


def test_one_process_is_not_distributed(tmp_path: Path) -> None:
    made, _ = trainer(tmp_path, GeminiStrategy(**TIGHT))
    assert not made._accelerator_connector.is_distributed
    several, _ = trainer(tmp_path, GeminiStrategy(**TIGHT), devices=2)
    assert several._accelerator_connector.is_distributed
    assert several.strategy.world_size == 2
