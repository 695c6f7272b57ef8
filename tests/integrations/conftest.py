"""Settings of the tests with other libraries."""

from __future__ import annotations

import os

import pytest

# Nothing is looked up in a network, and nobody's reports are sent anywhere.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


@pytest.fixture(autouse=True)
def _quick(one_thread: None, short_searches: None) -> None:
    """Every test here."""
