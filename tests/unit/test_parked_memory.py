"""Memory that chunks leave stays for the chunks to come as long as the period has room for it."""

from __future__ import annotations

import pytest
import torch

from gemini import _C
from gemini.chunk import ChunkManager, TierBudgets
from gemini.chunk.chunk import ChunkKind, ChunkSpec

CHUNK_BYTES = 2**18
NUM_CHUNKS = 4


@pytest.fixture
def manager() -> ChunkManager:
    """Return a manager whose chunks fit DEVICE, where the third of four moments leaves room for one."""
    spec = ChunkSpec(ChunkKind.PARAM, CHUNK_BYTES // 4, torch.float32)
    budget = NUM_CHUNKS * CHUNK_BYTES
    manager = ChunkManager([spec] * NUM_CHUNKS, TierBudgets(budget, budget))
    tensors = [manager.add_tensor(chunk) for chunk in manager.chunks]
    for tensor in tensors:
        manager.acquire([tensor], traced=False)
        manager.release([tensor], dirty=True)
    order = [[chunk] for chunk in range(NUM_CHUNKS)]
    reserve = [0, 0, (NUM_CHUNKS - 1) * CHUNK_BYTES, 0]
    manager.table.set_schedule(_C.Schedule(order, reserve, NUM_CHUNKS))
    manager.park(CHUNK_BYTES, always=True)
    manager.table.begin_step()
    return manager


def visit(manager: ChunkManager, tensor: int) -> None:
    manager.acquire([tensor], traced=True)
    manager.release([tensor], dirty=False)


def test_memory_is_kept_beyond_what_the_worst_period_leaves(manager: ChunkManager) -> None:
    visit(manager, 0)
    manager.free([3])
    visit(manager, 1)
    assert manager.arena_bytes() == NUM_CHUNKS * CHUNK_BYTES
    assert manager._memory.parked_bytes == CHUNK_BYTES
    manager.close()


def test_a_period_that_leaves_less_gets_what_was_kept(manager: ChunkManager) -> None:
    visit(manager, 0)
    manager.free([0, 1, 3])
    assert manager._memory.parked_bytes == 3 * CHUNK_BYTES
    manager.table.set_schedule(_C.Schedule([[2]], [3 * CHUNK_BYTES], NUM_CHUNKS))
    manager.table.begin_step()
    visit(manager, 2)  # which moves nothing
    assert manager.arena_bytes() == CHUNK_BYTES
    assert manager._memory.parked_bytes == 0
    manager.close()


def test_an_evaluation_that_moves_nothing_gets_what_the_step_before_it_kept(manager: ChunkManager) -> None:
    manager.park(NUM_CHUNKS * CHUNK_BYTES, always=True)
    visit(manager, 0)
    manager.free([0, 1, 3])
    assert manager._memory.parked_bytes == 3 * CHUNK_BYTES
    manager.table.set_schedule(_C.Schedule([[2]], [3 * CHUNK_BYTES], NUM_CHUNKS))
    manager.park(CHUNK_BYTES, always=True)
    manager.table.begin_step()
    visit(manager, 2)
    assert manager.arena_bytes() == CHUNK_BYTES
    manager.close()
