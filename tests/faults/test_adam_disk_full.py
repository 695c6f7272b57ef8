"""Adam with states in a file on a disk that is full: before the first step, and when parameters are added."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gemini.errors import IoError
from gemini.optim import CPUAdam

DISK_BYTES = 2**20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of one MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    directory = tmp_path / "disk"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(directory)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"cannot mount a file system here: {done.stderr.strip()}")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


def make_params(count: int) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    return [torch.randn(40_000, generator=source).requires_grad_() for _ in range(count)]  # states: 320 kB


def steps(optimizer: CPUAdam, params: list[torch.Tensor], start: int, stop: int) -> None:
    for step in range(start, stop):
        for index, param in enumerate(params):
            source = torch.Generator().manual_seed(100 * step + index)
            param.grad = torch.randn(param.shape, generator=source)
        optimizer.step()


def assert_equal(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert all(itertools.starmap(torch.equal, zip(got, want, strict=True)))


def test_full_disk_is_refused_before_anything_changes_and_works_when_there_is_space(small_disk: Path) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(bytes(DISK_BYTES - 100_000))
    params, want = make_params(2), make_params(2)
    optimizer = CPUAdam(params, nvme_offload_fraction=1.0, nvme_offload_dir=small_disk)
    for _ in range(2):
        with pytest.raises(IoError, match=str(small_disk)) as caught:
            steps(optimizer, params, 0, 1)
        assert caught.value.errno == errno.ENOSPC
    assert_equal(params, want)
    assert os.statvfs(small_disk).f_bfree >= 20  # what was taken in vain was given back
    filler.unlink()
    steps(optimizer, params, 0, 3)
    steps(CPUAdam(want), want, 0, 3)
    assert_equal(params, want)


def test_disk_too_small_for_an_added_group_stops_nothing_but_that(small_disk: Path) -> None:
    params, want = make_params(6), make_params(6)
    reference = CPUAdam(want[:2])
    optimizer = CPUAdam(params[:2], nvme_offload_fraction=1.0, nvme_offload_dir=small_disk)
    steps(optimizer, params[:2], 0, 2)
    steps(reference, want[:2], 0, 2)
    optimizer.add_param_group({"params": params[2:]})
    with pytest.raises(IoError) as caught:
        steps(optimizer, params, 2, 3)
    assert caught.value.errno == errno.ENOSPC
    assert_equal(params, want)
    optimizer.param_groups.pop()
    steps(optimizer, params[:2], 2, 4)
    steps(reference, want[:2], 2, 4)
    assert_equal(params, want)
