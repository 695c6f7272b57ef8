"""The summary of recorded steps as a table for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from gemini.system.config import format_bytes
from gemini.timeline import StepSummary
from gemini.timeline.summary import LINK_TITLES, PART_TITLES, parts, seconds_text


def step_table(title: str, steps: Sequence[StepSummary]) -> Table:
    """Return one column per step: what its time went into, what moved, how much of that was hidden."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("")
    table.add_column("share", justify="right")
    for step in steps:
        table.add_column(f"step {step.number}" + ("" if step.complete else " (part)"), justify="right")
    whole = sum(step.seconds for step in steps)
    table.add_row("a step", "", *(seconds_text(step.seconds) for step in steps), style="bold")
    each = [parts(step) for step in steps]
    for name, what in PART_TITLES.items():
        seconds = [part.get(name, 0.0) for part in each]
        if any(seconds):
            table.add_row(what, f"{sum(seconds) / whole:.1%}", *map(seconds_text, seconds))
    table.add_section()
    for link, what in LINK_TITLES.items():
        if any(link in step.links for step in steps):
            table.add_row(what, "", *(_moved(step, link) for step in steps))
    table.add_row("transfers behind computing", "", *(f"{step.overlap_share:.0%}" for step in steps))
    table.add_row("operators", "", *(str(step.num_operators) for step in steps))
    table.add_row("updates put off until then", "", *(str(step.num_updates) for step in steps))
    return table


def _moved(step: StepSummary, link: str) -> str:
    use = step.links.get(link)
    return "" if use is None else format_bytes(use.nbytes)
