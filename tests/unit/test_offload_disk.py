"""DiskOffloader: tensors go to disk and come back bit for bit, and failures lose nothing."""

from __future__ import annotations

import errno
import itertools
import os
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from gemini.errors import ConfigError, IoError, StateError
from gemini.offload import AsyncFile, DiskOffloader
from gemini.offload.disk_offloader import Place
from gemini.offload.disk_space import DiskSpace, Extent
from gemini.offload.extent_file import ExtentFile, StoredExtents


def storage_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.int8,
    torch.uint8,
    torch.int64,
    torch.bool,
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 4095, 4096, 1_500_000])
def test_tensor_comes_back_bit_for_bit_in_the_same_object(
    dtype: torch.dtype, numel: int, tmp_path: Path
) -> None:
    tensor = torch.randint(0, 2, (numel,)).to(dtype)
    want = tensor.clone()
    with DiskOffloader(tmp_path) as offloader:
        offloader.sync_write(tensor)
        assert offloader.place(tensor) is Place.DISK
        assert storage_bytes(tensor) == 0
        offloader.sync_read(tensor)
        assert offloader.place(tensor) is Place.MEMORY
        assert torch.equal(tensor.view(torch.uint8), want.view(torch.uint8))


def test_views_and_strides_survive(tmp_path: Path) -> None:
    tensor = torch.randn(40, 30).t()
    view = tensor[3]
    want = view.clone()
    with DiskOffloader(tmp_path) as offloader:
        offloader.sync_write(tensor)
        offloader.sync_read(tensor)
    assert torch.equal(view, want)


def test_random_schedules_return_every_tensor(tmp_path: Path) -> None:
    choose = random.Random(0)
    with DiskOffloader(tmp_path, n_entries=3) as offloader:
        tensors = [torch.randn(choose.randrange(1, 60_000)) for _ in range(12)]
        want = [tensor.clone() for tensor in tensors]
        for _ in range(150):
            tensor = choose.choice(tensors)
            if choose.random() < 0.1:
                offloader.synchronize()
            if offloader.place(tensor) in (Place.MEMORY, Place.READING):
                offloader.async_write(tensor)
            else:
                offloader.async_read(tensor)
        offloader.synchronize()
        for tensor in tensors:
            if offloader.place(tensor) is Place.DISK:
                offloader.async_read(tensor)
        offloader.sync_read_events()
        assert all(torch.equal(*pair) for pair in zip(tensors, want, strict=True))


def test_memory_is_released_when_the_write_was_waited_for_not_before(tmp_path: Path) -> None:
    tensor = torch.randn(1000)
    with DiskOffloader(tmp_path) as offloader:
        offloader.async_write(tensor)
        assert offloader.place(tensor) is Place.WRITING
        assert storage_bytes(tensor) == 4000
        offloader.sync_write_events()
        assert offloader.place(tensor) is Place.DISK
        assert storage_bytes(tensor) == 0


def test_callbacks_run_once_each_after_their_transfer(tmp_path: Path) -> None:
    tensors = [torch.randn(5000) for _ in range(4)]
    calls: list[str] = []
    with DiskOffloader(tmp_path, n_entries=2) as offloader:
        offloader.async_writev(tensors, lambda: calls.append("written"))
        offloader.sync_write_events()
        assert calls == ["written"]
        for index, tensor in enumerate(tensors):
            offloader.async_read(tensor, lambda index=index: calls.append(f"read {index}"))
        offloader.sync_read_events()
        assert calls == ["written", "read 0", "read 1", "read 2", "read 3"]


def test_vector_is_one_transfer_with_one_callback(tmp_path: Path) -> None:
    tensors = [torch.randn(5000) for _ in range(3)]
    calls: list[bool] = []
    with DiskOffloader(tmp_path) as offloader:
        offloader.async_writev(tensors, lambda: calls.append(True))
        assert calls == []
        offloader.async_read(tensors[2])  # waits for the transfer that it is a part of
        assert [offloader.place(tensor) for tensor in tensors] == [Place.DISK] * 2 + [Place.READING]
        offloader.synchronize()
        assert calls == [True]


