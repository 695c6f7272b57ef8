"""Timers by name, for repeated parts of a program."""

from __future__ import annotations

import time
from collections.abc import Iterator

from gemini.errors import StateError
from gemini.system.device import current_device, synchronize


def now() -> float:
    """Return seconds of a monotonic clock, after the GPU, if there is one, has finished its work."""
    device = current_device()
    if device.type != "cpu":
        synchronize(device)
    return time.perf_counter()


class Timer:
    """Measures seconds from :meth:`start` to :meth:`stop`. With a GPU both wait for its pending work."""

    def __init__(self) -> None:
        self._started: float | None = None
        self._elapsed = 0.0
        self._history: list[float] = []

    @property
    def history(self) -> list[float]:
        """The measurements that :meth:`stop` kept, in order."""
        return list(self._history)

    @property
    def has_history(self) -> bool:
        """Whether any measurement was kept."""
        return bool(self._history)

    def start(self) -> None:
        """Start measuring."""
        self._started = now()

    def stop(self, keep_in_history: bool = False) -> float:
        """Return the seconds since :meth:`start`, and add them to the elapsed time. Raises StateError if it
        was not started.
        """
        if self._started is None:
            raise StateError("the timer was not started: call start() before stop()")
        seconds = now() - self._started
        self._started = None
        self._elapsed += seconds
        if keep_in_history:
            self._history.append(seconds)
        return seconds

    def get_elapsed_time(self) -> float:
        """Return the seconds of all measurements since :meth:`reset`."""
        return self._elapsed

    def get_history_mean(self) -> float:
        """Return the mean of the kept measurements; 0 if there are none."""
        return sum(self._history) / len(self._history) if self._history else 0.0

    def get_history_sum(self) -> float:
        """Return the sum of the kept measurements."""
        return sum(self._history)

    def reset(self) -> None:
        """Discard all measurements."""
        self._started, self._elapsed = None, 0.0
        self._history.clear()


class MultiTimer:
    """Timers by name. With ``on=False`` they measure nothing."""

    def __init__(self, on: bool = True) -> None:
        self.is_on = on
        self._timers: dict[str, Timer] = {}

    def start(self, name: str) -> None:
        """Start measuring ``name``."""
        if self.is_on:
            self._timers.setdefault(name, Timer()).start()

    def stop(self, name: str, keep_in_history: bool = False) -> float | None:
        """Return the seconds since :meth:`start` of ``name``; None if the timers are off. Raises StateError
        if it was not started.
        """
        if not self.is_on:
            return None
        if name not in self._timers:
            raise StateError(f"the timer {name!r} was not started: call start({name!r}) before stop()")
        return self._timers[name].stop(keep_in_history)

    def get_timer(self, name: str) -> Timer:
        """Return a timer by its name. Raises StateError if there is none."""
        if name not in self._timers:
            raise StateError(f"there is no timer {name!r}; there are {', '.join(self._timers) or 'none'}")
        return self._timers[name]

    def reset(self, name: str | None = None) -> None:
        """Reset a timer; None resets all."""
        for each in self._timers.values() if name is None else [self.get_timer(name)]:
            each.reset()

    def __iter__(self) -> Iterator[tuple[str, Timer]]:
        return iter(self._timers.items())
