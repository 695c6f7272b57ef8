"""Which request size and queue depth suit a drive: a short probe, once per process and drive."""

from __future__ import annotations

import time
from dataclasses import dataclass

from gemini import _C
from gemini.errors import IoError
from gemini.offload.direct_memory import direct_memory

# What a probe may take. A drive that moves little in that time keeps the default: it is slow anyway.
PROBE_SECONDS = 0.5
PROBE_BYTES = 16 * 2**20
_MIN_GAIN = 1.25  # less is noise


@dataclass(frozen=True)
class Tuning:
    """How to talk to a drive: ``depth`` requests of ``request_bytes`` at one time."""

    depth: int
    request_bytes: int


DEFAULT = Tuning(depth=8, request_bytes=2**20)
CANDIDATES = (DEFAULT, Tuning(depth=32, request_bytes=2**20), Tuning(depth=8, request_bytes=4 * 2**20))

_known: dict[tuple[int, str], Tuning] = {}


def tuned(device: int, directory: str, backend: str) -> Tuning:
    """Return what is best for the drive ``device`` (``st_dev``) that holds ``directory``.

    The first call of a process writes and reads 16 MiB of a private file with every candidate by turns, for
    half a second. The default stays unless another one is a quarter faster, and where there is no room.
    """
    key = (device, backend)
    if key not in _known:
        try:
            _known[key] = _probe(directory, backend)
        except IoError:
            return DEFAULT
    return _known[key]


def _probe(directory: str, backend: str) -> Tuning:
    memory = direct_memory(PROBE_BYTES)
    best: dict[Tuning, float] = {}
    deadline = time.perf_counter() + PROBE_SECONDS
    while time.perf_counter() < deadline:
        for candidate in CANDIDATES:
            if time.perf_counter() >= deadline and len(best) < len(CANDIDATES):
                return DEFAULT
            seconds = _time(directory, backend, candidate, memory.data_ptr())
            best[candidate] = min(seconds, best.get(candidate, seconds))
    fastest = min(CANDIDATES, key=best.__getitem__)
    return fastest if best[DEFAULT] > _MIN_GAIN * best[fastest] else DEFAULT


def _time(directory: str, backend: str, tuning: Tuning, address: int) -> float:
    """Return the seconds of one write and one read."""
    file = _C.AsyncFile(
        [directory], PROBE_BYTES, backend=backend, depth=tuning.depth, request_bytes=tuning.request_bytes
    )
    try:
        start = time.perf_counter()
        file.wait(file.write(address, PROBE_BYTES, 0))
        file.wait(file.read(address, PROBE_BYTES, 0))
        return time.perf_counter() - start
    finally:
        file.close()
