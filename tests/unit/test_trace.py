"""Traces survive the disk, and nothing else is taken for one."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini.chunk.chunk import ChunkKind
from gemini.errors import CheckpointError, ConfigError, IoError
from gemini.memstats import Trace
from gemini.memstats import trace as trace_module
from gemini.memstats.trace import CHUNK_KINDS, KINDS, LINKS, MODES, PHASES, LinkSpeed, digest

TRACE = Trace(
    kind="train",
    accesses=((0,), (1, 2), (0,)),
    modes=("r", "wr", "m"),
    frees=((), (), (1,)),
    seconds=(0.5, 0.25, 1.0),
    non_model_bytes=(100, 0, 300),
    phases=("forward", "backward", "optimizer"),
    chunk_bytes=(4096, 4096, 8192),
    chunk_kinds=("param", "grad", "exp_avg"),
    links=(LinkSpeed("disk_read", 1e9, 1e-4),),
    param_order=("b", "a"),
    chunk_signature="abc",
)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Any trace that contradicts itself nowhere."""
    chunks = draw(st.lists(st.tuples(st.integers(1, 2**50), st.sampled_from(CHUNK_KINDS)), max_size=5))
    count = draw(st.integers(0, 8))

    def per_moment(values: st.SearchStrategy[Any]) -> tuple[Any, ...]:
        return tuple(draw(st.lists(values, min_size=count, max_size=count)))

    some = st.sets(st.sampled_from(range(len(chunks)))) if chunks else st.just(set())
    ids = some.map(lambda found: tuple(sorted(found)))
    accesses = per_moment(ids)
    speeds = st.builds(LinkSpeed, st.sampled_from(LINKS), st.floats(1, 1e15), st.floats(0, 10))
    return Trace(
        kind=draw(st.sampled_from(KINDS)),
        accesses=accesses,
        modes=tuple("".join(draw(st.sampled_from(MODES)) for _ in chosen) for chosen in accesses),
        frees=per_moment(ids),
        seconds=per_moment(st.floats(0, 1e9)),
        non_model_bytes=per_moment(st.integers(0, 2**60)),
        phases=per_moment(st.sampled_from(PHASES)),
        chunk_bytes=tuple(nbytes for nbytes, _ in chunks),
        chunk_kinds=tuple(kind for _, kind in chunks),
        links=tuple(draw(st.lists(speeds, unique_by=lambda speed: speed.name))),
        param_order=tuple(draw(st.lists(st.text(max_size=5), unique=True, max_size=4))),
        chunk_signature=draw(st.text(max_size=8)),
    )


@given(traces())
def test_a_saved_trace_loads_equal(tmp_path_factory: pytest.TempPathFactory, trace: Trace) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    trace.save(path)
    assert Trace.load(path) == trace
    assert Trace.load(path).hash() == trace.hash()


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "eval"},
        {"accesses": ((0,), (0, 2), (0,))},
        {"modes": ("m", "wr", "m")},
        {"frees": ((), (1,), ())},
        {"non_model_bytes": (100, 0, 301)},
        {"phases": ("forward", "backward", "backward")},
        {"chunk_bytes": (4096, 4096, 4096)},
        {"chunk_kinds": ("param", "grad", "exp_avg_sq")},
        {"param_order": ("a", "b")},
        {"chunk_signature": "abd"},
    ],
)
def test_any_difference_of_the_iteration_changes_the_hash(change: dict[str, Any]) -> None:
    assert dataclasses.replace(TRACE, **change).hash() != TRACE.hash()


def test_how_fast_a_machine_is_does_not_change_the_hash() -> None:
    other = dataclasses.replace(TRACE, seconds=(1.0, 2.0, 3.0), links=())
    assert other.hash() == TRACE.hash()


def test_the_hash_does_not_depend_on_the_process() -> None:
    assert TRACE.hash() == "cb093614c671dbe5067b2ab096b0a70a998a772030412ded9ead74e47bef12c8"


def test_each_moment_reserves_what_the_period_it_opens_needs() -> None:
    assert TRACE.reserve_bytes() == (100, 0, 300)
    assert TRACE.num_moments == 3


