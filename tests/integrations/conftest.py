"""Settings of the tests with other libraries."""

from __future__ import annotations

import os

import pytest

# Nothing is looked up in a network, and nobody's reports are sent anywhere.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Every test here."""
