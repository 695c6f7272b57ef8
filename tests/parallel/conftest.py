"""Shared by the tests over several processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from processes import close_workers


@pytest.fixture(autouse=True, scope="session")
def workers_end_with_the_session() -> Iterator[None]:
    """End the processes that served the tests."""
    yield
    close_workers()


@pytest.fixture(autouse=True)
def _quick(short_searches: None) -> None:
    """Every test here; the processes that serve them do so by themselves."""
