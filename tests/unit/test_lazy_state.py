"""A lazy state dict reads what it is asked for, and knows what was done to it."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gemini.model.weights import LazyState, Peeking

VALUES = {"a": torch.ones(2), "b": torch.zeros(3), "c": torch.arange(4.0)}


def lazy() -> tuple[LazyState, list[str]]:
    read: list[str] = []

    def value(name: str) -> torch.Tensor:
        read.append(name)
        return VALUES[name].clone()

    return LazyState(VALUES, value), read


def test_names_cost_no_read_and_values_are_read_once() -> None:
    state, read = lazy()
    assert isinstance(state, dict)
    assert list(state) == list(VALUES)
    assert ("a" in state, len(state), "x" in state) == (True, 3, False)
    del state["b"]
    assert read == []
    assert state["a"] is state["a"]
    assert read == ["a"]
    assert list(Peeking(state)["c"]) == [0, 1, 2, 3]
    assert state.removed == ["b"]
    assert state.changed == {}


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.__setitem__("a", torch.full((2,), 5.0)),
        lambda state: state.update(a=torch.full((2,), 5.0)),
        lambda state: state["a"].fill_(5.0),
        lambda state: state.__ior__({"a": torch.full((2,), 5.0)}),
        lambda state: state.setdefault("a").mul_(5.0),
    ],
)
def test_changes_are_known(change: Callable[[LazyState], Any]) -> None:
    state, _ = lazy()
    change(state)
    assert list(state.changed) == ["a"]
    assert torch.equal(state["a"], torch.full((2,), 5.0))
    assert not state.is_as_read


@pytest.mark.parametrize(
    "plain",
    [
        dict,
        LazyState.copy,
        copy.deepcopy,
        lambda state: {**state},
        lambda state: state | {},
        lambda state: {} | state,
    ],
)
def test_copies_are_ordinary_dicts_with_values(plain: Callable[[LazyState], dict[str, Any]]) -> None:
    state, _ = lazy()
    found = plain(state)
    assert isinstance(found, dict)
    assert not isinstance(found, LazyState)
    assert all(torch.equal(found[name], value) for name, value in VALUES.items())


def test_it_is_saved_as_an_ordinary_dict() -> None:
    file = io.BytesIO()
    torch.save({"state": lazy()[0]}, file)
    file.seek(0)
    found = torch.load(file, weights_only=True)["state"]
    assert all(torch.equal(found[name], value) for name, value in VALUES.items())
