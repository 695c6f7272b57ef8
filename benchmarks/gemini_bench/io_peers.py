"""The file I/O of other libraries as contenders: DeepSpeed's and TensorNVMe's."""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gemini.errors import StateError
from gemini_bench.io_own import page_aligned
from gemini_bench.io_settings import Settings, pieces
from gemini_bench.io_turns import Mover

DEEPSPEED = "DeepSpeed aio"
TENSORNVME = "TensorNVMe"
_INSTALL = {
    DEEPSPEED: "is not installed: pip install deepspeed, apt-get install libaio-dev",
    TENSORNVME: "is not installed: pip install tensornvme",
}


def silent_deepspeed() -> Any:
    """Import DeepSpeed without what it logs on the way. Raises ImportError."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    module = importlib.import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return module


def reason(name: str, error: Exception) -> str:
    """Say in a few words why a peer is not here."""
    if isinstance(error, ModuleNotFoundError) and error.name in ("deepspeed", "tensornvme"):
        return _INSTALL[name]
    return f"does not work here: {type(error).__name__}: {' '.join(str(error).split())[:300]}"


def try_peer(name: str, make: Callable[[], Mover], absent: dict[str, str]) -> list[Mover]:
    """Return the contender in a list, or none with the reason in ``absent``."""
    try:
        return [make()]
    except (ImportError, RuntimeError, OSError, AssertionError) as error:
        absent[name] = reason(name, error)
        return []


def deepspeed_mover(path: str, settings: Settings) -> Mover:
    """Return DeepSpeed's aio_handle on an existing file: overlapped events, page-locked memory, one thread.

    A pass hands over one operation per buffer's length and waits for all. The first use compiles for minutes.

    Raises:
        ImportError: DeepSpeed is not installed.
        RuntimeError: its extension cannot be built or used here.
    """
    silent_deepspeed()
    builder = importlib.import_module("deepspeed.ops.op_builder").AsyncIOBuilder()
    handle = builder.load(verbose=False).aio_handle(
        block_size=settings.block_bytes,
        queue_depth=settings.depth,
        single_submit=False,
        overlap_events=True,
        intra_op_parallelism=1,
    )
    buffer = handle.new_cpu_locked_tensor(settings.buffer(), torch.empty(0, dtype=torch.uint8))
    buffer.fill_(1)

    def move(start: Callable[[torch.Tensor, str, int], int]) -> float:
        begin = time.perf_counter()
        count = 0
        for offset, nbytes in pieces(settings.size_bytes, buffer.numel()):
            if start(buffer[:nbytes], path, offset) != 0:
                raise StateError(f"{DEEPSPEED} refused {nbytes} bytes at {offset} of {path}")
            count += 1
        done = handle.wait()
        elapsed = time.perf_counter() - begin
        if done != count:
            raise StateError(f"{DEEPSPEED} finished {done} of {count} operations")
        return elapsed

    def verify() -> bool:
        pattern = torch.arange(buffer.numel(), dtype=torch.int32).to(torch.uint8)
        buffer.copy_(pattern)
        move(handle.async_pwrite)
        buffer.zero_()
        move(handle.async_pread)
        last = settings.size_bytes % buffer.numel() or buffer.numel()
        return torch.equal(buffer[:last], pattern[:last])

    return Mover(DEEPSPEED, lambda: move(handle.async_pwrite), lambda: move(handle.async_pread), verify)


class TensorNvmeFile:
    """TensorNVMe's offloader through the page cache, the only way it has: a write ends with fsync, and what
    the cache holds is dropped before a read.

    Its requests are whole tensors, so a tensor is one block; a buffer's worth is handed over at a time.
    """

    def __init__(self, directory: Path, settings: Settings) -> None:
        """Make the file. Raises ImportError or RuntimeError where TensorNVMe does not work."""
        offloader = importlib.import_module("tensornvme._C").Offloader
        self._path = directory / "tensornvme"
        self._offloader = offloader(os.fspath(self._path), settings.depth, "uring")
        self._settings = settings
        count = settings.buffer() // settings.block_bytes
        self._blocks = [page_aligned(settings.block_bytes) for _ in range(count)]

    def mover(self) -> Mover:
        """Return this file as a contender."""
        return Mover(TENSORNVME, self.write, self.read, self.verify)

    def write(self) -> float:
        """Write the file once and flush it; return the seconds."""
        begin = time.perf_counter()
        self._move(self._offloader.async_write)
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            elapsed = time.perf_counter() - begin
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
        return elapsed

    def read(self) -> float:
        """Read the file once, which also gives its space up for the next write; return the seconds."""
        begin = time.perf_counter()
        self._move(self._offloader.async_read)
        return time.perf_counter() - begin

    def verify(self) -> bool:
        """Write numbers, read them, and compare."""
        for number, block in enumerate(self._blocks):
            block.fill_(number % 251)
        self.write()
        for block in self._blocks:
            block.fill_(255)
        self.read()
        count = min(len(self._blocks), self._settings.size_bytes // self._settings.block_bytes)
        return all(bool((block == n % 251).all()) for n, block in enumerate(self._blocks[:count]))

    def _move(self, start: Callable[[torch.Tensor, str], None]) -> None:
        for number in range(self._settings.size_bytes // self._settings.block_bytes):
            start(self._blocks[number % len(self._blocks)], str(number))
            if (number + 1) % len(self._blocks) == 0:
                # sync_read_events of this library waits for writes only.
                self._offloader.synchronize()
        self._offloader.synchronize()
