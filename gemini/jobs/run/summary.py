"""The summary of a run as tables for people."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from gemini.jobs.run.display import duration_text
from gemini.jobs.run.report import LINKS, TIERS, Summary
from gemini.jobs.run.verify import Verdict
from gemini.system.config import format_bytes

_LINK_NAMES = {
    "h2d": "HOST to DEVICE",
    "d2h": "DEVICE to HOST",
    "disk_read": "read from DISK",
    "disk_write": "written to DISK",
}


def summary_table(summary: Summary, title: str = "gemini train") -> Table:
    """Return what the run did, one line per fact."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    table.add_row("parameters", f"{summary.parameters:,}")
    table.add_row("model data", format_bytes(summary.model_data_bytes))
    if summary.ratio is not None:
        table.add_row("model data / (DEVICE + HOST)", f"{summary.ratio:.2f} x the budget")
    for name in TIERS:
        if summary.peak_bytes.get(name, 0) or summary.budget_bytes.get(name):
            table.add_row(f"{name.upper()} peak, model data", _peak_text(summary, name))
    non_model_bytes = summary.peak_non_model_bytes
    measured = "not measured" if non_model_bytes is None else format_bytes(non_model_bytes)
    table.add_row("activations and temporaries, peak", measured)
    for link in LINKS:
        if summary.link_bytes.get(link, 0):
            table.add_row(_LINK_NAMES[link], format_bytes(summary.link_bytes[link]))
    table.add_row("steps", _steps_text(summary))
    if summary.first_loss is not None and summary.last_loss is not None:
        table.add_row("loss, first to last", f"{summary.first_loss:.4f} to {summary.last_loss:.4f}")
    if summary.eval_loss is not None:
        table.add_row("loss on what is held out", f"{summary.eval_loss:.4f}")
    table.add_row("speed", f"{summary.tokens_per_second:,.0f} tokens/s")
    table.add_row("stalled", f"{summary.stall_share:.1%} of the time")
    if summary.verify is not None:
        table.add_row("verify", verdict_text(summary.verify))
    paths = {"checkpoint": summary.checkpoint, "picture": summary.picture, "model": summary.model}
    for name, value in paths.items():
        if value is not None:
            table.add_row(name, Text(value))  # as it stands: brackets would be taken for markup
    for note in summary.notes:
        table.add_row("note", Text(note))
    return table


def verdict_text(verdict: Verdict) -> str:
    """Return one sentence that says whether both runs are identical."""
    if verdict.identical:
        return (
            f"identical to the unmanaged run: {verdict.losses_compared} losses, "
            f"{verdict.weights_compared} weights, bit for bit"
        )
    return (
        f"DIFFERENT from the unmanaged run: {verdict.losses_different} of {verdict.losses_compared} losses, "
        f"{verdict.weights_different} of {verdict.weights_compared} weights"
    )


def difference_table(verdict: Verdict) -> Table:
    """Return the first differences, one per line."""
    table = Table(title="first differences", title_justify="left")
    for heading in ("what", "managed", "unmanaged", "largest distance"):
        table.add_column(heading, overflow="fold")
    for difference in verdict.differences:
        table.add_row(
            Text(difference.name), difference.managed, difference.unmanaged, f"{difference.max_abs:.3e}"
        )
    return table


def _peak_text(summary: Summary, name: str) -> str:
    budget = summary.budget_bytes.get(name)
    limit = "no limit" if budget is None else f"budget {format_bytes(budget)}"
    return f"{format_bytes(summary.peak_bytes.get(name, 0))} ({limit})"


def _steps_text(summary: Summary) -> str:
    count = summary.last_step - summary.first_step
    resumed = f", resumed after {summary.first_step}" if summary.first_step else ""
    ended = ", interrupted" if summary.interrupted else ""
    return f"{count} in {duration_text(summary.seconds)}{resumed}{ended}"