def test_every_kind_of_chunk_can_stand_in_a_trace() -> None:
    assert {kind.value for kind in ChunkKind} <= set(CHUNK_KINDS)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kind": "test"}, "'test'"),
        ({"accesses": ((0,),)}, "'accesses': 1"),
        ({"modes": ()}, "'modes': 0"),
        ({"frees": ((),)}, "'frees': 1"),
        ({"seconds": (1.0,) * 4}, "'seconds': 4"),
        ({"non_model_bytes": (1, 2)}, "'non_model_bytes': 2"),
        ({"phases": ()}, "'phases': 0"),
        ({"accesses": ((0,), (-1, 2), (0,))}, "moment 1"),
        ({"accesses": ((0,), (1, 3), (0,))}, "(1, 3) of 3"),
        ({"accesses": ((0,), (2, 1), (0,))}, "(2, 1)"),
        ({"accesses": ((0,), (1, 1), (0,))}, "(1, 1)"),
        ({"frees": ((), (), (3,))}, "moment 2"),
        ({"frees": ((), (2, 0), ())}, "(2, 0)"),
        ({"modes": ("r", "w", "m")}, "'w' for 2"),
        ({"modes": ("r", "wx", "m")}, "'wx'"),
        ({"seconds": (0.0, -1.0, 0.0)}, "-1.0"),
        ({"seconds": (0.0, math.nan, 0.0)}, "nan"),
        ({"seconds": (0.0, math.inf, 0.0)}, "inf"),
        ({"non_model_bytes": (1, -7, 1)}, "-7"),
        ({"phases": ("forward", "sideward", "optimizer")}, "sideward"),
        ({"chunk_bytes": (4096, 4096)}, "2 entries"),
        ({"chunk_bytes": (4096, 0, 4096)}, "chunk 1"),
        ({"chunk_bytes": (4096, 2**63, 4096)}, "chunk 1"),
        ({"chunk_bytes": (2**61, 2**61, 4096)}, "together"),
        ({"non_model_bytes": (1, 2**64, 1)}, "moment 1"),
        ({"chunk_kinds": ("param", "grad", "paint")}, "paint"),
        ({"links": (LinkSpeed("h2d", 1.0, 0.0),) * 2}, "h2d"),
        ({"param_order": ("a", "a")}, "'a'"),
    ],
)
def test_fields_that_contradict_each_other_are_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        dataclasses.replace(TRACE, **change)
    assert named in str(refused.value)
    assert next(iter(change)) in str(refused.value)


@pytest.mark.parametrize(
    ("name", "speed", "latency"),
    [
        ("warp", 1.0, 0.0),
        ("h2d", 0.0, 0.0),
        ("h2d", math.inf, 0.0),
        ("d2h", 1.0, -1.0),
        ("d2h", 1.0, math.nan),
    ],
)
def test_what_no_link_can_be_is_refused(name: str, speed: float, latency: float) -> None:
    with pytest.raises(ConfigError, match=name):
        LinkSpeed(name, speed, latency)


def test_a_transfer_takes_its_latency_and_its_bytes() -> None:
    assert LinkSpeed("h2d", 100.0, 2.0).seconds(50) == 2.5


FORMAT = str(trace_module.FORMAT)


def document(*, format: str = FORMAT, identity: str | None = None, **changes: object) -> str:
    """Return the text of a saved trace with some of its fields replaced, its checksum right."""
    fields = {**dataclasses.asdict(TRACE), **changes}
    written = {
        "format": format,
        "hash": identity or TRACE.hash(),
        "checksum": digest(fields),
        "trace": fields,
    }
    return json.dumps(written)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        json.dumps({"format": FORMAT}),
        json.dumps({"format": FORMAT, "hash": "", "checksum": "", "trace": []}),
        document(format="gemini-trace-3"),
        "\u00e9",
        document()[:-20],
        document().replace("0.25", "0.26"),
        document(identity="abc"),
        document(non_model_bytes=[100, 0, 200]),
        document(non_model_bytes=[100, 0]),
        document(non_model_bytes=[100, False, 300]),
        document(accesses=[0, 1, 2]),
        document(accesses="abc"),
        document(seconds=[0.5, "1", 1.0]),
        document(seconds=[0.5, True, 1.0]),
        document(seconds=[0.5, 10**400, 1.0]),
        document(links=[{"name": "h2d"}]),
        document(links=["h2d"]),
        document(param_order=[1]),
        document(chunk_signature=None),
    ],
)
def test_what_is_not_a_whole_trace_is_refused_with_its_path(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"trace\.json"):
        Trace.load(path)


def test_a_trace_of_the_first_format_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"format": "gemini-trace-1", "hash": "", "trace": {}}))
    with pytest.raises(CheckpointError, match=r"trace\.json.*gemini-trace-1.*run the warmup again"):
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


def test_a_saved_trace_is_for_its_owner_alone(tmp_path: Path) -> None:
    TRACE.save(tmp_path / "trace.json")
    assert (tmp_path / "trace.json").stat().st_mode & 0o777 == 0o600


def test_saving_into_a_missing_folder_is_an_io_error(tmp_path: Path) -> None:
    with pytest.raises(IoError):
        TRACE.save(tmp_path / "gone" / "trace.json")