def test_vector_callback_of_no_tensors_is_called_at_once(tmp_path: Path) -> None:
    calls: list[str] = []
    offloader = DiskOffloader(tmp_path)
    offloader.async_writev([], lambda: calls.append("written"))
    offloader.async_readv([], lambda: calls.append("read"))
    offloader.async_writev([])
    assert calls == ["written", "read"]
    offloader.close()
    with pytest.raises(StateError, match="closed"):
        offloader.async_writev([])


def test_entries_bound_the_transfers_under_way(tmp_path: Path) -> None:
    tensors = [torch.randn(100) for _ in range(5)]
    with DiskOffloader(tmp_path, n_entries=2) as offloader:
        for tensor in tensors:
            offloader.async_write(tensor)
        assert [offloader.place(tensor) for tensor in tensors] == [Place.DISK] * 3 + [Place.WRITING] * 2


def test_disk_space_of_dead_tensors_is_used_again(tmp_path: Path) -> None:
    with DiskOffloader(tmp_path) as offloader:
        for _ in range(40):  # 20 MB together
            tensor = torch.zeros(500_000, dtype=torch.uint8)
            offloader.sync_write(tensor)
            del tensor
        assert offloader.disk_bytes == 16 * 2**20


def test_wrong_order_is_refused(tmp_path: Path) -> None:
    tensor = torch.randn(10)
    offloader = DiskOffloader(tmp_path)
    with pytest.raises(StateError, match="not on disk"):
        offloader.async_read(tensor)
    offloader.sync_write(tensor)
    with pytest.raises(StateError, match="on disk already"):
        offloader.async_write(tensor)
    offloader.sync_read(tensor)
    offloader.close()
    offloader.close()
    with pytest.raises(StateError, match="closed"):
        offloader.async_write(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(10)[:5],
        torch.from_numpy(numpy.zeros(4)),
        torch.zeros(3, device="meta"),
        torch.zeros(3).to_sparse(),
    ],
    ids=["part", "numpy", "meta", "sparse"],
)
def test_tensor_that_does_not_own_its_memory_is_refused(tensor: torch.Tensor, tmp_path: Path) -> None:
    with DiskOffloader(tmp_path) as offloader, pytest.raises(ConfigError):
        offloader.async_write(tensor)


def test_arguments_are_checked(tmp_path: Path) -> None:
    for arguments in ({"backend": "libaio"}, {"n_entries": 0}):
        with pytest.raises(ConfigError, match=next(iter(arguments))):
            DiskOffloader(tmp_path, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="missing"):
        DiskOffloader(tmp_path / "missing")


