"""Files written through staging: the same bytes as written at once."""

from __future__ import annotations

import _thread
import errno
import itertools
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from num_examples import num_examples

from gemini.checkpoint.sealed_file import BLOCK_BYTES, Seal, SealedFile, Staging, crc32c, sealed
from gemini.errors import CheckpointError, IoError
from gemini.offload.async_file import direct_memory

MIB = 2**20


def content(num_bytes: int, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(num_bytes)


@contextmanager
def files(directory: Path, count: int) -> Iterator[list[SealedFile]]:
    with closing(Staging()) as staging:
        made = [SealedFile(directory / str(number), staging) for number in range(count)]
        try:
            yield made
        finally:
            for file in made:
                file.close()


def write_all(file: SealedFile, data: bytes) -> None:
    file.write(data, 0)
    file.finish()


def cuts(size: int, chance: random.Random) -> list[tuple[int, int]]:
    """Divide a file into runs, some of them of a few bytes, some at block boundaries."""
    marks = {0, size}
    for _ in range(chance.randint(0, 30)):
        at = chance.randint(0, size)
        marks.add(chance.choice([at, at // 4096 * 4096, min(size, at // 4096 * 4096 + chance.randint(0, 3))]))
    edges = sorted(marks)
    return list(itertools.pairwise(edges))


def aligned(num_bytes: int, seed: int) -> memoryview:
    """Return ``content`` in memory that starts on a page."""
    memory = direct_memory(max(num_bytes, 1)).numpy()[:num_bytes]
    memory[:] = np.frombuffer(content(num_bytes, seed), np.uint8)
    return memory.data


@settings(max_examples=num_examples(40))
@given(sizes=st.lists(st.integers(1, 9 * MIB), min_size=1, max_size=7), seed=st.integers(0, 2**16))
def test_any_runs_in_any_order_of_any_files_are_written(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seed: int
) -> None:
    directory, chance = tmp_path_factory.mktemp("staged"), random.Random(seed)
    wanted = [aligned(size, seed + number) for number, size in enumerate(sizes)]
    lent = chance.choice([0.0, 0.5, 1.0])
    runs = [(number, *run) for number, size in enumerate(sizes) for run in cuts(size, chance)]
    if chance.random() < 0.5:
        chance.shuffle(runs)
    with files(directory, len(sizes)) as made:
        for number, start, stop in runs:
            write = made[number].lend if chance.random() < lent else made[number].write
            write(wanted[number][start:stop], start)
        for file in made:
            file.settle()
        seals = [sealed(file.path, file.finish()) for file in made]
    for number, data in enumerate(wanted):
        path = directory / str(number)
        assert path.read_bytes() == data
        blocks = [crc32c(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)]
        assert seals[number] == Seal(len(data), blocks)
        path.unlink()


def test_bytes_that_nobody_wrote_are_found(tmp_path: Path) -> None:
    with files(tmp_path, 1) as (file,):
        file.write(b"a" * 100, 0)
        file.write(b"c" * 100, 5000)
        with pytest.raises(CheckpointError, match="first 100 bytes come those from 5000"):
            sealed(file.path, file.finish())


def test_bytes_that_were_written_twice_are_found(tmp_path: Path) -> None:
    with files(tmp_path, 1) as (file,):
        file.write(b"a" * 100, 0)
        file.write(b"b" * 100, 50)
        with pytest.raises(CheckpointError, match="not each byte was written once"):
            sealed(file.path, file.finish())


class SlowDisk:
    """Writes take their time; says which are under way, and from which memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failing: int = -1) -> None:
        self._running: list[int] = []
        self.addresses: list[int] = []
        self._really, self._failing = os.pwrite, failing
        monkeypatch.setattr(os, "pwrite", self.pwrite)

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        address = np.frombuffer(data, np.uint8).ctypes.data
        self._running.append(address)
        self.addresses.append(address)
        time.sleep(0.05)
        self._running.remove(address)
        if offset == self._failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self._really(descriptor, data, offset)

    def writes_from(self, data: memoryview) -> bool:
        """Whether a write from this memory is under way; staging may be written long after it was lent."""
        start = np.frombuffer(data, np.uint8).ctypes.data
        return any(start <= address < start + data.nbytes for address in self._running)


def test_what_lies_as_in_the_file_is_written_from_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = aligned(20 * MIB + 700, 4)
    start = np.frombuffer(data, np.uint8).ctypes.data
    disk = SlowDisk(monkeypatch)
    with files(tmp_path, 1) as (file,):
        file.lend(data[:512], 0)
        file.lend(data[512:], 512)
        file.settle()
        assert not disk.writes_from(data)
        file.finish()
    assert (tmp_path / "0").read_bytes() == data
    assert {start + at * MIB for at in (4, 8, 12, 16)} <= set(disk.addresses)


def test_a_failed_write_of_lent_memory_is_told_after_all_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = aligned(20 * MIB, 5)
    disk = SlowDisk(monkeypatch, failing=4 * MIB)
    with files(tmp_path, 1) as (file,):
        file.lend(data, 0)
        with pytest.raises(IoError) as caught:
            file.settle()
        assert not disk.writes_from(data)
    assert (caught.value.errno, caught.value.offset) == (errno.EIO, 4 * MIB)


def test_ctrl_c_waits_until_lent_memory_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = aligned(24 * MIB, 6)
    disk = SlowDisk(monkeypatch)
    with files(tmp_path, 1) as (file,):
        file.lend(data, 0)
        threading.Timer(0.03, _thread.interrupt_main).start()
        with pytest.raises(KeyboardInterrupt):
            file.settle()
        assert not disk.writes_from(data)
        assert len(disk.addresses) == 6
        file.finish()
    assert (tmp_path / "0").read_bytes() == data


@pytest.mark.parametrize("refusal", ["open", "write"])
@pytest.mark.parametrize("way", ["write", "lend"])
def test_where_there_is_no_direct_writing_the_page_cache_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: str, way: str
) -> None:
    really_open, really_pwrite, refused = os.open, os.pwrite, set()

    def opened(path: str, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT and refusal == "open":
            raise OSError(errno.EINVAL, "no O_DIRECT")
        descriptor = really_open(path, flags, *mode)
        if flags & os.O_DIRECT:
            refused.add(descriptor)
        return descriptor

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        if descriptor in refused:
            raise OSError(errno.EINVAL, "not aligned as this file system wants it")
        return really_pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "pwrite", pwrite)
    data = aligned(5 * MIB + 17, 1)
    with files(tmp_path, 1) as (file,):
        getattr(file, way)(data, 0)
        file.settle()
        file.finish()
    assert (tmp_path / "0").read_bytes() == data


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: really(fd, data[: max(1, len(data) // 2)], at))
    data = content(3 * MIB + 5, 2)
    with files(tmp_path, 1) as (file,):
        write_all(file, data)
    assert (tmp_path / "0").read_bytes() == data


def test_a_failed_write_says_where_and_the_staging_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = os.pwrite

    def full(descriptor: int, data: memoryview, offset: int) -> int:
        if offset == 8 * MIB:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return really(descriptor, data, offset)

    data = content(30 * MIB, 3)
    with files(tmp_path, 2) as (first, second):
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(IoError) as caught:
            write_all(first, data)
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.filename == str(tmp_path / "0")
        assert caught.value.offset == 8 * MIB
        monkeypatch.undo()
        first.close()
        write_all(second, data)
    assert (tmp_path / "1").read_bytes() == data


@pytest.mark.parametrize(
    ("call", "doing"), [("open", "create"), ("pwrite", "write"), ("fsync", "sync")], ids=lambda text: text
)
@pytest.mark.parametrize("staged", [False, True])
def test_an_error_without_a_number_is_one_of_input_and_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, doing: str, staged: bool
) -> None:
    def nameless(*_arguments: object) -> int:
        raise OSError("the link is down")

    with closing(Staging()) as staging:
        monkeypatch.setattr(os, call, nameless)
        with pytest.raises(IoError, match=f"cannot {doing} the checkpoint: the link is down") as caught:
            write_all(SealedFile(tmp_path / "0", staging if staged else None), b"a" * 100)
        monkeypatch.undo()
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(tmp_path / "0"))
