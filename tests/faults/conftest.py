"""Settings of the fault tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _quick(one_thread: None, short_searches: None) -> None:
    """Every test here."""
