"""The record of ``gemini bench exact`` as a table: for a terminal, and as Markdown for the pages.

``python -m gemini_bench.exact_table RECORD`` prints the latter.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gemini_bench.exact_contenders import CONTENDERS
from gemini_bench.exact_settings import SETTINGS

SAME = "same bits"
_VERDICTS = {True: "[green]met[/]", False: "[red]missed[/]", None: ""}


def render(record: Mapping[str, Any], console: Console) -> None:
    """Print one line per setting and contender, with its targets."""
    table = Table(title="gemini bench exact: largest difference from plain torch", title_justify="left")
    table.add_column("setting", style="bold", overflow="fold")
    table.add_column("contender", overflow="fold")
    for name in ("loss", "relative", "weights", "relative"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("same bits", no_wrap=True)
    for name, case in record["cases"].items():
        title = SETTINGS[name].title
        if "error" in case:
            table.add_row(title, escape(case["error"]), "", "", "", "", "[red]failed[/]")
        for index, row in enumerate(case.get("rows", ())):
            table.add_row("" if index else title, *_cells(row))
        table.add_section()
    console.print(table)
    where = record["environment"]
    commit = where["commit"] or "unknown"
    changed = ", with uncommitted changes" if where["uncommitted_changes"] else ""
    console.print(
        f"{where['cpu']}, torch {where['torch']}, {where['date']}, commit {commit}{changed}",
        markup=False,
        highlight=False,
    )
    if record["quick"]:
        console.print("--quick: few steps of a tiny model; these figures say only that the cases run.")


def _cells(row: Mapping[str, Any]) -> list[str]:
    if row["value"] is None:
        return [f"{row['what']} {escape(row['absent'])}", "", "", "", "", ""]
    if row["same_bits"]:
        return [escape(row["what"]), "0", "0", "0", "0", f"yes {_VERDICTS[row['met']]}".strip()]
    figures = [f"{row[key]:.1e}" for key in ("loss", "loss_relative", "weights", "weights_relative")]
    return [escape(row["what"]), *figures, f"no {_VERDICTS[row['met']]}".strip()]


def markdown(record: Mapping[str, Any]) -> str:
    """Return the table of all settings by contender, with numbered reasons for what has no number.

    A cell has the relative difference of losses, then of weights; in brackets that from the twin.
    """
    reasons: dict[str, int] = {}
    lines = ["| | " + " | ".join(CONTENDERS) + " |", "|---" * (len(CONTENDERS) + 1) + "|"]
    for name, case in record["cases"].items():
        rows = case.get("rows", ())
        cells = [_cell(who, rows, reasons) for who in CONTENDERS]
        lines.append(f"| {SETTINGS[name].title} | " + " | ".join(cells) + " |")
    notes = [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join([*lines, "", *notes])


def _cell(who: str, rows: Sequence[Mapping[str, Any]], reasons: dict[str, int]) -> str:
    mine = [row for row in rows if row["what"] == who]
    if not mine:
        return ""
    if mine[0]["value"] is None:
        return f"none ({reasons.setdefault(f'{who} ' + mine[0]['absent'], len(reasons) + 1)})"
    twins = [row for row in rows if row["what"].startswith(f"{who}, from plain torch")]
    return _figure(mine[0]) + (f" [{_figure(twins[0])}]" if twins else "")


def _figure(row: Mapping[str, Any]) -> str:
    return SAME if row["same_bits"] else f"{row['loss_relative']:.0e}, {row['weights_relative']:.0e}"


if __name__ == "__main__":
    sys.stdout.write(markdown(json.loads(Path(sys.argv[1]).read_text())) + "\n")