class BadFile:
    """Fails every wait."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def write(self, *request: int) -> int:
        return int(self.file.write(*request))

    def read(self, *request: int) -> int:
        return int(self.file.read(*request))

    def wait(self, ticket: int) -> None:
        self.file.wait(ticket)
        raise IoError(errno.EIO, "broken")


def extent_of(offloader: DiskOffloader, tensor: torch.Tensor) -> Extent:
    file = offloader._file
    assert isinstance(file, ExtentFile)
    stored: StoredExtents = file._stored[tensor]
    return stored.extent


def break_disk(offloader: DiskOffloader, tensor: torch.Tensor) -> None:
    extent = extent_of(offloader, tensor)
    object.__setattr__(extent, "file", BadFile(extent.file))


def test_failed_transfer_leaves_the_bytes_where_they_were(tmp_path: Path) -> None:
    tensor, other = torch.randn(100), torch.randn(50)
    want, want_other = tensor.clone(), other.clone()
    offloader = DiskOffloader(tmp_path)
    offloader.sync_write(tensor)
    good = extent_of(offloader, tensor).file
    break_disk(offloader, tensor)
    offloader.async_read(tensor)
    offloader.async_write(other)
    with pytest.raises(IoError, match="broken"):
        offloader.synchronize()
    assert offloader.place(tensor) is Place.DISK
    assert offloader.place(other) is Place.DISK  # waited for in spite of the first failure
    object.__setattr__(extent_of(offloader, tensor), "file", good)
    offloader.async_readv([tensor, other])
    offloader.synchronize()
    assert torch.equal(tensor, want)
    assert torch.equal(other, want_other)
    break_disk(offloader, tensor)
    with pytest.raises(IoError, match="broken"):
        offloader.sync_write(tensor)
    assert offloader.place(tensor) is Place.MEMORY
    assert torch.equal(tensor, want)


def test_nothing_is_left_in_the_directory(tmp_path: Path) -> None:
    with DiskOffloader(tmp_path) as offloader:
        offloader.sync_write(torch.randn(100))
        assert list(tmp_path.iterdir()) == []


def test_forked_child_gets_an_error_and_exits_cleanly(tmp_path: Path) -> None:
    tensor = torch.randn(100)
    want = tensor.clone()
    offloader = DiskOffloader(tmp_path)
    offloader.sync_write(tensor)
    child = os.fork()
    if child == 0:
        try:
            offloader.async_read(tensor)
        except StateError:
            offloader.close()
            del offloader
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    offloader.sync_read(tensor)
    assert torch.equal(tensor, want)


def test_extents_never_overlap_and_merge_when_freed(tmp_path: Path) -> None:
    choose = random.Random(1)
    space = DiskSpace([str(tmp_path)])
    held = []
    for _ in range(300):
        if held and choose.random() < 0.5:
            space.free(held.pop(choose.randrange(len(held))))
        else:
            held.append(space.allocate(choose.randrange(1, 300_000)))
        ranges = sorted((id(e.file), e.offset, e.offset + e.nbytes) for e in held)
        for one, two in itertools.pairwise(ranges):
            assert one[0] != two[0] or one[2] <= two[1]
    for extent in held:
        space.free(extent)
    before = space.reserved_bytes
    space.allocate(16 * 2**20)  # the first file is whole again
    assert space.reserved_bytes == before
    space.close()


def test_full_disk_gets_only_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class SmallDisk(AsyncFile):
        def __init__(self, directory: list[str], nbytes: int, **options: Any) -> None:
            asked.append(nbytes)
            if nbytes > 2**20:
                raise IoError(errno.ENOSPC, "full")
            super().__init__(directory, nbytes, **options)

    monkeypatch.setattr("gemini.offload.disk_space.AsyncFile", SmallDisk)
    space = DiskSpace([str(tmp_path)])
    assert space.allocate(5000).nbytes == 8192
    with pytest.raises(IoError, match="full"):
        space.allocate(2**21)
    assert space.reserved_bytes == 8192
    assert asked == [16 * 2**20, 8192, 16 * 2**20, 2**21]


def test_async_file_moves_bytes(tmp_path: Path) -> None:
    data, back = torch.arange(4096, dtype=torch.uint8), torch.zeros(4096, dtype=torch.uint8)
    with AsyncFile(tmp_path, 10_000, direct=False) as file:
        assert file.size == 12288
        file.wait(file.write(data.data_ptr(), 4096, 4096))
        ticket = file.read(back.data_ptr(), 4096, 4096)
        file.wait(ticket)
        assert file.done(ticket)
        file.wait_all()
    assert torch.equal(back, data)
    with pytest.raises(StateError):
        file.read(back.data_ptr(), 4096, 0)


def test_async_file_checks_its_arguments(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="positive"):
        AsyncFile(tmp_path, 0)
    with pytest.raises(ConfigError, match="does not exist; create it or name another"):
        AsyncFile(tmp_path / "missing", 4096)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file; name a directory"):
        AsyncFile(tmp_path / "file", 4096)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no procfs here")
def test_a_directory_that_takes_no_files_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"'/proc'.*; name another|not writable; .* name another"):
        AsyncFile("/proc", 4096)
