"""A timeline as one HTML page that needs nothing else: no network, no other file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from gemini.system.durable import replacing
from gemini.timeline.events import LINKS, Timeline, computing, in_turn
from gemini.timeline.page_tables import headline, share_bars, tables
from gemini.timeline.summary import LINK_TITLES, summarize


def save_html(timeline: Timeline, path: str | os.PathLike[str], *, title: str) -> None:
    """Write the page to ``path``, whole or not at all. Raises IoError."""
    with replacing(Path(path), "write the page") as temporary:
        temporary.write_text(to_html(timeline, title=title), encoding="utf-8")


def to_html(timeline: Timeline, *, title: str) -> str:
    """Return the page. Every text from outside is escaped, so no name can become markup or script."""
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
    """Return ``data`` as JSON that may stand inside a script element: no text in it can end that."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def page_data(timeline: Timeline) -> dict[str, Any]:
    """Return what the page draws, column by column; times in whole microseconds."""
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
    """Texts that come again and again, each kept once."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}

    def index(self, word: str) -> int:
        """Return the place of ``word``."""
        return self._places.setdefault(word, len(self._places))

    def all(self) -> list[str]:
        """Return the words in the order of their places."""
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
