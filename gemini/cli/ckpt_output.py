"""Checkpoints for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from gemini.cli.console import Console
from gemini.system.config import format_bytes

_SETTINGS = ("lr", "betas", "eps", "weight_decay")
_WIDTH = 110  # where nobody says how many columns there are


def render_checkpoints(found: Sequence[Mapping[str, Any]]) -> None:
    """Print one line per checkpoint, and what is in the first, the newest."""
    console = _console()
    if found:
        console.print(f"{escape(str(Path(found[0]['path']).parent))}, newest first:", soft_wrap=True)
    table = Table(box=None)
    table.add_column("checkpoint", no_wrap=True)
    for name in ("step", "size", "files", "ranks"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for entry in found:
        if entry["damage"] is not None:
            table.add_row(Path(entry["path"]).name, "", "", "", "", f"[red]{escape(entry['damage'])}[/]")
        else:
            cells = [
                f"{entry['step']:,}",
                format_bytes(entry["bytes"]),
                str(entry["files"]),
                str(entry["ranks"]),
            ]
            table.add_row(Path(entry["path"]).name, *cells, "")
    console.print(table)
    whole = next((entry for entry in found if entry["damage"] is None), None)
    if whole is not None:
        console.print(_details(whole))


def render_verdicts(found: Sequence[Mapping[str, Any]]) -> None:
    """Print one line per checkpoint."""
    console = _console()
    for entry in found:
        if entry["damage"] is None:
            console.print(f"[green]whole[/]    {escape(entry['path'])}, {format_bytes(entry['bytes'])}")
        else:
            console.print(f"[red]damaged[/]  {escape(entry['damage'])}")


def _details(entry: Mapping[str, Any]) -> Table:
    table = Table(title=f"\n{Path(entry['path']).name}", title_justify="left", box=None, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    states = f"{entry['num_states']} with optimizer states"
    table.add_row("parameters", f"{entry['num_parameters']:,} in {entry['num_tensors']} tensors, {states}")
    for alias, stored in entry["aliases"].items():
        table.add_row("tied", escape(f"{alias} is {stored}"))
    table.add_row("buffers", str(entry["num_buffers"]))
    for index, group in enumerate(entry["param_groups"]):
        settings = ", ".join(f"{key} {group[key]}" for key in _SETTINGS if key in group)
        table.add_row(f"group {index}", escape(f"{group['num_tensors']} tensors: {settings}"))
    if entry["loss_scale"] is not None:
        table.add_row("loss scale", escape(str(entry["loss_scale"])))
    table.add_row("scheduler", "yes" if entry["scheduler"] else "no")
    if entry["extra"]:
        table.add_row("extra", escape(str(entry["extra"])))
    return table


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)
