"""Architectures of the table train under a tight budget as without one, and resume."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from catalogue import Row, rows, rows_of_run
from page import PAGE, WRITE, line, lines_of_page, page
from zoo_runs import conform

if any(find_spec(library) is None for library in ("transformers", "peft", "timm")):
    pytest.skip("the extra 'test' is not installed", allow_module_level=True)


def test_it_trains_as_without_a_budget(
    row: Row, tmp_path: Path, record_property: Callable[[str, object], None], request: pytest.FixtureRequest
) -> None:
    found = line(row, conform(row, tmp_path))
    if request.config.getoption(WRITE, default=False):
        record_property(row.name, found)
    else:
        assert lines_of_page().get(row.name) == found, "docs/zoo.md is old; run scripts/check.sh zoo"


def test_the_page_has_the_models_of_the_table(request: pytest.FixtureRequest) -> None:
    if request.config.getoption(WRITE, default=False):
        pytest.skip("the page is being written")
    names = [row.name for row in rows()]
    assert len(set(names)) == len(names) >= 70
    assert page(lines_of_page()) == PAGE.read_text(), "docs/zoo.md is old; run scripts/check.sh zoo"


def test_three_days_in_a_row_run_every_model() -> None:
    every, days = rows_of_run(), [rows_of_run(day) for day in range(20000, 20003)]
    assert {row.name for day in days for row in day} == {row.name for row in rows()}
    assert sum(map(len, days)) == len(rows()) + 2 * len(every)
