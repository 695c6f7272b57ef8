"""DiskOffloader on a disk that fails; run by test_injected_faults.py with fault_shim.c loaded."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from injected_faults import END_OF_FILE, FOREVER, SHORT, Faults, assert_says_where, attempt, faults

from gemini.errors import IoError
from gemini.offload import DiskOffloader
from gemini.offload.disk_offloader import Place

__all__ = ["faults"]  # a fixture

SIZES = [100, 3_000, 50_000, 900_001, 2_500_000]  # small ones share a request, large ones take several


def make_tensors() -> list[torch.Tensor]:
    """Return the same tensors on every call."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(numel, generator=generator) for numel in SIZES]


def assert_intact(tensors: list[torch.Tensor]) -> None:
    assert all(torch.equal(*pair) for pair in zip(tensors, make_tensors(), strict=True))


@pytest.fixture
def offloader(tmp_path: Path, faults: Faults) -> DiskOffloader:
    """Return an offloader whose files exist: a fault on opening one is another test's."""
    made = DiskOffloader(tmp_path)
    warm = make_tensors()
    made.sync_writev(warm)
    return made


@pytest.mark.parametrize("what", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_vector_that_cannot_be_written_stays_in_memory(
    what: int, offloader: DiskOffloader, faults: Faults, tmp_path: Path
) -> None:
    tensors = make_tensors()
    write = lambda: offloader.sync_writev(tensors)  # noqa: E731
    for before in range(100):
        error = attempt(faults, write, "write", what, before)
        if error is None:
            break
        assert_says_where(error, tmp_path, what)
        assert {offloader.place(tensor) for tensor in tensors} == {Place.MEMORY}
        assert_intact(tensors)
    assert before > 10
    offloader.sync_readv(tensors)
    assert_intact(tensors)


@pytest.mark.parametrize(("what", "code"), [(errno.EIO, errno.EIO), (END_OF_FILE, errno.EIO)])
def test_a_vector_that_cannot_be_read_stays_on_disk(
    what: int, code: int, offloader: DiskOffloader, faults: Faults, tmp_path: Path
) -> None:
    tensors = make_tensors()
    offloader.sync_writev(tensors)
    read = lambda: offloader.sync_readv(tensors)  # noqa: E731
    for before in range(100):
        error = attempt(faults, read, "read", what, before)
        if error is None:
            break
        assert_says_where(error, tmp_path, code)
        assert {offloader.place(tensor) for tensor in tensors} == {Place.DISK}
        assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) == 0
    assert before > 10
    assert_intact(tensors)


@pytest.mark.parametrize("what", [SHORT, errno.EINTR, errno.EAGAIN])
def test_short_and_interrupted_transfers_go_on(what: int, offloader: DiskOffloader, faults: Faults) -> None:
    tensors = make_tensors()
    faults.arm("write", what, times=30)
    offloader.sync_writev(tensors)
    assert faults.disarm() > 10
    faults.arm("read", what, times=30)
    offloader.sync_readv(tensors)
    assert faults.disarm() > 10
    assert_intact(tensors)


def test_failures_of_single_tensors_do_not_touch_the_others(offloader: DiskOffloader, faults: Faults) -> None:
    tensors = make_tensors()
    called: list[int] = []
    faults.arm("write", errno.EIO, before=1, times=1)
    for index, tensor in enumerate(tensors):
        offloader.async_write(tensor, lambda index=index: called.append(index))
    with pytest.raises(IoError):
        offloader.synchronize()
    assert faults.disarm() == 1
    places = [offloader.place(tensor) for tensor in tensors]
    assert places.count(Place.MEMORY) == 1
    assert called == [index for index, place in enumerate(places) if place is Place.DISK]
    offloader.sync_readv([one for one in tensors if offloader.place(one) is Place.DISK])
    assert_intact(tensors)


def test_a_disk_that_is_gone_for_a_while(offloader: DiskOffloader, faults: Faults) -> None:
    tensors = make_tensors()
    offloader.sync_writev(tensors)
    faults.arm("read", errno.EIO, times=FOREVER)
    for _ in range(3):
        for tensor in tensors:
            with pytest.raises(IoError):
                offloader.sync_read(tensor)
    faults.disarm()
    offloader.sync_readv(tensors)
    assert_intact(tensors)
    offloader.close()
