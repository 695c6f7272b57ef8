"""Writes a timeline in the Trace Event Format, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gemini.system.config import format_bytes
from gemini.system.durable import replacing
from gemini.timeline.events import LINKS, Timeline, in_turn

_THREAD, _LINKS, _TIERS = 1, 2, 3  # process ids, used to group tracks
_PHASES, _OPERATORS, _UPDATES, _WAITS, _STEPS = 1, 2, 3, 4, 0

TraceEvent = dict[str, Any]


def save_chrome(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write ``timeline`` to ``path``; the file is complete or absent. Raises IoError."""
    with replacing(Path(path), "write the trace") as temporary:
        temporary.write_text(json.dumps(to_chrome(timeline), separators=(",", ":")), encoding="ascii")


def to_chrome(timeline: Timeline) -> dict[str, Any]:
    """Return the trace as the object to be written as JSON; times in microseconds."""
    events = [*_names(timeline), *_thread_events(timeline), *_link_events(timeline), *_counters(timeline)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(timeline: Timeline) -> Iterator[TraceEvent]:
    groups = {_THREAD: "training thread", _LINKS: "links", _TIERS: "tiers"}
    for pid, name in groups.items():
        yield _metadata("process_name", pid, 0, {"name": name})
        yield _metadata("process_sort_index", pid, 0, {"sort_index": pid})
    threads = {_STEPS: "steps", _PHASES: "phases", _OPERATORS: "operators", _UPDATES: "deferred updates"}
    threads[_WAITS] = "waits"
    tracks = [(_THREAD, tid, name) for tid, name in threads.items()]
    tracks += [(_LINKS, tid, link) for tid, link in enumerate(LINKS, 1)]
    for pid, tid, name in tracks:
        yield _metadata("thread_name", pid, tid, {"name": name})
        yield _metadata("thread_sort_index", pid, tid, {"sort_index": tid})


def _thread_events(timeline: Timeline) -> Iterator[TraceEvent]:
    for step in timeline.steps:
        name = f"step {step.number}" + ("" if step.complete else " (incomplete)")
        yield _span(name, "step", _THREAD, _STEPS, step.begin_s, step.end_s)
    for phase in timeline.phases:
        yield _span(phase.name, "phase", _THREAD, _PHASES, phase.begin_s, phase.end_s)
    for op in timeline.operators:
        args = {"phase": op.phase, "moment": op.moment, "deferred": op.late}
        args["asked ms before"] = (op.begin_s - op.asked_s) * 1e3
        yield _span(op.label, op.phase, _THREAD, _OPERATORS, op.begin_s, op.end_s, args)
    for update in timeline.updates:
        yield _span(update.label, "update", _THREAD, _UPDATES, update.begin_s, update.end_s)
    for wait in timeline.waits:
        args = {
            f"{share.link} {timeline.chunk_label(share.chunk)}": f"{share.seconds * 1e3:.3f} ms"
            for share in wait.shares
        }
        yield _span(f"wait for {wait.label}", "wait", _THREAD, _WAITS, wait.begin_s, wait.end_s, args)


def _link_events(timeline: Timeline) -> Iterator[TraceEvent]:
    for tid, link in enumerate(LINKS, 1):
        for transfer, begin, end in in_turn(t for t in timeline.transfers if t.link == link):
            args = {
                "bytes": transfer.nbytes,
                "ok": transfer.ok,
                "queued ms": (transfer.begin_s - transfer.submitted_s) * 1e3,
                "on the link ms": (transfer.end_s - transfer.begin_s) * 1e3,
            }
            name = f"{transfer.kind} {timeline.chunk_label(transfer.chunk)}"
            yield _span(name, transfer.kind, _LINKS, tid, begin, end, args)


def _counters(timeline: Timeline) -> Iterator[TraceEvent]:
    for tier in timeline.tiers():
        name = f"{tier.upper()} bytes (budget {format_bytes(timeline.budget(tier))})"
        for fill in timeline.fills:
            value = getattr(fill, f"{tier}_bytes")
            counter = {"ph": "C", "name": name, "pid": _TIERS, "tid": 0, "ts": fill.time_s * 1e6}
            yield {**counter, "args": {"bytes": value}}


def _metadata(kind: str, pid: int, tid: int, args: dict[str, Any]) -> TraceEvent:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _span(
    name: str,
    category: str,
    pid: int,
    tid: int,
    begin_s: float,
    end_s: float,
    args: dict[str, Any] | None = None,
) -> TraceEvent:
    event = {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": begin_s * 1e6}
    return {**event, "dur": max(0.0, end_s - begin_s) * 1e6, "args": args or {}}
