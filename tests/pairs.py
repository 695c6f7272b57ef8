"""Parameters of a test that are combined: ``@pairs(rule=[...], budget=[...], policy=[...])``.

A product of three lists mostly repeats itself: a fault that needs one value of each of two parameters shows
in any row that has both. ``pairs`` makes few rows in which every two values meet. ``make test-full`` runs the
whole products (``--full``): before a release, and after a change to the part that a law is about.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

_FULL = False  # set before modules are collected (conftest.py)


def ask_for_products() -> None:
    """Make every later ``pairs`` a whole product."""
    global _FULL
    _FULL = True


def pairs(*fixtures: str, **values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by rows in which every two values of different parameters meet.

    Args:
        fixtures: Names of the parameters that are fixtures; each gets the values of its list.
        values: The values of each parameter, or ``pytest.param`` of one, with its id and marks.
    """
    lists = [[_as_param(name, *entry) for entry in enumerate(given)] for name, given in values.items()]
    params = [
        pytest.param(
            *(value.values[0] for value in row),
            id="-".join(str(value.id) for value in row),
            marks=[mark for value in row for mark in value.marks],
        )
        for row in _rows(lists)
    ]
    return pytest.mark.parametrize(",".join(values), params, indirect=list(fixtures))


def first(values: Iterable[Any], count: int = 1) -> list[Any]:
    """Return the first ``count`` of the values, or all of them under ``--full``.

    The cases of a benchmark share its driver: one runs for real, and ``make bench-check`` runs all. Of dear
    cases that end in one place of the code, those that differ most come first.
    """
    return list(values) if _FULL else list(values)[:count]


def _as_param(name: str, place: int, value: Any) -> Any:
    is_param = hasattr(value, "values") and hasattr(value, "marks")
    if is_param and value.id is not None:
        return value
    of = value.values[0] if is_param else value
    is_plain = of is None or isinstance(of, (bool, int, float, str))
    of_id = str(of) if is_plain else getattr(of, "__name__", f"{name}{place}")
    return pytest.param(of, id=of_id, marks=value.marks if is_param else ())


def _rows(lists: list[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Return rows that cover all pairs of values; each next row covers the most pairs that are missing."""
    products = list(itertools.product(*(range(len(values)) for values in lists)))
    if not _FULL:
        met = {row: _met(lists, row) for row in products}
        missing: set[Any] = set().union(*met.values())
        products = []
        while missing:
            row = max(met, key=lambda row: len(met[row] & missing))
            products.append(row)
            missing -= met[row]
    return [tuple(values[at] for values, at in zip(lists, row, strict=True)) for row in products]


def _met(lists: list[Sequence[Any]], row: tuple[int, ...]) -> set[Any]:
    """Return the pairs of values that meet in a row: where one of them has a mark, which may skip the row,
    only its own pairs."""
    marked = {(place, at) for place, at in enumerate(row) if lists[place][at].marks}
    return {pair for pair in itertools.combinations(enumerate(row), 2) if marked <= set(pair)}
