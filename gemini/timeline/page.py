"""Writes a timeline as one self-contained HTML page: it needs no network and no other file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from gemini.system.config import format_bytes
from gemini.system.durable import replacing
from gemini.timeline.events import LINKS, Timeline, computing, in_turn
from gemini.timeline.summary import LINK_TITLES, PART_TITLES, StepSummary, parts, seconds_text, summarize

_LONGEST = 10


def headline(steps: Sequence[StepSummary]) -> str:
    """Return one or two sentences: how long a step takes, on what, and how well transfers are hidden."""
    seconds = sum(step.seconds for step in steps) / max(1, len(steps))
    if seconds == 0:
        return "No training step was recorded."
    shares = _mean_parts(steps)
    computing = sum(shares.get(phase, 0.0) for phase in ("forward", "backward", "optimizer"))
    waits = {name: share for name, share in shares.items() if name in LINK_TITLES or name == "memory"}
    worst = max(waits, key=lambda name: waits[name], default=None)
    text = f"A step took {seconds_text(seconds)}: {computing / seconds:.0%} of it computing"
    if worst is not None:
        what = PART_TITLES[worst].removeprefix("waiting: ")
        text += f", {sum(waits.values()) / seconds:.0%} waiting (mostly: {what})"
    moved = [step for step in steps if step.links]
    if moved:
        hidden = sum(step.overlap_share for step in moved) / len(moved)
        text += f". Of the time in which links were busy, {hidden:.0%} was hidden behind computing"
    return f"{text}."


def share_bars(steps: Sequence[StepSummary]) -> str:
    """Return HTML: one bar per step, all on the same scale, and a table as their legend."""
    steps = [step for step in steps if step.seconds > 0]
    longest = max((step.seconds for step in steps), default=0.0)
    rows = []
    for step in steps:
        pieces = "".join(
            f'<i style="width:{100 * seconds / longest:.3f}%;background:var(--{name})" '
            f'title="{escape(PART_TITLES[name])}: {seconds_text(seconds)}"></i>'
            for name, seconds in parts(step).items()
        )
        unfinished = "" if step.complete else " (part)"
        name = f"step {step.number}{unfinished}, {seconds_text(step.seconds)}"
        rows.append(f'<span>{name}</span><div class="stack">{pieces}</div>')
    return f'<div class="share">{"".join(rows)}</div>{_legend(steps)}'


def tables(timeline: Timeline, steps: Sequence[StepSummary]) -> str:
    """Return HTML tables of links, tiers and waits."""
    sections = [
        ("Links, mean of a step", _links(steps)),
        ("Tiers", _tiers(timeline, steps)),
        ("Waited longest for, mean of a step", _waits(steps)),
    ]
    found = "".join(f"<section><h2>{title}</h2>{table}</section>" for title, table in sections if table)
    return f'<div class="columns">{found}</div>'


def _mean_parts(steps: Sequence[StepSummary]) -> dict[str, float]:
    each = [parts(step) for step in steps]
    means = {name: sum(part.get(name, 0.0) for part in each) / len(each) for name in PART_TITLES}
    return {name: mean for name, mean in means.items() if mean > 0}


def _legend(steps: Sequence[StepSummary]) -> str:
    if not steps:
        return ""
    each = [parts(step) for step in steps]
    whole = sum(step.seconds for step in steps) / len(steps)
    rows = []
    for name, mean in _mean_parts(steps).items():
        key = f'<span class="key" style="background:var(--{name})"></span>'
        cells = [seconds_text(part.get(name, 0.0)) for part in each]
        rows.append([key + escape(PART_TITLES[name]), f"{mean / whole:.1%}", *cells])
    return _table(["", "share", *(f"step {step.number}" for step in steps)], rows)


def _links(steps: Sequence[StepSummary]) -> str:
    rows = []
    for link, title in LINK_TITLES.items():
        used = [step.links[link] for step in steps if link in step.links]
        if not used:
            continue
        busy, hidden = sum(use.busy_seconds for use in used), sum(use.hidden_seconds for use in used)
        nbytes = sum(use.nbytes for use in used)
        rows.append(
            [
                f'<span class="key" style="background:var(--{link})"></span>{escape(title)}',
                format_bytes(nbytes // len(steps)),
                f"{sum(use.transfers for use in used) / len(steps):.0f}",
                seconds_text(busy / len(steps)),
                f"{format_bytes(round(nbytes / busy))}/s" if busy > 0 else "",
                f"{hidden / busy:.0%}" if busy > 0 else "",
            ]
        )
    return _table(["link", "bytes", "transfers", "busy", "while busy", "hidden"], rows) if rows else ""


def _tiers(timeline: Timeline, steps: Sequence[StepSummary]) -> str:
    rows = []
    for tier in timeline.tiers():
        peak = max((step.peak_bytes.get(tier, 0) for step in steps), default=0)
        budget = timeline.budget(tier)
        rows.append([tier.upper(), format_bytes(peak), format_bytes(budget), f"{peak / budget:.0%}"])
    return _table(["tier", "peak of model data", "budget", "of it"], rows) if rows else ""


def _waits(steps: Sequence[StepSummary]) -> str:
    seconds: dict[str, float] = {}
    for step in steps:
        for label, waited in step.wait_by_chunk.items():
            seconds[label] = seconds.get(label, 0.0) + waited / len(steps)
    longest = sorted(seconds.items(), key=lambda item: -item[1])[:_LONGEST]
    return _table(["chunk", "waited"], [[escape(label), seconds_text(mean)] for label, mean in longest])


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of cells that are already HTML; "" without rows."""
    if not rows:
        return ""
    head = "".join(f"<th>{cell}</th>" for cell in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wrap"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def save_html(timeline: Timeline, path: str | os.PathLike[str], *, title: str) -> None:
    """Write the page to ``path``; the file is complete or absent. Raises IoError."""
    with replacing(Path(path), "write the page") as temporary:
        temporary.write_text(to_html(timeline, title=title), encoding="utf-8")


def to_html(timeline: Timeline, *, title: str) -> str:
    """Return the page. All external texts are escaped, so no name can become markup or script."""
    steps = summarize(timeline)
    parts = {
        "STYLE": _resource("page.css"),
        "SCRIPT": _resource("page.js"),
        "TITLE": escape(title),
        "HEADLINE": escape(headline(steps)),
        "SHARES": share_bars(steps),
        "TABLES": tables(timeline, steps),
        "DATA": embed(page_data(timeline)),
    }
    page = _resource("page.html")
    for name, text in parts.items():
        page = page.replace(f"<!--{name}-->", text)
    return page


def embed(data: Any) -> str:
    """Return ``data`` as JSON that is safe inside a script element: no text in it can close the element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def page_data(timeline: Timeline) -> dict[str, Any]:
    """Return the data that the page draws, column by column; times in whole microseconds."""
    words = _Words()
    operators = sorted(timeline.operators, key=lambda operator: operator.begin_s)
    computed = [span for step in timeline.steps for span in computing(timeline.operators_of(step), step)]
    return {
        "end": _us(timeline.end_s),
        "steps": [{"number": s.number, "span": [_us(s.begin_s), _us(s.end_s)]} for s in timeline.steps],
        "phases": {"name": [words.index(p.name) for p in timeline.phases], **_spans(timeline.phases)},
        "operators": {
            "label": [words.index(operator.label) for operator in operators],
            "phase": [words.index(operator.phase) for operator in operators],
            "asked": [_us(operator.asked_s) for operator in operators],
            "moment": [operator.moment for operator in operators],
            "late": [int(operator.late) for operator in operators],
            **_spans(operators),
        },
        "computing": {"phase": [words.index(span.name) for span in computed], **_spans(computed)},
        "updates": {"label": [words.index(u.label) for u in timeline.updates], **_spans(timeline.updates)},
        "waits": {
            "label": [words.index(wait.label) for wait in timeline.waits],
            "shares": [[[s.link, s.chunk, _us(s.seconds)] for s in wait.shares] for wait in timeline.waits],
            **_spans(timeline.waits),
        },
        "links": {link: _link(timeline, link, words.index) for link in LINKS},
        "fills": {
            "time": [_us(fill.time_s) for fill in timeline.fills],
            "limit": [fill.limit_bytes for fill in timeline.fills],
            **{t: [getattr(fill, f"{t}_bytes") for fill in timeline.fills] for t in timeline.tiers()},
        },
        "budgets": {tier: timeline.budget(tier) for tier in timeline.tiers()},
        "chunks": list(timeline.chunk_labels),
        "words": words.all(),
    }


class _Words:
    """Deduplicates repeated texts."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}

    def index(self, word: str) -> int:
        """Return the index of ``word``, which is added if it is new."""
        return self._places.setdefault(word, len(self._places))

    def all(self) -> list[str]:
        """Return all words by index."""
        return list(self._places)


def _link(timeline: Timeline, link: str, word: Callable[[str], int]) -> dict[str, Any]:
    turns = list(in_turn(t for t in timeline.transfers if t.link == link))
    return {
        "title": LINK_TITLES[link],
        "kind": [word(transfer.kind) for transfer, _, _ in turns],
        "chunk": [transfer.chunk for transfer, _, _ in turns],
        "nbytes": [transfer.nbytes for transfer, _, _ in turns],
        "submitted": [_us(transfer.submitted_s) for transfer, _, _ in turns],
        "real": [_us(transfer.begin_s) for transfer, _, _ in turns],
        "ok": [int(transfer.ok) for transfer, _, _ in turns],
        "begin": [_us(begin) for _, begin, _ in turns],
        "end": [_us(end) for _, _, end in turns],
    }


def _spans(events: Iterable[Any]) -> dict[str, list[int]]:
    each = list(events)
    return {"begin": [_us(event.begin_s) for event in each], "end": [_us(event.end_s) for event in each]}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _resource(name: str) -> str:
    return (files("gemini.timeline") / "page_files" / name).read_text(encoding="utf-8")
