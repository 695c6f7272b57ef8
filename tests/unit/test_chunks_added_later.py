"""Chunks that are made after the others: in the addresses and in the file that were reserved for them."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gemini.chunk import ChunkManager, TierBudgets
from gemini.chunk.chunk import ChunkKind, ChunkSpec

CHUNK_BYTES = 2**18
PARAM, GRAD = (ChunkSpec(kind, CHUNK_BYTES // 4, torch.float32) for kind in (ChunkKind.PARAM, ChunkKind.GRAD))
ACTIVATION = ChunkSpec(ChunkKind.ACTIVATION, CHUNK_BYTES, torch.uint8)


def make(
    directory: Path | None, device: int = 2, host: int = 0, disk: int = 4, spare: int = 0
) -> ChunkManager:
    """Return a manager of two chunks that expects two more; budgets in chunks."""
    path = None if directory is None else str(directory)
    sizes = [count * CHUNK_BYTES for count in (device, host, 0 if directory is None else disk)]
    budgets = TierBudgets(*sizes, path, spare * CHUNK_BYTES)
    return ChunkManager([PARAM] * 2, budgets, expected=[GRAD] * 2)


@pytest.mark.parametrize("host", [0, 6])
def test_what_is_added_moves_like_the_others(host: int, tmp_path: Path) -> None:
    chunks = make(tmp_path, host=host, disk=5, spare=2)
    tensors = [chunks.add_tensor(chunk) for chunk in chunks.chunks]
    added = [chunks.add_chunk(spec) for spec in (GRAD, ACTIVATION, GRAD, ACTIVATION)]
    tensors += [chunks.add_tensor(chunk) for chunk in added]
    assert chunks.table.num_chunks() == 6
    for _ in range(2):
        for value, tensor in enumerate(tensors):
            chunks.acquire([tensor], traced=False)
            chunks.chunks[value].tensor.fill_(value)
            chunks.release([tensor], dirty=True)
        for value, tensor in enumerate(tensors):
            chunks.acquire([tensor], traced=False)
            assert bool((chunks.chunks[value].tensor == value).all())
            chunks.release([tensor], dirty=False)
    chunks.close()


def test_an_address_leads_to_the_chunk_whoever_came_between() -> None:
    chunks = make(None, device=6)
    added = [chunks.add_chunk(spec) for spec in (ACTIVATION, GRAD, ACTIVATION, GRAD)]
    first, end = chunks.address_range()
    for chunk in (*chunks.chunks[:2], added[1], added[3]):
        address = chunk.tensor.data_ptr()
        assert first <= address < end
        assert chunks.chunk_at(address + CHUNK_BYTES - 1) == chunk.id
    assert chunks.chunk_at(added[0].tensor.data_ptr()) == -1
    chunks.close()


def test_more_than_was_expected_has_addresses_of_its_own() -> None:
    chunks = make(None, device=6)
    tensors = [chunks.add_tensor(chunks.add_chunk(GRAD)) for _ in range(3)]
    chunks.acquire(tensors, traced=False)
    assert chunks.address_range()[1] - chunks.address_range()[0] >= 4 * CHUNK_BYTES
    chunks.release(tensors, dirty=True)
    chunks.close()


def test_others_take_no_place_of_what_is_expected(tmp_path: Path) -> None:
    chunks = make(tmp_path)
    assert not chunks.has_place(CHUNK_BYTES)
    assert chunks.lacking_place([GRAD] * 2) is None
    assert "raise disk_bytes" in str(chunks.lacking_place([GRAD] * 3))
    chunks.add_chunk(GRAD)
    assert not chunks.has_place(CHUNK_BYTES)
    assert "places for 256.0 KiB more" in str(chunks.lacking_place([GRAD] * 2))
    chunks.close()


def test_a_disk_too_full_for_what_is_expected_says_so_when_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = SimpleNamespace(free=CHUNK_BYTES, total=2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: free)
    chunks = make(tmp_path)  # DEVICE holds two of them
    assert "are free; free some space" in str(chunks.lacking_place([GRAD] * 2))
    free.free = 4 * CHUNK_BYTES
    assert chunks.lacking_place([GRAD] * 2) is None
    chunks.close()
