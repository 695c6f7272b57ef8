"""Real file systems that are full, limited, read-only or gone, under both backends."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from disk_space import disk_space
from fault_training import file_size_limit

from gemini import _C
from gemini.chunk import ChunkManager, TierBudgets
from gemini.chunk.chunk import ChunkKind, ChunkSpec
from gemini.errors import ConfigError, GeminiError, IoError
from gemini.offload import AsyncFile
from gemini.system.config import format_bytes

MIB = 2**20
PIECE = 256 * 1024
CHUNK = ChunkSpec(ChunkKind.PARAM, MIB // 4, torch.float32)

backends = pytest.mark.parametrize(
    "backend",
    [
        "threads",
        pytest.param("uring", marks=pytest.mark.skipif(bool(_C.uring_refusal()), reason=_C.uring_refusal())),
    ],
)


def mounted(where: Path, kind: str, options: str) -> Iterator[Path]:
    """Mount a file system in memory until the generator is closed."""
    where.mkdir()
    command = ["mount", "-t", kind, "-o", options, kind, str(where)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip(f"needs the right to mount a {kind}")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a file system of 8 MiB."""
    yield from mounted(tmp_path / "small", "tmpfs", "size=8m,mode=0700")


@pytest.fixture
def keeping_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a file system that gives no part of a file back and does not say how large it is."""
    yield from mounted(tmp_path / "keeping", "ramfs", "mode=0700")


def filled(nbytes: int, value: int) -> torch.Tensor:
    """Return bytes at an address that O_DIRECT takes."""
    raw = torch.empty(nbytes + 4096, dtype=torch.uint8)
    skip = -raw.data_ptr() % 4096
    return raw[skip : skip + nbytes].fill_(value)


def sparse(directory: Path, backend: str, nbytes: int = 64 * MIB) -> AsyncFile:
    """Return a file that takes disk space only where it is written."""
    return AsyncFile(directory, nbytes, backend=backend, reserve=False, request_bytes=PIECE)  # type: ignore[arg-type]


@backends
def test_a_disk_that_becomes_full_keeps_what_it_has(small_disk: Path, backend: str) -> None:
    with sparse(small_disk, backend) as file:
        kept, more, back = filled(4 * MIB, 7), filled(16 * MIB, 8), filled(4 * MIB, 0)
        file.wait(file.write(kept.data_ptr(), 4 * MIB, 0))
        with pytest.raises(IoError, match="No space left") as caught:
            file.wait(file.write(more.data_ptr(), 16 * MIB, 8 * MIB))
        assert caught.value.errno == errno.ENOSPC
        assert 8 * MIB <= caught.value.offset < 24 * MIB
        assert str(small_disk) in str(caught.value)
        file.wait_all()  # what failed was reported
        file.wait(file.read(back.data_ptr(), 4 * MIB, 0))
        assert torch.equal(back, kept)
        file.discard(8 * MIB, 16 * MIB)  # space is freed: everything goes on
        file.wait(file.write(more.data_ptr(), 3 * MIB, 32 * MIB))
        file.wait(file.read(back.data_ptr(), 3 * MIB, 32 * MIB))
        assert torch.equal(back[: 3 * MIB], more[: 3 * MIB])


@backends
def test_space_that_cannot_be_reserved_is_refused_at_once(small_disk: Path, backend: str) -> None:
    with pytest.raises(IoError, match="No space left"):
        AsyncFile(small_disk, 64 * MIB, backend=backend)  # type: ignore[arg-type]
    assert list(small_disk.iterdir()) == []
    with AsyncFile(small_disk, 4 * MIB, backend=backend) as file:  # type: ignore[arg-type]
        assert file.size == 4 * MIB


@backends
def test_a_file_size_limit_is_an_error_not_a_death(tmp_path: Path, backend: str) -> None:
    data = filled(4 * MIB, 3)
    with sparse(tmp_path, backend) as file:
        with file_size_limit(1 * MIB), pytest.raises(IoError) as caught:
            file.wait(file.write(data.data_ptr(), 4 * MIB, 4 * MIB))
        assert caught.value.errno == errno.EFBIG
        file.wait(file.write(data.data_ptr(), 4 * MIB, 4 * MIB))


@backends
def test_a_read_only_file_system_is_refused(small_disk: Path, backend: str) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(GeminiError) as caught:
        AsyncFile(small_disk, MIB, backend=backend)  # type: ignore[arg-type]
    assert isinstance(caught.value, ConfigError) or caught.value.errno == errno.EROFS  # type: ignore[attr-defined]
    assert str(small_disk) in str(caught.value)


@backends
def test_a_directory_that_is_removed_does_not_matter(tmp_path: Path, backend: str) -> None:
    where = tmp_path / "removed"
    where.mkdir()
    data, back = filled(2 * MIB, 5), filled(2 * MIB, 0)
    with AsyncFile(where, 2 * MIB, backend=backend) as file:  # type: ignore[arg-type]
        where.rmdir()
        file.wait(file.write(data.data_ptr(), 2 * MIB, 0))
        file.wait(file.read(back.data_ptr(), 2 * MIB, 0))
    assert torch.equal(back, data)


@backends
def test_a_process_killed_while_it_writes_leaves_nothing(tmp_path: Path, backend: str) -> None:
    script = f"""
