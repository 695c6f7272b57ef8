"""Fixtures of tests of the planner, which give way to whole searches under ``--full``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gemini.planner.records import CutModel, Part, Record
from gemini.planner.search import Search


@pytest.fixture(autouse=True)
def _quick(request: pytest.FixtureRequest) -> None:
    """Look for better places of chunks only for a while: the laws compare plans that were made in one way."""
    if not request.config.option.full:
        request.getfixturevalue("short_searches")


@pytest.fixture(scope="module")
def kept_records(request: pytest.FixtureRequest) -> Iterator[None]:
    """Rehearse each part of a model once for all searches of a file, as one search does for all of its pins.
    A file that uses it runs models of one form on samples of one form."""
    known: dict[Any, Record] = {}
    rehearsed = Search._record

    def kept(self: Search, part: Part, samples: int) -> Record:
        form = tuple((name, param.shape) for name, param in self._model.named_parameters())
        key = (type(self._model), form, part, samples)
        if key in known and (part, samples) not in self._records:
            if part not in self._cut:
                self._cut[part] = CutModel(self._model, part)
            self._records[part, samples] = known[key]
        known[key] = rehearsed(self, part, samples)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        if not request.config.option.full:
            patch.setattr(Search, "_record", kept)
        yield
