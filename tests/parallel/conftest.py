"""Shared by the tests over several processes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from import_graph import imported_names
from processes import close_workers

_STARTS_RANKS = "processes"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep on one worker the tests that run on ranks: the processes that it starts serve all of them."""
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here and _STARTS_RANKS in _helpers(item.path.stem):
            item.add_marker(pytest.mark.xdist_group("ranks"))


@cache
def _helpers(module: str) -> set[str]:
    """Return the modules beside this one that a module imports, and those that they import."""
    file = Path(__file__).with_name(f"{module}.py")
    if not file.exists():
        return set()
    imported = {name.partition(".")[0] for name in imported_names(file)}
    return imported.union(*(_helpers(name) for name in imported - {module}))


@pytest.fixture(autouse=True, scope="session")
def workers_end_with_the_session() -> Iterator[None]:
    """End the processes that served the tests."""
    yield
    close_workers()
