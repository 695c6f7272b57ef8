"""Shared by all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cpu_times import CpuTimes
from hypothesis import settings
from pairs import ask_for_products

# No deadline: how long an example takes says how busy the machine is.
settings.register_profile("gemini", deadline=None)
settings.register_profile("dev", settings.get_profile("gemini"), max_examples=10)  # of `make check`
settings.load_profile("gemini")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what the checks ask for."""
    parser.addoption("--cpu-times", type=Path, metavar="FILE", help="write the processor time of each case")
    parser.addoption(
        "--full", action="store_true", help="whole products of parameters, where pairs are the rule"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPU, if there is one, unless its tests are asked for: all others are about the CPU."""
    if config.option.full:
        ask_for_products()
    if config.option.cpu_times:
        config.pluginmanager.register(CpuTimes(config.option.cpu_times))
    if "cuda" not in config.option.markexpr:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that need a GPU where none is seen."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU, or not asked for with -m cuda"))


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> None:
    """Have Ctrl-C raise: a shell that starts the tests in the background leaves SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Keep tiny operators from being spread over threads: on a busy machine that costs seconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
