"""Case ``copies``: chunks copied by the runtime's engine, against torch copying page-locked memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gemini.chunk import TierBudgets
from gemini.chunk.chunk import whole_blocks
from gemini.chunk.memory import AnyMemory
from gemini.errors import StateError
from gemini.system.config import format_bytes
from gemini_bench.gpu_device import BenchDevice, CopyJob, open_bench_device
from gemini_bench.paired import Contender, Timings, run_paired, spread_row
from gemini_bench.record import Row
from gemini_bench.session import TIMING_SAMPLE_SECONDS, CaseResult, Session

SHARE = {"h2d": 0.95, "d2h": 0.95, "both ways": 0.90}
OURS, TORCH = "ours", "torch, page-locked"
_MIB = 2**20
_UP, _DOWN = 0, 1  # streams
_WAIT_SECONDS = 1.0
_PATTERNS = 251  # values of a byte that chunks are told apart by


@dataclass(frozen=True)
class Settings:
    """``total_bytes``: the bytes that a turn copies in each direction, chunk by chunk."""

    chunk_bytes: tuple[int, ...] = (32 * _MIB, 64 * _MIB)
    total_bytes: int = 1024 * _MIB
    repeats: int = 15


QUICK = Settings((2 * _MIB, 4 * _MIB), 8 * _MIB, 2)


def run(session: Session, device: str) -> CaseResult:
    """Time every size and direction in one process, ours and torch's in alternating turns."""
    settings = dataclasses.asdict(QUICK if session.quick else Settings())
    session.progress("copies: between HOST and DEVICE, in alternating turns")
    options = {**settings, "device": device}
    found = session.run("gpu_copies.measure", options, sample_seconds=TIMING_SAMPLE_SECONDS).data()
    return CaseResult(rows(found), settings, found)


def rows(found: dict[str, Any]) -> list[Row]:
    """Return the rates of both and the share of torch's, turn by turn, per size and direction."""
    table: list[Row] = []
    for nbytes, ways in found.items():
        for way, timings in ways.items():
            what, times = f"{format_bytes(int(nbytes))} chunks, {way}", Timings(timings)
            for name in (TORCH, OURS):
                table.append(spread_row(f"{what}: {name}", times.rate(name), "GB/s"))
            share = times.share(OURS, TORCH)
            table.append(spread_row(f"{what}: share of torch's", share, "share", SHARE[way], at_least=True))
    return table


def measure(options: dict[str, Any]) -> dict[str, Any]:
    """Return the times by chunk size and direction.

    Raises:
        StateError: a chunk came back as it was not.
    """
    device = open_bench_device(options["device"])
    return {str(nbytes): _measure_size(device, nbytes, options) for nbytes in options["chunk_bytes"]}


def _measure_size(device: BenchDevice, nbytes: int, options: dict[str, Any]) -> dict[str, Any]:
    count = options["total_bytes"] // nbytes
    room = 2 * count * whole_blocks(nbytes, device.compute.block_bytes)
    memory = device.compute.open([nbytes] * (2 * count), TierBudgets(room, room), None)
    first, second = (_Chunks(memory, nbytes, count) for _ in range(2))
    try:
        pairs = zip(_ours(first, second), bare(device, nbytes, count), strict=True)
        found = {
            way: run_paired(contenders, options["repeats"], timed=device.seconds)
            for way, contenders in zip(SHARE, pairs, strict=True)
        }
        for chunks in (first, second):
            chunks.require_intact()
    finally:
        memory.close([*first.places, *second.places], [])
    return found


# -- torch ---------------------------------------------------------------------------------------


def bare(device: BenchDevice, nbytes: int, count: int) -> list[Contender]:
    """Return torch's copies of ``count`` times ``nbytes``: to the device, to the host, both at once."""
    on_device = [
        torch.zeros((count, nbytes), dtype=torch.uint8, device=device.compute.torch_device) for _ in range(2)
    ]
    on_host = [device.host_bytes(count * nbytes).view(count, nbytes).zero_() for _ in range(2)]
    up: list[CopyJob] = [(_UP, on_device[0][i], on_host[0][i]) for i in range(count)]
    down: list[CopyJob] = [(_DOWN, on_host[1][i], on_device[1][i]) for i in range(count)]
    both = [job for pair in zip(up, down, strict=True) for job in pair]
    total = count * nbytes
    return [
        Contender(TORCH, lambda: device.copy(up), total),
        Contender(TORCH, lambda: device.copy(down), total),
        Contender(TORCH, lambda: device.copy(both), 2 * total),
    ]


