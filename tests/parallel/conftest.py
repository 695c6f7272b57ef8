"""Shared by the tests over several processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from processes import close_workers

_STARTS_PROCESSES = {"processes", "hosts"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep on one worker the tests of modules that start processes: its ranks serve all of them."""
    for item in items:
        names = vars(item.module).values() if isinstance(item, pytest.Function) else ()
        if _STARTS_PROCESSES & {getattr(value, "__module__", None) for value in names}:
            item.add_marker(pytest.mark.xdist_group("ranks"))


@pytest.fixture(autouse=True, scope="session")
def workers_end_with_the_session() -> Iterator[None]:
    """End the processes that served the tests."""
    yield
    close_workers()
