"""DiskOffloader: how bytes get to disk: wherever memory starts, through little memory, checked."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from gemini.errors import ChecksumError, ConfigError, IoError, StateError
from gemini.offload import AsyncFile, DiskOffloader, extent_file, staging
from gemini.offload import extent_file as extent_file_module
from gemini.offload.disk_offloader import Place
from gemini.offload.disk_space import Extent, Holes
from gemini.offload.extent_file import DirectPart, ExtentFile, Move, StoredExtents
from gemini.offload.staging import Staging

BLOCK = 4096
LARGE = extent_file_module.DIRECT_FROM_BYTES


class Memory:
    """A storage that starts ``place`` bytes into a page, between guards."""

    device = torch.device("cpu")

    def __init__(self, place: int, content: bytes) -> None:
        self.buffer = ctypes.create_string_buffer(b"\xee" * (len(content) + 4 * BLOCK))
        base = ctypes.addressof(self.buffer)
        self.start = -base % BLOCK + BLOCK + place
        self.size = len(content)
        self.buffer[self.start : self.start + self.size] = content

    def data_ptr(self) -> int:
        return ctypes.addressof(self.buffer) + self.start

    def content(self) -> bytes:
        raw = self.buffer.raw
        assert set(raw[: self.start] + raw[self.start + self.size : -1]) <= {0xEE}, "written outside"
        return raw[self.start : self.start + self.size]


PLACES = [0, 1, 64, 2048, 4032, 4095]


@pytest.mark.parametrize("nbytes", [1, 63, 4096, 4097, 8191, 8192, 12288, 5 * BLOCK + 70])
@pytest.mark.parametrize("direct", [True, False])
def test_bytes_written_from_any_place_in_a_page_are_read_to_any_other(
    nbytes: int, direct: bool, tmp_path: Path
) -> None:
    buffer = Staging(16 * BLOCK, pinned=False)
    content = random.Random(nbytes).randbytes(nbytes)
    with AsyncFile(tmp_path, 16 * BLOCK, direct=direct, checksums=True) as file:
        for written_at in PLACES:
            stored = StoredExtents(Extent(file, BLOCK, 10 * BLOCK), nbytes, True, skew=written_at)
            source: Any = Memory(written_at, content)
            file.wait(DirectPart(Move(source, stored)).write(buffer, 0))
            assert source.content() == content
            for read_to in PLACES:
                target: Any = Memory(read_to, bytes(nbytes))
                part = DirectPart(Move(target, stored))
                assert part.staged_bytes <= 3 * BLOCK
                file.wait(part.read(buffer, 0))
                part.arrive(buffer, 0)
                assert target.content() == content, (written_at, read_to)


@pytest.fixture(params=["memory", "device"])
def _everything_staged(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat CPU tensors as GPU ones, with room for two requests at a time; once by torch's own copies."""
    monkeypatch.setattr(extent_file_module, "DIRECT_FROM_BYTES", 2**60)
    monkeypatch.setattr(extent_file, "STAGING_BYTES", 2 * extent_file_module.PART_BYTES)
    if request.param == "device":
        monkeypatch.setattr(staging, "_on_cpu", lambda storage: False)


