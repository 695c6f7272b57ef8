"""Monitors: measure how much memory the process takes within a period."""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path
from typing import ClassVar, Protocol

from gemini.system.threads import start_thread

_PROC_SELF = Path("/proc/self")
_STATUS_MAX_BYTES = 1 << 16  # the file is about 1.5 KiB; a long list of groups makes it longer
_SAMPLE_SECONDS = 0.001


class MemoryMonitor(Protocol):
    """Measures one memory: that of the process (CPU) or of an allocator (CUDA). One period at a time."""

    @property
    def method(self) -> str:
        """How the peak is measured, as text for people."""

    def resident_bytes(self) -> int:
        """Return the bytes in use now."""

    def start_period(self) -> None:
        """Begin a period; earlier peaks do not count."""

    def end_period(self) -> int:
        """Return the highest number of bytes in use since ``start_period``."""

    def close(self) -> None:
        """Close files and end threads. Idempotent."""


class ProcessMonitor:
    """Resident memory of this process, model data and everything else, from the kernel's own counters.

    If the kernel lets a process reset its high-water mark, the peak of a period is exact (counters of running
    threads may lag by some 100 KiB per core). Otherwise a thread samples every millisecond and can miss a
    shorter peak; ``method`` tells which is used. Pages of mapped files count. Several monitors may measure at
    once, but other readers of VmHWM or ``ru_maxrss`` see them reset. A forked child needs a monitor of its
    own: the files are those of the process that opened them. Use from one thread. ``proc``: the folder of the
    process in procfs.
    """

    def __init__(self, proc: Path = _PROC_SELF) -> None:
        self._peak: _HighWaterMark | _SampledPeak
        try:
            self._peak = _HighWaterMark(proc)
        except (OSError, ValueError):  # no procfs, no permission, or missing fields
            self._peak = _SampledPeak(proc)

    @property
    def method(self) -> str:
        """How the peak is measured."""
        return self._peak.method

    def resident_bytes(self) -> int:
        """Return the resident bytes of the process now."""
        return self._peak.resident_bytes()

    def start_period(self) -> None:
        """Begin a period."""
        self._peak.start()

    def end_period(self) -> int:
        """Return the highest resident memory since ``start_period``, in bytes."""
        return self._peak.end()

    def close(self) -> None:
        """Close the files and end the sampling thread."""
        self._peak.close()


class _HighWaterMark:
    """Peak by the kernel: writing "5" to clear_refs sets VmHWM to the memory in use (since Linux 4.0)."""

    method = "kernel high-water mark (VmHWM)"

    # The process has one mark: a monitor that resets it first passes its value to the other active monitors.
    _measuring: ClassVar[weakref.WeakSet[_HighWaterMark]] = weakref.WeakSet()

    def __init__(self, proc: Path) -> None:
        self._peak_bytes = 0  # peak of this period up to the last reset by another monitor
        self._status = (proc / "status").open("rb", buffering=0)
        try:
            self._clear_refs = (proc / "clear_refs").open("wb", buffering=0)
            try:
                self.start()  # some systems open the file but refuse the write
                self.end()
            except BaseException:
                self._clear_refs.close()
                raise
        except BaseException:
            self._status.close()
            raise

    def start(self) -> None:
        self._measuring.discard(self)
        if len(self._measuring):  # iterating over a WeakSet costs more than the rest
            for other in self._measuring:
                other._peak_bytes = max(other._peak_bytes, other._read(b"VmHWM:"))
        self._clear_refs.write(b"5")
        self._peak_bytes = 0
        self._measuring.add(self)

    def end(self) -> int:
        self._measuring.discard(self)
        return max(self._peak_bytes, self._read(b"VmHWM:"))

    def resident_bytes(self) -> int:
        return self._read(b"VmRSS:")

    def close(self) -> None:
        self._measuring.discard(self)
        self._status.close()
        self._clear_refs.close()

    def _read(self, field: bytes) -> int:
        text = os.pread(self._status.fileno(), _STATUS_MAX_BYTES, 0)
        begin = text.index(field) + len(field)
        return int(text[begin : text.index(b"kB", begin)]) * 1024


class _SampledPeak:
    """Peak by a thread that samples every millisecond while a period is open."""

    method = f"resident memory sampled every {_SAMPLE_SECONDS * 1000:g} ms"

    def __init__(self, proc: Path) -> None:
        self._resident = _Resident(proc)
        self._lock = threading.Lock()
        self._peak_bytes = 0  # guarded by _lock
        self._active = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None  # started by the first period

    def start(self) -> None:
        with self._lock:
            self._peak_bytes = self._resident.read()
        self._active.set()
        if self._thread is None:
            thread = threading.Thread(target=self._sample, name="gemini-memory-monitor", daemon=True)
            start_thread(thread, "measuring memory")
            self._thread = thread

    def end(self) -> int:
        self._active.clear()
        self._look()
        with self._lock:
            return self._peak_bytes

    def resident_bytes(self) -> int:
        return self._resident.read()

    def close(self) -> None:
        self._closed.set()
        self._active.set()  # wakes the thread
        if self._thread is not None:
            self._thread.join()
        self._resident.close()

    def _sample(self) -> None:
        while not self._closed.wait(_SAMPLE_SECONDS):
            self._active.wait()
            if not self._closed.is_set():
                self._look()

    def _look(self) -> None:
        with self._lock:
            self._peak_bytes = max(self._peak_bytes, self._resident.read())


class _Resident:
    """Reads the resident bytes: from statm, or from psutil on systems without procfs."""

    def __init__(self, proc: Path) -> None:
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        statm = proc / "statm"
        self._statm = statm.open("rb", buffering=0) if statm.exists() else None

    def read(self) -> int:
        if self._statm is None:
            import psutil  # needed only without procfs

            return int(psutil.Process().memory_info().rss)
        return int(os.pread(self._statm.fileno(), 256, 0).split()[1]) * self._page_bytes

    def close(self) -> None:
        if self._statm is not None:
            self._statm.close()


class FakeMonitor:
    """A memory that a test fills and empties."""

    method = "fake"

    def __init__(self, resident_bytes: int = 0) -> None:
        self._resident_bytes = resident_bytes
        self._peak_bytes = resident_bytes

    def allocate(self, nbytes: int) -> None:
        """Add ``nbytes``."""
        self._resident_bytes += nbytes
        self._peak_bytes = max(self._peak_bytes, self._resident_bytes)

    def free(self, nbytes: int) -> None:
        """Subtract ``nbytes``."""
        self._resident_bytes -= nbytes

    def resident_bytes(self) -> int:
        """Return the bytes allocated now."""
        return self._resident_bytes

    def start_period(self) -> None:
        """Reset the peak."""
        self._peak_bytes = self._resident_bytes

    def end_period(self) -> int:
        """Return the peak since ``start_period``."""
        return self._peak_bytes

    def close(self) -> None:
        """Do nothing."""
