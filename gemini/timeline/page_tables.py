"""The parts of the page that are read rather than looked at: a sentence, bars, tables."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from gemini.system.config import format_bytes
from gemini.timeline.events import Timeline
from gemini.timeline.summary import LINK_TITLES, PART_TITLES, StepSummary, parts, seconds_text

_LONGEST = 10


def headline(steps: Sequence[StepSummary]) -> str:
    """Return in a sentence or two how long a step takes, what for, and how well transfers hide."""
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
    """Return one bar per step, all to the same scale, and a table that is their legend."""
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
    """Return the tables of links, tiers and waits."""
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
    """Return a table of cells that are HTML already; none without rows."""
    if not rows:
        return ""
    head = "".join(f"<th>{cell}</th>" for cell in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wrap"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
