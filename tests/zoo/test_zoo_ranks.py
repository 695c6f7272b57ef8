"""Architectures of the table train over two ranks, to the bit as plain torch that adds up their gradients."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from catalogue import Row

if any(find_spec(library) is None for library in ("transformers", "peft", "timm")):
    pytest.skip("the extra 'test' is not installed", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))

from processes import close_workers, run_on_ranks
from zoo_ranks import conform_over_ranks


@pytest.fixture(autouse=True, scope="module")
def _workers_end() -> Iterator[None]:
    yield
    close_workers()


def test_it_trains_over_ranks_as_plain_torch(row_over_ranks: Row, tmp_path: Path) -> None:
    run_on_ranks(conform_over_ranks, 2, row_over_ranks, str(tmp_path))
