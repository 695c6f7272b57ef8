"""What the file of DISK takes, after chunks were freed while they moved and after punches that failed."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from disk_space import INDEX_BYTES, disk_space

from gemini import _C, IoError
from gemini.chunk import ChunkManager, TierBudgets
from gemini.chunk.chunk import ChunkKind, ChunkSpec

CHUNK_BYTES = 2**18


def make(num_chunks: int, device: int, disk: int, directory: Path) -> tuple[ChunkManager, list[int]]:
    """Return a manager of so many chunks with budgets counted in chunks, and a tensor for each."""
    spec = ChunkSpec(ChunkKind.PARAM, CHUNK_BYTES // 4, torch.float32)
    budgets = TierBudgets(device * CHUNK_BYTES, 0, disk * CHUNK_BYTES, str(directory))
    manager = ChunkManager([spec] * num_chunks, budgets)
    return manager, [manager.add_tensor(chunk) for chunk in manager.chunks]


def write(manager: ChunkManager, tensor: int, value: float) -> None:
    manager.acquire([tensor], traced=False)
    manager.chunks[tensor].tensor.fill_(value)
    manager.release([tensor], dirty=True)


def test_a_chunk_freed_while_it_is_read_gives_its_place_back(tmp_path: Path) -> None:
    manager, tensors = make(num_chunks=4, device=2, disk=2, directory=tmp_path)
    for tensor in tensors:
        write(manager, tensor, tensor)  # the first two end on DISK
    manager.free([tensors[2]])
    manager.table.set_schedule(_C.Schedule([[0]], [], 4))
    manager.table.begin_step()
    manager.prefetch()
    assert manager.table.in_flight(0)
    manager.free([tensors[0]])
    manager.drain()
    manager.table.set_schedule(None)
    for tensor in (2, 1, 3, 2):
        write(manager, tensors[tensor], 5.0)
    manager.drain()
    assert disk_space(tmp_path) <= 2 * CHUNK_BYTES + INDEX_BYTES
    manager.close()


def test_a_punch_that_fails_loses_no_transfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager, tensors = make(num_chunks=4, device=2, disk=3, directory=tmp_path)
    for tensor in tensors:
        write(manager, tensor, tensor)
    for tensor in (0, 1):
        manager.free([tensors[tensor]])
    for tensor in (2, 3, 0, 3):
        write(manager, tensors[tensor], tensor)
    manager.table.set_limit(0)
    completions: list[Any] = []
    actions = manager.table.access((), traced=False)  # all that is on DEVICE is to leave it
    assert len(actions) == 2
    manager._execute(actions)
    manager.free([tensors[actions[0].chunk]])
    while len(completions) < 2:  # both are reported together
        completions += manager._memory.poll()
    monkeypatch.setattr(manager._memory, "poll", lambda: [completions.pop() for _ in completions[:]])
    monkeypatch.setattr(manager._disk, "drop", failing_once(manager._disk.drop))
    with pytest.raises(IoError, match="cannot give back"):
        manager.drain()
    manager.drain()
    assert not any(manager.table.in_flight(chunk) for chunk in range(4))
    assert disk_space(tmp_path) <= manager.table.usage(_C.Tier.DISK) + INDEX_BYTES
    manager.close()


def failing_once(call: Any) -> Any:
    failures = [IoError(errno.EIO, "cannot give back disk space", "file")]

    def attempt(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return call(*arguments)

    return attempt
