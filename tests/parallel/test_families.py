"""One record holds what the strategies know about a family of models."""

from __future__ import annotations

from dataclasses import fields

import pytest
from families import READ, ROWS, SAYS, build

from gemini.parallel.families import FAMILIES, Family, family_of
from gemini.parallel.tensor.plan import style_of

_RULES = {"name", "model_types", "modules", "partial", "sublayers", "plan"}


@pytest.mark.parametrize("name", ROWS | READ)
def test_a_record_says_what_its_row_expects(name: str) -> None:
    family = family_of(build(name))
    told = {each.name: getattr(family, each.name) for each in fields(Family) if each.name not in _RULES}
    unknown = {each: getattr(Family(), each) for each in told}
    assert told == unknown | SAYS[family.name]


def test_every_family_has_a_row() -> None:
    of_library = {family.name for family in FAMILIES if family.model_types}
    assert of_library | {Family().name} == SAYS.keys()
    assert {name for family in FAMILIES for name in family.model_types} >= of_library


def test_no_two_families_claim_one_class_or_one_configuration() -> None:
    for claimed in ("model_types", "modules", "partial", "sublayers"):
        names = [name for family in FAMILIES for name in getattr(family, claimed)]
        assert len(names) == len(set(names)), claimed


def test_every_style_that_a_record_names_is_known() -> None:
    rules = [rule for family in FAMILIES for rule in family.modules.values()]
    assert all(style_of(name) for rule in rules for name in (*rule.children.values(), rule.own) if name)
