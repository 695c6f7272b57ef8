"""Traces survive the disk, and nothing else is taken for one."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini.errors import CheckpointError, ConfigError, IoError
from gemini.memstats.trace import Trace

TRACE = Trace(
    accesses=((0,), (1, 2), (0,)),
    non_model_bytes=(100, 0, 300),
    phases=("forward", "backward", "optimizer"),
    param_order=("b", "a"),
    chunk_signature="abc",
)


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 99)), st.integers(0, 2**60), st.text(max_size=3)), max_size=8),
    st.lists(st.text(max_size=5), unique=True),
    st.text(max_size=8),
)
def test_a_saved_trace_loads_equal(tmp_path_factory, moments: list, order: list[str], signature: str) -> None:
    trace = Trace(
        accesses=tuple(tuple(chunks) for chunks, _, _ in moments),
        non_model_bytes=tuple(nbytes for _, nbytes, _ in moments),
        phases=tuple(phase for _, _, phase in moments),
        param_order=tuple(order),
        chunk_signature=signature,
    )
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    trace.save(path)
    assert Trace.load(path) == trace
    assert Trace.load(path).hash() == trace.hash()


@pytest.mark.parametrize(
    "change",
    [
        {"accesses": ((0,), (2, 1), (0,))},
        {"accesses": ((0, 1), (2,), (0,))},
        {"non_model_bytes": (100, 0, 301)},
        {"phases": ("forward", "backward", "backward")},
        {"param_order": ("a", "b")},
        {"chunk_signature": "abd"},
    ],
)
def test_any_difference_changes_the_hash(change: dict) -> None:
    assert dataclasses.replace(TRACE, **change).hash() != TRACE.hash()


def test_the_hash_does_not_depend_on_the_process() -> None:
    assert TRACE.hash() == "dc51c76117bc556783629084ad566ac7aba59c5ba44c2af95472406813201253"


def test_each_moment_reserves_what_the_period_it_opens_needs() -> None:
    assert TRACE.reserve_bytes() == (100, 0, 300)
    assert TRACE.num_moments == 3


@pytest.mark.parametrize(
    "change",
    [
        {"accesses": ((0,),)},
        {"non_model_bytes": (1, 2)},
        {"phases": ()},
        {"non_model_bytes": (1, -1, 1)},
        {"accesses": ((0,), (-1,), (0,))},
        {"param_order": ("a", "a")},
    ],
)
def test_fields_that_contradict_each_other_are_refused(change: dict) -> None:
    with pytest.raises(ConfigError):
        dataclasses.replace(TRACE, **change)


def damaged(**changes: object) -> str:
    """Return the text of a saved trace with some of its fields replaced and the hash left as it was."""
    document = {"format": "gemini-trace-1", "hash": TRACE.hash(), "trace": dataclasses.asdict(TRACE)}
    document["trace"].update(changes)
    return json.dumps(document)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"format": "gemini-trace-1"}',
        '{"format": "gemini-trace-1", "hash": "", "trace": []}',
        '{"format": "gemini-trace-2", "trace": {}}',
        "\u00e9",
        damaged()[:-20],
        damaged(non_model_bytes=[100, 0, 200]),
        damaged(non_model_bytes=[100, 0]),
        damaged(non_model_bytes=[100, False, 300]),
        damaged(accesses=[0, 1, 2]),
        damaged(param_order=[1]),
        damaged(chunk_signature=None),
    ],
)
def test_what_is_not_a_whole_trace_is_refused_with_its_path(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"trace\.json"):
        Trace.load(path)


def test_a_missing_file_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone\.json"):
        Trace.load(tmp_path / "gone.json")


def test_a_failed_save_keeps_the_old_file_and_leaves_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.json"
    TRACE.save(path)

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(IoError) as refused:
        dataclasses.replace(TRACE, chunk_signature="new").save(path)
    assert (refused.value.errno, refused.value.filename) == (28, str(path))
    assert Trace.load(path) == TRACE
    assert list(tmp_path.iterdir()) == [path]


def test_saving_into_a_missing_folder_is_an_io_error(tmp_path: Path) -> None:
    with pytest.raises(IoError):
        TRACE.save(tmp_path / "gone" / "trace.json")
