"""Chunks whose sizes show only while a model runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini.chunk import ChunkManager, TierBudgets
from gemini.errors import OutOfBudgetError
from gemini.runtime.activation.saved_tensors import ChunkPool, rounded_bytes

PAGE = 4096


@given(st.integers(1, 2**40), st.sampled_from([PAGE, 2**16, 2**21]))
def test_a_size_is_whole_blocks_and_an_eighth_too_large_at_most(nbytes: int, block_bytes: int) -> None:
    size = rounded_bytes(nbytes, block_bytes)
    assert size % block_bytes == 0
    assert nbytes <= size < nbytes + max(block_bytes, nbytes / 8 + 1)
    assert rounded_bytes(size, block_bytes) == size


@pytest.fixture
def chunks(tmp_path: Path) -> ChunkManager:
    """Return a manager without chunks whose DISK file has places for 16 pages of them."""
    return ChunkManager([], TierBudgets(8 * PAGE, 0, 8 * PAGE, str(tmp_path), 16 * PAGE))


def test_the_chunk_made_first_is_taken_first(chunks: ChunkManager) -> None:
    pool = ChunkPool(chunks)
    first, second = pool.take(PAGE)[0], pool.take(PAGE)[0]
    pool.give_back(second)
    pool.give_back(first)
    assert [pool.take(PAGE)[0].id, pool.take(PAGE)[0].id] == [first.id, second.id]
    chunks.close()


def test_without_a_place_a_larger_chunk_serves_and_then_none(chunks: ChunkManager) -> None:
    pool = ChunkPool(chunks)
    large, _ = pool.take(8 * PAGE)
    pool.take(8 * PAGE)
    pool.give_back(large)
    assert pool.take(PAGE)[0] is large
    with pytest.raises(OutOfBudgetError, match="batch shapes"):
        pool.take(PAGE)
    chunks.close()


def test_content_that_leaves_device_comes_back(chunks: ChunkManager) -> None:
    pool = ChunkPool(chunks)
    taken = [pool.take(4 * PAGE) for _ in range(3)]  # DEVICE holds two of them
    for value, (chunk, tensor) in enumerate(taken):
        chunks.acquire([tensor], traced=False)
        chunk.tensor.fill_(value)
        chunks.release([tensor], dirty=True)
    for value, (chunk, tensor) in enumerate(taken):
        chunks.acquire([tensor], traced=False)
        assert bool((chunk.tensor == value).all())
        chunks.release([tensor], dirty=False)
        pool.give_back(chunk)
    assert chunks.table.usages() == (0, 0, 0)
    chunks.close()


def test_an_activation_larger_than_device_is_named_and_takes_no_chunk(chunks: ChunkManager) -> None:
    pool = ChunkPool(chunks)
    with pytest.raises(OutOfBudgetError, match=r"activation of 36\.0 KiB.*DEVICE with 32\.0 KiB.*checkpoint"):
        pool.take(9 * PAGE)
    assert chunks.chunks == []
    assert pool.take(8 * PAGE)[0].spec.nbytes == 8 * PAGE
    chunks.close()
