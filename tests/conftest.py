"""Shared by all tests."""

from __future__ import annotations

import signal

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that need a GPU where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU on this machine"))


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> None:
    """Have Ctrl-C raise: a shell that starts the tests in the background leaves SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
