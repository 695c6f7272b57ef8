"""activation_offload="auto": only what would leave DEVICE goes into chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from activation_harness import Net, activation_bytes, both, offloaded, store_small_tensors
from torch import Tensor, nn
from training_harness import (
    Recipe,
    managed_optimizer,
    managed_step,
    random_batch,
    seeded,
)

from gemini import GeminiDDP
from gemini._C import ChunkTable
from gemini.errors import ConfigError
from gemini.runtime.activation.saved_tensors import Fate, KeepPlan

pytestmark = pytest.mark.usefixtures(store_small_tensors.__name__)


def large_loss(model: nn.Module, index: int) -> Tensor:
    torch.manual_seed(index)
    loss: Tensor = model(random_batch(index, 256, 16, 32)).square().mean()  # 512 KiB
    return loss


def auto(tmp_path: Path, device_bytes: int | str) -> dict[str, Any]:
    """Return keywords of GeminiDDP: non-model memory is measured."""
    options = offloaded(tmp_path, **{"activation_offload": "auto", "non_model_bytes": None})
    return {**options, "device_bytes": device_bytes, "disk_bytes": "256MiB"}


@pytest.mark.parametrize("device_bytes", ["16MiB", "40MiB", "1GiB"])
def test_auto_never_changes_the_numbers(device_bytes: str, tmp_path: Path) -> None:
    both(Net, large_loss, Recipe(steps=6), auto(tmp_path, device_bytes))


def test_auto_keeps_everything_where_everything_fits(tmp_path: Path) -> None:
    with GeminiDDP(seeded(Net), **auto(tmp_path, "1GiB")) as model:
        optimizer = managed_optimizer(model)
        for step in range(4):
            managed_step(model, optimizer, large_loss, Recipe(), step)
        assert model.manager.resident
        large_loss(model, 4)
        assert activation_bytes(model) == 0


def test_what_a_forward_pass_that_raised_has_saved_does_not_count() -> None:
    plan, fate = KeepPlan(), Fate()

    def interrupted() -> None:
        with plan.forward():
            plan.next_stays(8)
            plan.note(8, Fate())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with plan.forward():
        plan.next_stays(40)
        plan.note(40, fate)
    fate.stayed = True
    assert plan.end_step(on_trace=True)
    assert plan.next_stays(40)
    assert not plan.next_stays(8)


def test_auto_stores_what_is_saved_first_and_keeps_what_is_used_first() -> None:
    table = ChunkTable(100, 0, 1000)
    chunks = [table.add_chunk(40) for _ in range(4)]
    tensors = [table.add_tensor(chunk) for chunk in chunks]
    plan, fates = KeepPlan(), [Fate() for _ in chunks]
    for fate, tensor in zip(fates, tensors, strict=True):
        assert not plan.next_stays(40)
        plan.note(40, fate)
        for action in table.access([tensor]) or ():
            if action.id:
                table.complete(action.id)
        table.ensure([tensor])
        table.release([tensor], True)
    for fate, chunk in zip(fates, chunks, strict=True):
        fate.settle(table, chunk)
    assert plan.end_step(on_trace=True)
    assert plan.kept_bytes == 80
    assert [plan.next_stays(40) for _ in chunks] == [False, False, True, True]


def test_auto_stores_a_tensor_of_another_size_than_expected() -> None:
    plan, fate = KeepPlan(), Fate()
    fate.stayed = True
    plan.next_stays(40)
    plan.note(40, fate)
    assert plan.end_step(on_trace=True)
    assert (plan.next_stays(48), plan.next_stays(40)) == (False, False)
    assert not plan.end_step(on_trace=True)
    assert plan.next_stays(40)


def test_auto_needs_non_model_memory_to_be_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="non_model_bytes"):
        GeminiDDP(nn.Linear(4, 4), **offloaded(tmp_path, **{"activation_offload": "auto"}))


def test_steps_are_planned_where_only_activations_do_not_fit(tmp_path: Path) -> None:
    with GeminiDDP(seeded(Net), **auto(tmp_path, "12MiB")) as model:
        optimizer = managed_optimizer(model)
        for step in range(8):
            managed_step(model, optimizer, large_loss, Recipe(), step)
        planned = model.plan().step
        assert planned is not None
        assert "activation" in planned.chunk_kinds


def test_a_step_that_is_recorded_again_leaves_room_for_the_kept_activations(tmp_path: Path) -> None:
    mib = 2**20
    with GeminiDDP(seeded(Net), **auto(tmp_path, 16 * mib)) as model:
        optimizer, order = managed_optimizer(model), model.manager.order
        managed_step(model, optimizer, large_loss, Recipe(), 0)
        assert order.trace is not None
        reserve_bytes = max(order.trace.reserve_bytes())
        managed_step(model, optimizer, large_loss, Recipe(), 1)
        assert order.trace is None, "the next step is not recorded again"
        activations = model.manager.activations
        assert activations is not None
        assert activations.kept_bytes > 0
        room_bytes = 16 * mib - reserve_bytes - activations.kept_bytes
        assert order.plan.device_limit_bytes <= max(room_bytes, mib)  # an update of this model needs less
        managed_step(model, optimizer, large_loss, Recipe(), 2)
        order.record_again(12 * mib)  # whatever the heap of this process takes
        assert order.plan.device_limit_bytes <= 4 * mib
