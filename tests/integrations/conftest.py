"""Settings of the tests with other libraries."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Nothing is looked up in a network, and nobody's reports are sent anywhere.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep on one worker what imports transformers and its like: that takes seconds of each."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.xdist_group("libraries"))


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Every test here."""
