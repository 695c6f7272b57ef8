"""Ctrl-C anywhere in a step whose updates are the CPU's beside a GPU: books stay right, nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_harness import SMALL_CHUNKS, GpuModel, network, optimizer_of, simulated, train
from interrupts import interrupted, interrupted_within
from training_harness import assert_same_state, assert_within_budgets

from gemini import GeminiDDP, StateError, checkpoint
from gemini.optim.chunk_update import ChunkUpdate

WHERE = (
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
        "host_update.py",
        "optim/rule.py",
    ),
)
CPU = torch.device("cpu")


def start(**options: Any) -> tuple[GeminiDDP, Any]:
    """Return a model and its optimizer after three steps, the last update pending."""
    gpu = simulated(max_delay_us=100)
    chosen = {"device_bytes": 14 * gpu.block_bytes, "host_bytes": 64 * gpu.block_bytes, **SMALL_CHUNKS}
    model = GpuModel(network(), device=gpu, non_model_bytes=0, **chosen)
    optimizer = optimizer_of(model, gpu_margin_mem_ratio=0.0, **options)
    train(model, optimizer, CPU, range(3))
    return model, optimizer


@pytest.mark.parametrize("overlap", [True, False])
def test_the_step_after_an_interrupted_one_is_exact(tmp_path: Path, overlap: bool) -> None:
    model, optimizer = start(overlap=overlap)
    checkpoint.save(tmp_path / "run", model, optimizer)
    want = train(model, optimizer, CPU, range(3, 5))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    number, came = 1, True
    while came:
        checkpoint.load(tmp_path / "run", model, optimizer)
        train(model, optimizer, CPU, range(3, 4))  # leaves updates pending, where they overlap
        came = interrupted(lambda: train(model, optimizer, CPU, range(4, 5)), number, *WHERE)
        optimizer.zero_grad()
        model.manager.chunks.table.check_invariants()
        assert_within_budgets(model.stats())
        number += 97
    assert number > 20 * 97
    checkpoint.load(tmp_path / "run", model, optimizer)
    assert train(model, optimizer, CPU, range(3, 5)) == want
    assert_same_state(model.state_dict(), state)
    model.close()


def test_a_pending_update_that_was_interrupted_is_done_later_or_refused() -> None:
    model, optimizer = start()
    want = train(model, optimizer, CPU, range(3, 5))
    model.close()
    num_exact = 0
    for number in range(1, 2000, 53):
        model, optimizer = start()
        interrupted(model.manager.run_pending, number, *WHERE)
        model.manager.chunks.table.check_invariants()
        assert_within_budgets(model.stats())
        try:
            assert train(model, optimizer, CPU, range(3, 5)) == want
            num_exact += 1
        except StateError:  # it came between the start of a kernel and the note that its piece is done
            assert optimizer.incomplete
        model.close()
    assert num_exact > 20


def test_a_piece_handed_to_the_cpu_is_begun_or_left_but_never_both() -> None:
    model, optimizer = start()
    want = train(model, optimizer, CPU, range(3, 5))
    model.close()
    number, came, num_tried = 0, True, 0
    while came:
        number += 1
        model, optimizer = start()
        handed = ChunkUpdate._give, ChunkUpdate._finish_oldest
        came = interrupted_within(model.manager.run_pending, number, handed)
        assert train(model, optimizer, CPU, range(3, 5)) == want
        model.close()
        num_tried += came
    assert num_tried > 20


def test_a_model_whose_pending_update_was_interrupted_can_be_closed() -> None:
    num_interrupted = 0
    for number in range(1, 2000, 53):
        model, _ = start()
        num_interrupted += interrupted(model.manager.run_pending, number, *WHERE)
        model.close()
    assert num_interrupted > 10
