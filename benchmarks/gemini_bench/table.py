"""The record of a benchmark as a table for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gemini.system.config import format_bytes

_VERDICTS = {True: "[green]met[/]", False: "[red]missed[/]", None: ""}
_QUICK = {
    "runtime": "--quick: everything is tiny; these figures say only that the cases run.",
    "adam": "arrays this small may stay in the caches; these figures say only that the cases run.",
    "io": "--quick: everything is tiny; these figures say only that the cases run.",
    "placement": "--quick: few points; these figures say only that the cases run.",
    "checkpoint": "--quick: everything is tiny; these figures say only that the cases run.",
    "nvme": "--quick: everything is tiny; these figures say only that the cases run.",
    "zero": "--quick: everything is tiny; these figures say only that the cases run.",
    "parallel": "--quick: everything is tiny; these figures say only that the cases run.",
    "plan": "--quick: everything is tiny; these figures say only that the cases run.",
    "inference": "--quick: everything is tiny; these figures say only that the cases run.",
    "moe": "--quick: everything is tiny; these figures say only that the cases run.",
    "programs": "--quick: everything is tiny; these figures say only that the cases run.",
    "gpu": "--quick or --simulated: everything is tiny; these figures say only that the cases run.",
}


def render(record: Mapping[str, Any], console: Console) -> None:
    """Print where the record comes from and one line per figure."""
    where = record["environment"]
    ranged = any("low" in row for case in record["cases"].values() for row in case.get("rows", ()))
    table = Table(title=f"gemini bench {record['benchmark']}", title_justify="left")
    table.add_column("case", style="bold")
    table.add_column("what", overflow="fold")
    table.add_column("value", justify="right", no_wrap=True)
    if ranged:
        table.add_column("range", justify="right", no_wrap=True)
    table.add_column("target", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name, case in record["cases"].items():
        if "error" in case:
            cells = [name, escape(case["error"]), "", *([""] if ranged else []), "", "[red]failed[/]"]
            table.add_row(*cells)
        for index, row in enumerate(case.get("rows", ())):
            table.add_row(
                "" if index else name,
                escape(row["what"]),
                value_text(row["value"], row["unit"]),
                *([_range_text(row)] if ranged else []),
                _target_text(row),
                _VERDICTS[row["met"]],
            )
        table.add_section()
    console.print(table)
    commit = where["commit"] or "unknown"
    changed = ", with uncommitted changes" if where["uncommitted_changes"] else ""
    console.print(
        f"{where['cpu']}, {where['cores']} cores, {format_bytes(where['ram_bytes'])} RAM, "
        f"load {where['load_average'][0]:.2f}, torch {where['torch']}, {where['date']}, "
        f"commit {commit}{changed}",
        markup=False,
        highlight=False,
    )
    if record["quick"]:
        console.print(_QUICK[record["benchmark"]], markup=False)


def value_text(value: float | None, unit: str) -> str:
    """Return a figure with its unit, bytes scaled for people; nothing for no figure."""
    if value is None:
        return ""
    if unit == "bytes":
        return format_bytes(round(value))
    if unit == "share":
        return f"{value:.1%}"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,} {unit}"
    return f"{value:.4g} {unit}"


def _range_text(row: Mapping[str, Any]) -> str:
    if "low" not in row:
        return ""
    low, high = (value_text(row[end], row["unit"]).removesuffix(f" {row['unit']}") for end in ("low", "high"))
    return f"{low} - {high}"


def _target_text(row: Mapping[str, Any]) -> str:
    if row["target"] is None:
        return ""
    sign, _, number = row["target"].partition(" ")
    return f"{sign} {value_text(float(number), row['unit'])}"
