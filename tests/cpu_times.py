"""Processor time of each case, with the processes that it starts: ``pytest --cpu-times FILE``.

A case above ``LIMIT_SECONDS`` gives its reason with ``@pytest.mark.dear("reason")``. ``make lint`` reads the
file that ``make test`` wrote and fails where a reason is missing.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

LIMIT_SECONDS = 15.0
_SHOWN = 30
_TICKS = os.sysconf("SC_CLK_TCK")


def processor_seconds() -> float:
    """Return what this process and its descendants have used, those that it waited for included."""
    times = os.times()
    ended = times.children_user + times.children_system
    return times.user + times.system + ended + sum(_of_living(pid) for pid in _children(os.getpid()))


def _children(pid: int) -> Iterator[int]:
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                yield from map(int, (task / "children").read_text().split())


def _of_living(pid: int) -> float:
    try:
        # The name may hold spaces and parentheses; user, system and both of ended children follow it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS + sum(_of_living(child) for child in _children(pid))


class CpuTimes:
    """Measures each case where it runs, and adds up where the terminal is."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seconds: dict[str, float] = {}
        self._reasons: dict[str, str] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Keep the time before a case; its last report takes the difference along."""
        item.stash[_BEGAN] = processor_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        """Note what the case took, which the report of its end carries to the terminal."""
        result = yield
        item.user_properties.append(("cpu_seconds", processor_seconds() - item.stash[_BEGAN]))
        marker = item.get_closest_marker("dear")
        if marker is not None:
            item.user_properties.append(("dear", marker.args[0]))
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect what reports carry, from other processes too."""
        properties: dict[str, Any] = dict(report.user_properties)
        if report.when == "teardown" and "cpu_seconds" in properties:
            self._seconds[report.nodeid] = properties["cpu_seconds"]
            if "dear" in properties:
                self._reasons[report.nodeid] = properties["dear"]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the sums by folder and the dearest cases, and write all of them."""
        folders: dict[str, list[float]] = defaultdict(list)
        for name, seconds in self._seconds.items():
            folders[str(Path(name.partition("::")[0]).parent)].append(seconds)
        terminalreporter.section("processor time, children included")
        for folder, times in sorted(folders.items(), key=lambda entry: -sum(entry[1])):
            terminalreporter.write_line(f"{sum(times):8.0f} s  {len(times):5d} cases  {folder}")
        dearest = sorted(self._seconds, key=self._seconds.__getitem__, reverse=True)
        for name in dearest[:_SHOWN]:
            terminalreporter.write_line(f"{self._seconds[name]:8.1f} s  {name}")
        self._file.parent.mkdir(parents=True, exist_ok=True)
        rows = {name: {"seconds": round(self._seconds[name], 2)} for name in dearest}
        for name, reason in self._reasons.items():
            rows[name]["reason"] = reason
        self._file.write_text(json.dumps(rows, indent=0))


_BEGAN = pytest.StashKey[float]()


def without_reason(file: Path) -> list[str]:
    """Return a line for each case in a file of times that is dear and does not say why."""
    rows = json.loads(file.read_text())
    return [
        f"{row['seconds']:.0f} s: {name}"
        for name, row in rows.items()
        if row["seconds"] > LIMIT_SECONDS and "reason" not in row
    ]


if __name__ == "__main__":
    found = without_reason(Path(sys.argv[1]))
    if found:
        sys.exit("\n".join([f"more than {LIMIT_SECONDS:.0f} s of processor time, and no reason:", *found]))
