"""Laws of the asynchronous file, as Python sees it."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest
import torch
from programs import run_python

from gemini import _C
from gemini.errors import ConfigError, IoError, StateError
from gemini.offload import AsyncFile

KIB = 2**10
MIB = 2**20


def aligned(nbytes: int, seed: int) -> torch.Tensor:
    """Return random bytes that start on a page."""
    space, arena = _C.WindowSpace(nbytes), _C.Arena(nbytes)
    window = space.create(nbytes)
    arena.map(window)
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.frombuffer(window, dtype=torch.uint8)
    return tensor.copy_(torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8))


def count_entries(directory: str) -> int:
    """Return how many open files or threads a directory of /proc lists."""
    return sum(1 for _ in Path(directory).iterdir())


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("threads", [1, 4])
def test_what_is_written_is_read(tmp_path: Path, direct: bool, threads: int) -> None:
    file = _C.AsyncFile([str(tmp_path)], 8 * MIB, depth=threads, direct=direct)
    written, read = aligned(5 * MIB, 1), aligned(5 * MIB, 2)
    file.wait(file.write(written.data_ptr(), 5 * MIB, 2 * MIB))
    ticket = file.read(read.data_ptr(), 5 * MIB, 2 * MIB)
    file.wait_all()
    assert file.done(ticket)
    assert torch.equal(written, read)
    file.close()
    file.close()
    with pytest.raises(StateError, match="closed"):
        file.read(read.data_ptr(), 4096, 0)


def test_direct_needs_alignment_and_says_so(tmp_path: Path) -> None:
    file = _C.AsyncFile([str(tmp_path)], MIB)
    if not file.direct:
        pytest.skip("the temporary directory has no O_DIRECT")
    data = aligned(64 * KIB, 1)
    for address, nbytes, offset in [(1, 4096, 0), (0, 100, 0), (0, 4096, 512)]:
        with pytest.raises(StateError, match="O_DIRECT"):
            file.write(data.data_ptr() + address, nbytes, offset)


def test_bad_requests_are_refused_with_numbers(tmp_path: Path) -> None:
    file = _C.AsyncFile([str(tmp_path)], 10_000)
    assert file.size == 12288
    data = aligned(64 * KIB, 1)
    with pytest.raises(StateError, match="12288"):
        file.read(data.data_ptr(), 4096, 12288)
    with pytest.raises(StateError, match="not issued"):
        file.wait(99)
    with pytest.raises(StateError, match="positive"):
        _C.AsyncFile([str(tmp_path)], 0)


def test_missing_directory_is_an_oserror_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(IoError) as raised:
        _C.AsyncFile([str(tmp_path / "missing")], MIB)
    assert raised.value.errno == errno.ENOENT
    assert raised.value.filename == str(tmp_path / "missing")


def test_more_than_the_disk_has_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    free_bytes = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    open_files = count_entries("/proc/self/fd")
    with pytest.raises(IoError) as raised:
        _C.AsyncFile([str(tmp_path)], free_bytes + 2**40)
    assert raised.value.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
    assert list(tmp_path.iterdir()) == []
    assert count_entries("/proc/self/fd") == open_files


def test_unmapped_window_is_an_error_of_the_request(tmp_path: Path) -> None:
    file = _C.AsyncFile([str(tmp_path)], MIB)
    space, arena = _C.WindowSpace(MIB), _C.Arena(MIB)
    window = space.create(MIB)
    with pytest.raises(IoError) as raised:
        file.wait(file.write(window.address, MIB, 0))
    assert raised.value.errno == errno.EFAULT
    assert raised.value.filename == file.path
    arena.map(window, zero=True)
    file.wait(file.write(window.address, MIB, 0))


def test_killed_process_leaves_nothing_on_the_disk(tmp_path: Path) -> None:
    script = f"""
import os
from gemini import _C
file = _C.AsyncFile([{str(tmp_path)!r}], 2**20)
print("ready", flush=True)
os.kill(os.getpid(), 9)
"""
    done = run_python(["-c", script])
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "ready\n")
    assert list(tmp_path.iterdir()) == []


def test_many_requests_grow_nothing(tmp_path: Path) -> None:
    file = _C.AsyncFile([str(tmp_path)], MIB)
    data = aligned(64 * KIB, 1)
    for _ in range(20):  # the kernel may start threads of its own for io_uring
        file.wait(file.write(data.data_ptr(), data.nbytes, 0))
    threads = count_entries("/proc/self/task")
    open_files = count_entries("/proc/self/fd")
    for _ in range(500):
        file.wait(file.write(data.data_ptr(), data.nbytes, 0))
    assert count_entries("/proc/self/task") <= threads + 2  # theirs come and go
    assert count_entries("/proc/self/fd") == open_files


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a file system in memory")
def test_a_file_system_in_memory_is_copied_to_by_a_thread_per_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GEMINI_IO_BACKEND", raising=False)
    with AsyncFile("/dev/shm", 4 * MIB, depth=1024) as file:
        assert file.backend == "threads"
        assert 1 <= file.depth <= (os.cpu_count() or 1)  # fewer where the process may not use all
        written, read = aligned(4 * MIB, 1), aligned(4 * MIB, 2)
        file.wait(file.write(written.data_ptr(), 4 * MIB, 0))
        file.wait(file.read(read.data_ptr(), 4 * MIB, 0))
        assert torch.equal(read, written)


@pytest.mark.parametrize(("nbytes", "depth"), [(0, 4), (-1, 4), (MIB, 0), (MIB, -1), (MIB, 2**20)])
def test_sizes_and_depths_that_cannot_be_are_refused_with_both_numbers(
    tmp_path: Path, nbytes: int, depth: int
) -> None:
    with pytest.raises(ConfigError, match=f"AsyncFile of {nbytes} bytes with depth {depth}: both must be"):
        AsyncFile(tmp_path, nbytes, depth=depth)
    assert list(tmp_path.iterdir()) == []