@pytest.mark.usefixtures("_everything_staged")
def test_staged_tensors_larger_than_the_staging_memory_come_back(tmp_path: Path) -> None:
    sizes = [3, 9_000_001, 5000, 2**21, 2**21 + 1, 12_345_678, 40]
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    want = [tensor.clone() for tensor in tensors]
    calls: list[str] = []
    with DiskOffloader(tmp_path, checksums=True) as offloader:
        offloader.async_writev(tensors, lambda: calls.append("written"))
        offloader.sync_write_events()
        for tensor in reversed(tensors):
            offloader.async_read(tensor, lambda: calls.append("read"))
        offloader.synchronize()
    assert calls == ["written"] + ["read"] * len(sizes)
    assert all(torch.equal(*pair) for pair in zip(tensors, want, strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_random_vectors_of_random_sizes_come_back(seed: int, tmp_path: Path) -> None:
    choose = random.Random(seed)
    sizes = [choose.choice([0, 7, 4096, 70_000, LARGE, 300_000, 3_000_000]) for _ in range(16)]
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    want = [tensor.clone() for tensor in tensors]
    with DiskOffloader(tmp_path, n_entries=3, checksums=True) as offloader:
        for _ in range(40):
            chosen = choose.sample(tensors, choose.randrange(1, 6))
            at_home = (Place.MEMORY, Place.READING)
            offloader.async_writev([one for one in chosen if offloader.place(one) in at_home])
            back = choose.sample(tensors, choose.randrange(1, 6))
            away = (Place.DISK, Place.WRITING)
            offloader.async_readv([one for one in back if offloader.place(one) in away])
        offloader.synchronize()
        offloader.sync_readv([one for one in tensors if offloader.place(one) is Place.DISK])
    assert all(torch.equal(*pair) for pair in zip(tensors, want, strict=True))


def file_of(offloader: DiskOffloader) -> ExtentFile:
    assert isinstance(offloader._file, ExtentFile)
    return offloader._file


def num_requests(offloader: DiskOffloader, tensor: torch.Tensor) -> float:
    stored: StoredExtents = file_of(offloader)._stored[tensor]
    return stored.extent.file.stats()["requests"]


def test_small_neighbours_share_requests(tmp_path: Path) -> None:
    tensors = [torch.randn(1000) for _ in range(200)]
    want = [tensor.clone() for tensor in tensors]
    with DiskOffloader(tmp_path) as offloader:
        offloader.sync_writev(tensors)
        assert num_requests(offloader, tensors[0]) == 1
        offloader.sync_readv(tensors)
        assert num_requests(offloader, tensors[0]) == 2
        offloader.sync_writev(tensors)
        offloader.sync_readv(tensors[::2])
        offloader.sync_read(tensors[1])
        offloader.sync_readv(tensors[3::2])
    assert all(torch.equal(*pair) for pair in zip(tensors, want, strict=True))


@pytest.mark.parametrize("nbytes", [2**20, 16 * 2**20])
def test_memory_of_the_process_falls_by_what_is_offloaded(nbytes: int, tmp_path: Path) -> None:
    resident = psutil.Process().memory_info
    tensors = [torch.ones(nbytes, dtype=torch.uint8) for _ in range(2**28 // nbytes)]
    with DiskOffloader(tmp_path) as offloader:
        for _ in range(3):  # from the second round on the C library would keep what is freed
            before = resident().rss
            for tensor in tensors:
                offloader.async_write(tensor)
            offloader.sync_write_events()
            assert before - resident().rss >= 0.95 * 2**28
            for tensor in tensors:
                offloader.async_read(tensor)
            offloader.sync_read_events()
    assert all(bool((tensor == 1).all()) for tensor in tensors)


def test_memory_is_named_only_once(tmp_path: Path) -> None:
    tensor = torch.randn(30, 20)
    want = tensor.clone()
    with DiskOffloader(tmp_path) as offloader:
        for twice in ([tensor, tensor], [tensor, tensor.t()]):
            with pytest.raises(ConfigError, match="only once"):
                offloader.async_writev(twice)
        offloader.async_write(tensor)
        with pytest.raises(ConfigError, match="uses its whole storage"):
            offloader.async_write(tensor.t())  # it was waited for and is empty now
        offloader.sync_read(tensor)
    assert torch.equal(tensor, want)


def test_vector_with_a_wrong_member_starts_nothing(tmp_path: Path) -> None:
    good, bad = torch.randn(100), torch.randn(10)[:5]
    with DiskOffloader(tmp_path) as offloader:
        with pytest.raises(ConfigError):
            offloader.async_writev([good, bad])
        assert offloader.place(good) is Place.MEMORY
        offloader.sync_write(good)
        with pytest.raises(StateError, match="not on disk"):
            offloader.async_readv([good, torch.randn(3)])
        assert offloader.place(good) is Place.DISK
        assert good.untyped_storage().nbytes() == 0


def deleted_files() -> Iterator[Path]:
    for link in Path("/proc/self/fd").iterdir():
        if os.path.lexists(link) and "(deleted)" in str(link.readlink()):
            yield link


@pytest.mark.skipif(sys.platform != "linux", reason="finds the nameless file in /proc")
@pytest.mark.parametrize("numel", [3000, LARGE])
def test_a_flipped_bit_on_disk_is_found_and_nothing_else_is_lost(numel: int, tmp_path: Path) -> None:
    tensor, other = torch.randn(numel), torch.randn(numel)
    want, want_other = tensor.clone(), other.clone()
    with DiskOffloader(tmp_path, checksums=True) as offloader:
        offloader.sync_writev([tensor, other])
        (link,) = [one for one in deleted_files() if str(one.readlink()).startswith(str(tmp_path))]
        descriptor = os.open(link, os.O_RDWR)
        byte = os.pread(descriptor, 1, BLOCK)
        os.pwrite(descriptor, bytes([byte[0] ^ 4]), BLOCK)
        os.fsync(descriptor)
        with pytest.raises(ChecksumError) as caught:
            offloader.sync_readv([tensor, other])
        assert caught.value.errno == errno.EIO
        assert [offloader.place(one) for one in (tensor, other)] == [Place.DISK] * 2
        assert tensor.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
        offloader.sync_read(other)
        os.pwrite(descriptor, byte, BLOCK)
        os.fsync(descriptor)
        os.close(descriptor)
        offloader.sync_read(tensor)
    assert torch.equal(tensor, want)
    assert torch.equal(other, want_other)


def test_large_tensors_are_striped_over_directories(tmp_path: Path) -> None:
    drives = [tmp_path / "one", tmp_path / "two"]
    for drive in drives:
        drive.mkdir()
    tensor = torch.randn(3_000_000)
    want = tensor.clone()
    with DiskOffloader(drives) as offloader:
        offloader.sync_write(tensor)
        links = [str(link.readlink()) for link in deleted_files()]
        assert all(any(link.startswith(str(drive)) for link in links) for drive in drives)
        offloader.sync_read(tensor)
    assert torch.equal(tensor, want)


@pytest.mark.parametrize("backend", ["threads", "aio", "pthread", None])
def test_backends_give_the_same_bytes(backend: Any, tmp_path: Path) -> None:
    tensors = [torch.randn(numel) for numel in (5, 100_000, 1_000_001)]
    want = [tensor.clone() for tensor in tensors]
    with DiskOffloader(tmp_path, backend=backend) as offloader:
        offloader.sync_writev(tensors)
        stored: StoredExtents = file_of(offloader)._stored[tensors[0]]
        assert backend is None or stored.extent.file.backend == "threads"
        offloader.sync_readv(tensors)
    assert all(torch.equal(*pair) for pair in zip(tensors, want, strict=True))


class FakeTensorNvme:
    """As much of ``tensornvme.DiskOffloader`` as is used: bytes go when its events are waited for."""

    def __init__(self, directory: str, n_entries: int) -> None:
        self.kept: dict[int, torch.Tensor] = {}
        self.waiting: dict[str, list[Callable[[], None]]] = {"write": [], "read": []}

    def async_write(self, tensor: torch.Tensor, callback: Callable[[], None]) -> None:
        self.kept[id(tensor)] = tensor.clone()
        self.waiting["write"] += [lambda: tensor.untyped_storage().resize_(0), callback]

    def async_read(self, tensor: torch.Tensor, callback: Callable[[], None]) -> None:
        kept = self.kept.pop(id(tensor))
        self.waiting["read"] += [lambda: tensor.copy_(kept), callback]

    def finish(self, kind: str) -> None:
        waiting, self.waiting[kind] = self.waiting[kind], []
        for call in waiting:
            call()

    def sync_write_events(self) -> None:
        self.finish("write")

    def sync_read_events(self) -> None:
        self.finish("read")


def test_tensornvme_serves_the_same_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("tensornvme")
    module.DiskOffloader = FakeTensorNvme
    monkeypatch.setitem(sys.modules, "tensornvme", module)
    tensors = [torch.randn(numel) for numel in (10, 0, 5000)]
    want = [tensor.clone() for tensor in tensors]
    calls: list[str] = []
    with DiskOffloader(tmp_path, backend="tensornvme") as offloader:
        offloader.async_writev(tensors, lambda: calls.append("written"))
        offloader.sync_write_events()
        assert offloader.disk_bytes == 4 * 5010
        for tensor in tensors:
            assert offloader.place(tensor) is Place.DISK
            offloader.async_read(tensor, lambda: calls.append("read"))
        offloader.synchronize()
    assert calls == ["written", "read", "read", "read"]
    assert all(torch.equal(*pair) for pair in zip(tensors, want, strict=True))


def test_tensornvme_is_refused_where_it_cannot_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensornvme", None)
    with pytest.raises(ConfigError, match="pip install tensornvme"):
        DiskOffloader(tmp_path, backend="tensornvme")
    with pytest.raises(ConfigError, match="no checksums"):
        DiskOffloader(tmp_path, backend="tensornvme", checksums=True)
    with pytest.raises(ConfigError, match="one directory"):
        DiskOffloader([tmp_path, tmp_path], backend="tensornvme")


def test_an_offloader_that_is_dropped_ends_its_transfers_first(tmp_path: Path) -> None:
    tensor, other = torch.randn(1_000_000), torch.randn(1000)
    want = tensor.clone()
    offloader = DiskOffloader(tmp_path)
    offloader.sync_write(tensor)
    offloader.async_read(tensor)
    offloader.async_write(other)
    file = file_of(offloader)
    del offloader
    assert file.disk_bytes == 0
    assert torch.equal(tensor, want)


@pytest.mark.cuda
def test_gpu_memory_is_released_and_comes_back(tmp_path: Path) -> None:
    tensors = [torch.randn(numel, device="cuda") for numel in (0, 7, 5000, 9_000_001)]
    want = [tensor.clone() for tensor in tensors]
    with DiskOffloader(tmp_path, checksums=True) as offloader:
        offloader.sync_writev(tensors)
        assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) == 0
        for tensor in tensors:
            offloader.async_read(tensor)
        offloader.synchronize()
    assert all(torch.equal(*pair) for pair in zip(tensors, want, strict=True))


def test_holes_never_overlap_and_merge() -> None:
    choose = random.Random(3)
    holes, held = Holes(1000), []
    for _ in range(500):
        if held and choose.random() < 0.5:
            holes.give(*held.pop(choose.randrange(len(held))))
        elif (offset := holes.take(size := choose.randrange(1, 90))) is not None:
            assert all(offset + size <= at or at + length <= offset for at, length in held)
            held.append((offset, size))
    for taken in held:
        holes.give(*taken)
    assert holes.take(1000) == 0
    assert holes.take(1) is None


def test_full_disk_leaves_the_tensor_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> AsyncFile:
        raise IoError(errno.ENOSPC, "full")

    tensor = torch.randn(1000)
    want = tensor.clone()
    with DiskOffloader(tmp_path) as offloader:
        with monkeypatch.context() as patch:
            patch.setattr("gemini.offload.disk_space.AsyncFile", full)
            with pytest.raises(IoError, match="full"):
                offloader.async_write(tensor)
        assert offloader.place(tensor) is Place.MEMORY
        assert offloader.disk_bytes == 0
        assert torch.equal(tensor, want)
        offloader.sync_write(tensor)
        offloader.sync_read(tensor)
    assert torch.equal(tensor, want)
