"""Pages of mapped files leave memory, and nothing else does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gemini.system.pages import release_file_pages

NUMEL = 2**20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.fixture
def mapped(tmp_path: Path) -> torch.Tensor:
    """A tensor over a file, all of it read."""
    path = tmp_path / "values"
    torch.arange(NUMEL, dtype=torch.int32).numpy().tofile(path)
    values = torch.from_file(str(path), shared=False, size=NUMEL, dtype=torch.int32)
    assert int(values.max()) == NUMEL - 1
    return values


def test_pages_of_a_file_leave_memory_and_have_their_values(mapped: torch.Tensor) -> None:
    before = resident_bytes()
    release_file_pages(mapped)
    assert before - resident_bytes() > 0.9 * mapped.nbytes
    assert torch.equal(mapped, torch.arange(NUMEL, dtype=torch.int32))


def test_what_somebody_has_written_stays(mapped: torch.Tensor) -> None:
    mapped[NUMEL // 2] = -7
    own = torch.arange(NUMEL, dtype=torch.int32)
    for values in (mapped, own, own[1:], own.view(1024, 1024).t(), own[:5], torch.empty(0)):
        before = values.clone()
        release_file_pages(values)
        assert torch.equal(values, before)


def test_a_part_of_a_mapped_tensor_is_released_alone(mapped: torch.Tensor) -> None:
    mapped[0] = -7
    before = resident_bytes()
    release_file_pages(mapped[NUMEL // 2 :])
    assert 0.4 * mapped.nbytes < before - resident_bytes() < 0.6 * mapped.nbytes
    assert int(mapped[0]) == -7
    assert int(mapped[-1]) == NUMEL - 1
