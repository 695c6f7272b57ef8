"""Case ``remap``: the host's time to put other memory under windows, beside an idle and a busy device.

CUDA does not say which of the calls behind it wait for work under way; the thread that trains makes them.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import torch

from gemini.chunk import TierBudgets
from gemini.chunk.chunk import whole_blocks
from gemini.system.config import format_bytes
from gemini_bench.gpu_device import BenchDevice, open_bench_device
from gemini_bench.paired import Spread, spread_row
from gemini_bench.record import Row
from gemini_bench.session import TIMING_SAMPLE_SECONDS, CaseResult, Session

IDLE, BUSY = "device idle", "beside operators and copies"
_MIB = 2**20


@dataclass(frozen=True)
class Settings:
    """In a turn ``windows`` of ``window_bytes`` get other memory. Beside them ``copies`` of as many bytes go
    to HOST, and ``operators`` go over ``operand_numel`` fp32 elements each."""

    window_bytes: int = 64 * _MIB
    windows: int = 16
    copies: int = 16
    operators: int = 200
    operand_numel: int = 2**26
    repeats: int = 9


QUICK = Settings(2 * _MIB, 2, 2, 3, 2**16, 3)


def run(session: Session, device: str) -> CaseResult:
    """Time turns beside an idle and a busy device alternately, in one process."""
    settings = dataclasses.asdict(QUICK if session.quick else Settings())
    session.progress("remap: other memory under windows, beside an idle and a busy device")
    options = {**settings, "device": device}
    found = session.run("gpu_remap.measure", options, sample_seconds=TIMING_SAMPLE_SECONDS).data()
    return CaseResult(rows(found, settings["window_bytes"]), settings, found)


def rows(found: dict[str, Any], window_bytes: int) -> list[Row]:
    """Return microseconds per window beside each, and the ratio of the busy device to the idle one."""
    what = f"window of {format_bytes(window_bytes)}"
    table = [
        spread_row(f"{what}, {name}", Spread.of([1e6 * each for each in found[name]]), "us") for name in found
    ]
    ratios = Spread.of([busy / idle for idle, busy in zip(found[IDLE], found[BUSY], strict=True)])
    return [*table, spread_row(f"{what}: busy / idle", ratios, "x")]


def measure(options: dict[str, Any]) -> dict[str, list[float]]:
    """Return seconds of the host per window, turn by turn."""
    device = open_bench_device(options["device"])
    settings = Settings(**{name: value for name, value in options.items() if name != "device"})
    windows = _Windows(device, settings)
    try:
        windows.turn(busy=True)
        found: dict[str, list[float]] = {IDLE: [], BUSY: []}
        for _ in range(settings.repeats):
            for name, seconds in found.items():
                seconds.append(windows.turn(busy=name == BUSY))
    finally:
        windows.close()
    return found


class _Windows:
    """Twice as many blocks as windows that are timed. Holders show them too, and have in turns the half that
    the timed ones had before: so these get the other half, which nobody uses."""

    def __init__(self, device: BenchDevice, settings: Settings) -> None:
        nbytes, count = settings.window_bytes, settings.windows
        each = whole_blocks(nbytes, device.compute.block_bytes)
        blocks = 2 * count + settings.copies
        self._memory = device.compute.open(
            [nbytes] * (blocks + count), TierBudgets(blocks * each, settings.copies * each), None
        )
        self._device, self._settings, self._holds_second = device, settings, False
        self._operand = torch.ones(settings.operand_numel, device=device.compute.torch_device)
        self._timed = [self._memory.windows(nbytes) for _ in range(count)]
        self._holders = [self._memory.windows(nbytes) for _ in range(2 * count)]
        self._copied = [self._memory.windows(nbytes) for _ in range(settings.copies)]
        for window, _place in self._copied:
            self._memory.map(window, zero=False)
        for window, _place in self._holders:
            self._memory.map(window, zero=False)
        self._give_back(self._holders)

    def turn(self, *, busy: bool) -> float:
        """Put other memory under the timed windows; return the host's seconds per window."""
        memory, count = self._memory, len(self._timed)
        held = self._holders[count:] if self._holds_second else self._holders[:count]
        self._holds_second = not self._holds_second
        for window, _place in held:
            memory.map(window, zero=False)
        self._device.compute.synchronize()
        if busy:
            for window, place in self._copied:
                memory.evict(place, window, self._settings.window_bytes)
            for _ in range(self._settings.operators):
                self._operand.mul_(1.0)
        began = time.perf_counter()
        for window, _place in self._timed:
            memory.map(window, zero=False)
        seconds = time.perf_counter() - began
        while memory.num_in_flight:
            memory.wait_any(1.0)
            memory.poll()
        self._device.compute.synchronize()
        for _window, place in self._copied if busy else ():
            memory.unmap_host(place)
        self._give_back([*held, *self._timed])
        return seconds / count

    def close(self) -> None:
        """Release everything."""
        self._memory.close([*self._timed, *self._holders, *self._copied], [])

    def _give_back(self, windows: list[Any]) -> None:
        for window, _place in windows:
            self._memory.unmap(window, park=True)


TASKS = {"measure": measure}
