"""Shared by all tests."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_times import CpuTimes
from hypothesis import settings
from import_graph import imported_names
from pairs import ask_for_products
from short_searches import SHORT_SEARCH

# No deadline: how long an example takes says how busy the machine is.
settings.register_profile("gemini", deadline=None)
settings.register_profile("dev", settings.get_profile("gemini"), max_examples=10)  # of `make check`
settings.load_profile("gemini")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what the checks ask for."""
    parser.addoption("--cpu-times", type=Path, metavar="FILE", help="write the processor time of each case")
    parser.addoption(
        "--stop-after", type=float, metavar="SECONDS", help="leave out the cases after this time"
    )
    parser.addoption(
        "--models-of-day", type=int, metavar="DAY", help="also the third of tests/zoo that is for this day"
    )
    parser.addoption(
        "--full", action="store_true", help="make products of parameters where pairs are the rule"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPU, if there is one, unless its tests are asked for: all others are about the CPU."""
    if config.option.stop_after:
        config.pluginmanager.register(StopAfter(config.option.stop_after))
    if config.option.full:
        ask_for_products()
    if config.option.cpu_times:
        config.pluginmanager.register(CpuTimes(config.option.cpu_times))
    if "cuda" not in config.option.markexpr:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


class StopAfter:
    """Leaves out the cases that come up after a time, of a run that has the most telling ones first."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ends = time.monotonic() + seconds

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> bool | None:
        """Answer for a case without running it, once the time is over."""
        return True if time.monotonic() > self._ends else None

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say that there were more."""
        if time.monotonic() > self._ends:
            terminalreporter.write_line(
                f"cases after {self._seconds:.0f} s were left out; `make test` runs all"
            )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out whole groups to workers. The marks that xdist has for it do nothing under pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(config.rootpath / nodeid.partition("::")[0])

    return Groups(config, log) if config.getvalue("dist") == "loadscope" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import all files without Python's collections, which find nothing and look at more each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the tests that need a GPU where none is seen; put first what takes long."""
    for item in items:
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU, or not asked for with -m cuda"))
    if config.option.stop_after is None:
        items.sort(key=_turn)  # or a single worker would end with it


@cache
def _group(path: Path) -> str:
    """Return the name of what a test file shares a worker with: expensive imports, ranks, or itself."""
    if path.parent.name in ("integrations", "zoo", "layouts"):
        return "libraries"  # transformers and its like
    if path.parent.name == "parallel" and "processes" in _helpers(path):
        return "ranks"  # which are started once, and serve all
    return path.stem


def _helpers(path: Path) -> set[str]:
    """Return the modules beside it that a test imports, and those that they import."""
    names = {name.partition(".")[0] for name in imported_names(path)} - {path.stem}
    found = {name for name in names if path.with_name(f"{name}.py").exists()}
    return found.union(*(_helpers(path.with_name(f"{name}.py")) for name in found))


def _turn(item: pytest.Item) -> int:
    if _group(item.path) != item.path.stem:
        return 0
    return 1 if item.get_closest_marker("dear") else 2


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> None:
    """Have Ctrl-C raise: a shell that starts the tests in the background leaves SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="module")
def only_young_objects_are_collected() -> None:
    """Leave what was imported, and the cases of all files, out of Python's collections: a full one would look
    at each of these millions of objects, for more than a second. What is garbage already goes before."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up looking for better plans early."""
    from gemini.placement import local_search

    monkeypatch.setattr(local_search, "_MOST", SHORT_SEARCH)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Keep tiny operators from being spread over threads: on a busy machine that costs seconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