def bare_rates(device: BenchDevice, nbytes: int, total_bytes: int, repeats: int) -> dict[str, float]:
    """Return the bytes per second of torch's copies, by direction; medians."""
    contenders = bare(device, nbytes, total_bytes // nbytes)
    found = {}
    for way, contender in zip(SHARE, contenders, strict=True):
        times = Timings(run_paired([contender], repeats, timed=device.seconds))
        found[way] = 1e9 * times.rate(TORCH).median
    return found


# -- ours ----------------------------------------------------------------------------------------


def _ours(first: _Chunks, second: _Chunks) -> list[Contender]:
    """Return our copies of all chunks of one: to the device, to the host; of both, each its way."""

    def both_ways() -> None:
        first.leave(to_device=False)
        second.leave(to_device=True)
        for index in range(len(first.places)):
            second.start(index)
            first.start(index)
        first.settle()

    def one_way(*, to_device: bool) -> Callable[[], None]:
        return lambda: first.move(to_device=to_device)

    def standing(*, on_device: bool) -> Callable[[], None]:
        def prepare() -> None:
            first.stand(on_device=on_device)
            second.stand(on_device=False)

        return prepare

    total = first.nbytes * len(first.places)
    return [
        Contender(OURS, one_way(to_device=True), total, prepare=standing(on_device=False)),
        Contender(OURS, one_way(to_device=False), total, prepare=standing(on_device=True)),
        Contender(OURS, both_ways, 2 * total, prepare=standing(on_device=True)),
    ]


class _Chunks:
    """Chunks of one size, all on DEVICE or all on HOST, told apart by their bytes."""

    def __init__(self, memory: AnyMemory, nbytes: int, count: int) -> None:
        self.nbytes = nbytes
        self.places = [memory.windows(nbytes) for _ in range(count)]
        self._memory = memory
        self._on_device = True
        self._left = False  # whether memory of where they came from is still to be given back
        for window, _place in self.places:
            memory.map(window, zero=False)
        for index, tensor in enumerate(self._tensors()):
            tensor.fill_(index % _PATTERNS)

    def leave(self, *, to_device: bool) -> None:
        """Set the destination of the copies to start."""
        self._on_device, self._left = to_device, True

    def start(self, index: int) -> None:
        """Start to copy one chunk to the destination of :meth:`leave`."""
        window, place = self.places[index]
        if self._on_device:
            self._memory.fetch(window, place, self.nbytes)
        else:
            self._memory.evict(place, window, self.nbytes)

    def settle(self) -> None:
        """Have operators wait for all copies that were started."""
        while self._memory.num_in_flight:
            self._memory.wait_any(_WAIT_SECONDS)
            self._memory.poll()

    def move(self, *, to_device: bool) -> None:
        """Copy all chunks; have operators wait for it."""
        self.leave(to_device=to_device)
        for index in range(len(self.places)):
            self.start(index)
        self.settle()

    def stand(self, *, on_device: bool) -> None:
        """Have all chunks on one side, and no memory on the other."""
        self._give_back()
        if self._on_device != on_device:
            self.move(to_device=on_device)
            self._give_back()

    def require_intact(self) -> None:
        """Raise StateError if a byte differs from its first value."""
        self.stand(on_device=True)
        for index, tensor in enumerate(self._tensors()):
            if not bool((tensor == index % _PATTERNS).all()):
                raise StateError(f"chunk {index} of {self.nbytes} bytes lost what it held on its way")

    def _give_back(self) -> None:
        if not self._left:
            return
        self._left = False
        for window, place in self.places:
            if self._on_device:
                self._memory.unmap_host(place)
            else:
                self._memory.unmap(window, park=True)

    def _tensors(self) -> list[Tensor]:
        return [self._memory.tensor(window, torch.uint8, self.nbytes) for window, _place in self.places]


TASKS = {"measure": measure}