import torch
from gemini.offload import AsyncFile
file = AsyncFile({str(tmp_path)!r}, 64 * 2**20, backend={backend!r})
raw = torch.ones(8 * 2**20 + 4096, dtype=torch.uint8)
address = raw.data_ptr() + -raw.data_ptr() % 4096
tickets = [file.write(address, 8 * 2**20, number % 8 * 8 * 2**20) for number in range(1000)]
file.wait(tickets[0])
print("writing", flush=True)
file.wait_all()
"""
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "writing\n"
    child.kill()
    assert child.wait() == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


@backends
def test_a_file_system_that_gives_no_space_back_says_so(
    keeping_disk: Path, small_disk: Path, backend: str
) -> None:
    with sparse(small_disk, backend) as file:
        assert file.can_discard
    with sparse(keeping_disk, backend) as file:
        assert not file.can_discard
        with pytest.raises(IoError, match="cannot give back"):
            file.discard(0, PIECE)


def budgets_on(disk: Path, *, disk_bytes: int, spare: int = 0) -> TierBudgets:
    return TierBudgets(2 * CHUNK.nbytes, 0, disk_bytes, str(disk), spare)


def test_disk_is_not_exceeded_where_no_space_comes_back(keeping_disk: Path) -> None:
    with pytest.raises(ConfigError, match="cannot give back") as refused:
        ChunkManager([CHUNK] * 4, budgets_on(keeping_disk, disk_bytes=3 * CHUNK.nbytes))
    assert format_bytes(4 * CHUNK.nbytes) in str(refused.value)  # what would do
    assert disk_space(keeping_disk) == 0
    ChunkManager([CHUNK] * 4, budgets_on(keeping_disk, disk_bytes=4 * CHUNK.nbytes)).close()


def test_chunks_that_come_later_have_no_places_where_no_space_comes_back(
    keeping_disk: Path, small_disk: Path
) -> None:
    for disk, places in ((small_disk, 12), (keeping_disk, 6)):
        budgets = budgets_on(disk, disk_bytes=6 * CHUNK.nbytes, spare=8 * CHUNK.nbytes)
        manager = ChunkManager([CHUNK] * 4, budgets)
        while manager.has_place(CHUNK.nbytes):
            manager.add_chunk(CHUNK)
        assert len(manager.chunks) == places
        manager.close()


@backends
def test_a_file_takes_no_space_before_it_is_written(tmp_path: Path, backend: str) -> None:
    data = filled(PIECE, 1)
    with sparse(tmp_path, backend) as file:
        assert disk_space(tmp_path) == 0
        file.wait(file.write(data.data_ptr(), PIECE, 0))
        assert disk_space(tmp_path) >= PIECE
