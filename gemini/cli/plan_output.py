"""Prints a forecast for people."""

from __future__ import annotations

from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from gemini.cli.console import Console
from gemini.cli.options import with_options
from gemini.forecast.forecast import StepTime
from gemini.forecast.report import Report, Wear
from gemini.memstats.collectives import CollectiveSpeeds
from gemini.system.config import format_bytes

_WORDS = {
    "compute": "forward and backward",
    "Adam": "the optimizer's update",
    "h2d": "HOST to DEVICE",
    "d2h": "DEVICE to HOST",
    "disk_read": "reading from DISK",
    "disk_write": "writing to DISK",
    "disk": "DISK, reading and writing",
}


def render(report: Report, console: Console) -> None:
    """Print the verdict, the obstacles, and the numbers."""
    console.print(_verdict(report))
    console.print(_sizes(report))
    console.print(_peaks_note(report), highlight=False)
    if report.step is not None:
        console.print(_times(report, report.step))
        console.print(_advice(report, report.step))
        console.print("\nTo train like this:\n")
        console.print(Syntax(report.code(), "python", background_color="default", word_wrap=True))


def render_collectives(speeds: CollectiveSpeeds, console: Console) -> None:
    """Print the speeds of collectives."""
    table = Table(title="between ranks", title_justify="left", box=None)
    for name in ("collective", "ranks", "latency", "speed", "1 MiB takes"):
        table.add_column(name, justify="left" if name == "collective" else "right")
    for each in speeds.records:
        table.add_row(
            each.kind,
            str(each.ranks),
            f"{each.latency_seconds.value * 1e3:.3f} ms",
            f"{format_bytes(int(each.bytes_per_second.value))}/s",
            f"{each.seconds(2**20) * 1e3:.2f} ms",
        )
    console.print(table)


def _verdict(report: Report) -> Panel:
    settings = report.settings
    source = report.source
    what = f"{source.name}, {report.num_parameters / 1e6:,.1f} M parameters"
    if report.quantized_bytes:
        what += f" and {format_bytes(report.quantized_bytes)} of quantized weights"
    what += f", batch {settings.batch}"
    if source.unit != "samples":
        what += f" of {source.tokens:,} {source.unit}"
    lines = Text()
    if report.fits:
        lines.append("It fits.", style="bold green")
        lines.append(f" Largest batch that fits: {report.largest_batch}.")
    else:
        lines.append("It does not fit.", style="bold red")
        for obstacle in report.obstacles:
            lines.append(f"\n- {with_options(obstacle)}")
        if not report.largest_batch:
            lines.append("\nNo batch size fits these budgets.")
    for note in report.notes:
        lines.append(f"\n{note}")
    return Panel(lines, title=what, title_align="left", expand=False)


def _sizes(report: Report) -> Table:
    """Return a table of the memory that the step needs."""
    table = Table(title="memory", title_justify="left", box=None)
    for name in ("what", "bytes", "budget"):
        table.add_column(name, justify="left" if name == "what" else "right")
    table.add_row("all model data", format_bytes(report.forecast.blueprint.context.size.total_bytes), "")
    peaks = {} if report.step is None else report.step.plan.simulation.peak_bytes
    for tier, budget in report.budgets.items():
        if budget:
            peak = format_bytes(peaks[tier]) if tier in peaks else "-"
            table.add_row(f"{tier.upper()} peak, model data", peak, format_bytes(budget))
    activations = format_bytes(report.forecast.non_model_bytes)
    table.add_row("DEVICE peak, activations and temporaries", activations, "")
    return table


def _peaks_note(report: Report) -> str:
    """Return a sentence about how the peaks relate."""
    device_bytes = format_bytes(report.budgets["device"])
    if report.step is None:
        return f"No step was simulated. Model data and activations share the DEVICE budget of {device_bytes}."
    note = (
        "The two peaks on DEVICE may be at different moments; model data, activations and "
        f"temporaries together never exceed {device_bytes}."
    )
    if sum(map(bool, report.budgets.values())) > 1:
        note += (
            " The tiers may add up to more than all model data, because a chunk may have copies on two tiers."
        )
    return note


def _times(report: Report, step: StepTime) -> Table:
    table = Table(title=f"\none step: {_seconds(step.seconds)}", title_justify="left", box=None)
    table.add_column("busy")
    table.add_column("time", justify="right")
    table.add_column("bytes", justify="right")
    moved = dict(step.plan.simulation.link_bytes)
    moved["disk"] = moved.get("disk_read", 0) + moved.get("disk_write", 0)
    for name, seconds in sorted(step.busy_seconds.items(), key=lambda item: -item[1]):
        style = "bold yellow" if name == step.bound else ""
        nbytes = format_bytes(moved[name]) if moved.get(name) else ""
        table.add_row(_WORDS[name], _seconds(seconds), nbytes, style=style)
    rate = report.units_per_step / step.seconds if step.seconds else 0.0
    table.add_row("throughput", f"{rate:,.4g} {report.source.unit}/s", "")
    return table


def _advice(report: Report, step: StepTime) -> Text:
    text = Text("\n")
    text.append(f"Bound by {_WORDS[step.bound]}", style="bold")
    text.append(
        f"; plan {step.plan.name!r}. The lower bound of any plan is {_seconds(step.plan.bound_seconds)}.\n"
    )
    units, unit = report.units_to_compute_bound, report.source.unit
    if units is not None:
        now = report.settings.batch * report.source.tokens
        verdict = "enough" if now >= units else "too few"
        text.append(
            f"Computing hides all transfers from about {units:,} {unit} per forward pass; this step "
            f"has {now:,}, which is {verdict}.\n"
        )
    if report.wear is not None:
        text.append(_wear(report.wear))
    text.append(_sureness(report, step))
    return text


def _wear(wear: Wear) -> str:
    return (
        f"Each step writes {format_bytes(wear.step_bytes)} to disk: a drive rated for "
        f"{wear.tbw_bytes / 1e12:,.0f} TB lasts {wear.steps:,.0f} steps, {wear.days:,.1f} days of "
        "training.\n"
    )


def _sureness(report: Report, step: StepTime) -> str:
    """Return a sentence about how reliable the times are."""
    if not report.settings.sample_seconds:
        return (
            f"Times are estimated from the speeds of {report.settings.machine.name!r}; nothing was timed.\n"
        )
    guesses = report.forecast.rehearsal.num_guesses
    note = f" The model read {guesses} truth values; the plan assumes that each is true." if guesses else ""
    return (
        f"{step.sampled_share:.0%} of the compute time is from operators timed on this machine; the "
        f"rest is estimated.{note}\n"
    )


def _seconds(seconds: float) -> str:
    if seconds >= 120:
        return f"{seconds / 60:,.1f} min"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
