"""What is made of events: explanations of waits, sums, trace files."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from timeline_samples import long_timeline, timelines

from gemini.errors import IoError
from gemini.timeline.chrome import save_chrome, to_chrome
from gemini.timeline.events import Timeline, Transfer, Wait, common_module, in_turn
from gemini.timeline.summary import common_length, length, merged, parts, summarize
from gemini.timeline.timeline_builder import explain_waits

SPAN = st.tuples(st.integers(0, 30), st.integers(0, 9)).map(lambda span: (span[0], sum(span)))
SPANS = st.lists(SPAN, max_size=8)


def load(chunk: int, submitted: float, end: float) -> Transfer:
    return Transfer("load", "disk_read", chunk, 1, submitted, submitted, end)


def spill(chunk: int, submitted: float, end: float) -> Transfer:
    return Transfer("spill", "disk_write", chunk, 1, submitted, submitted, end)


def explained(chunks: set[int], *transfers: Transfer) -> list[tuple[str, int, float]]:
    """Return what a wait from 10 to 20 for ``chunks`` is put down to."""
    (wait,) = explain_waits([(Wait("", 10, 20), frozenset(chunks))], transfers)
    return [(share.link, share.chunk, share.seconds) for share in wait.shares]


def test_a_wait_is_first_put_down_to_the_transfer_of_its_own_chunk() -> None:
    assert explained({1}, spill(2, 5, 18), load(3, 6, 19), load(1, 12, 17)) == [
        ("disk_write", 2, 3),
        ("disk_read", 1, 5),
        ("disk_read", 3, 1),
    ]


def test_a_wait_during_no_transfer_is_put_down_to_none() -> None:
    assert explained({1}, load(1, 0, 10), load(1, 20, 30)) == []
    assert explained({1}) == []


def test_a_wait_is_explained_however_long_the_transfer_has_been_queued() -> None:
    others = [spill(9, 1 + index / 100, 2 + index / 100) for index in range(50)]
    assert explained({1}, load(1, 0, 15), *others) == [("disk_read", 1, 5)]


@given(SPANS, SPANS)
def test_lengths_of_unions_and_intersections_are_those_of_their_points(
    ones: list[tuple[int, int]], others: list[tuple[int, int]]
) -> None:
    points = [{p for begin, end in spans for p in range(begin, end)} for spans in (ones, others)]
    assert length(merged(ones)) == len(points[0])
    assert common_length(merged(ones), merged(others)) == len(points[0] & points[1])


@given(SPANS)
def test_transfers_in_turn_are_disjoint_and_cover_the_busy_time(spans: list[tuple[int, int]]) -> None:
    begins, ends = (sorted(edges) for edges in zip(*spans, strict=True)) if spans else ([], [])
    transfers = [load(0, begin, end) for begin, end in zip(begins, ends, strict=True)]  # first in, first out
    turns = [(begin, end) for _, begin, end in in_turn(transfers)]
    assert all(one[1] <= next_one[0] for one, next_one in itertools.pairwise(turns))
    assert length(turns) == length(merged((t.begin_s, t.end_s) for t in transfers))


def test_the_parts_of_a_step_add_up_to_its_seconds() -> None:
    (step,) = summarize(long_timeline(300))
    assert math.isclose(sum(parts(step).values()), step.seconds, rel_tol=1e-9)
    assert step.wait_by_link == pytest.approx({"disk_read": 300 * 3e-4})
    assert step.links["disk_read"].nbytes == 300 * 4096
    assert step.links["disk_read"].hidden_seconds == pytest.approx(0, abs=1e-9)
    assert step.overlap_share == pytest.approx(0, abs=1e-6)


@given(timelines())
def test_chrome_trace_is_valid_whatever_things_are_called(timeline: Timeline) -> None:
    trace = json.loads(json.dumps(to_chrome(timeline), allow_nan=False))
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    named = [event for event in trace["traceEvents"] if event["name"] == "thread_name"]
    tracks = {(event["pid"], event["tid"]) for event in named}
    for event in trace["traceEvents"]:
        assert {"ph", "name", "pid", "tid", "args"} <= event.keys()
        assert isinstance(event["name"], str)
        if event["ph"] == "X":
            assert (event["pid"], event["tid"]) in tracks
            assert event["dur"] >= 0
            assert event["ts"] >= 0
        elif event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
        else:
            assert event["ph"] == "M"


@given(timelines())
def test_tracks_of_links_have_no_events_that_cross(timeline: Timeline) -> None:
    spans = [event for event in to_chrome(timeline)["traceEvents"] if event["ph"] == "X"]
    for tid in range(1, 5):
        track = [event for event in spans if (event["pid"], event["tid"]) == (2, tid)]
        for one, next_one in itertools.pairwise(track):
            assert one["ts"] + one["dur"] <= next_one["ts"] * (1 + 1e-12)


def test_a_trace_that_cannot_be_written_is_an_io_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(IoError, match="cannot write the trace"):
        save_chrome(long_timeline(3), tmp_path / "missing" / "trace.json")
    (tmp_path / "trace.json").mkdir()
    with pytest.raises(IoError, match=r"trace\.json"):
        save_chrome(long_timeline(3), tmp_path / "trace.json")
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


@pytest.mark.parametrize(
    ("params", "label"),
    [
        (["a.b.weight"], "a.b.weight"),
        (["a.b.weight", "a.b.bias"], "a.b"),
        (["a.b.weight", "a.c.weight", "d"], "a.b.weight and 2 more"),
        (["weight", "bias"], "weight and 1 more"),
    ],
)
def test_operators_are_called_after_their_common_module(params: list[str], label: str) -> None:
    assert common_module(params) == label
