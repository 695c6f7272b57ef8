"""The outcome of a run: its numbers, the summary file and tables for people, and a picture of the memory on
every tier during one step."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from gemini.errors import IoError
from gemini.jobs.run.display import duration_text
from gemini.jobs.run.report import (
    LINKS,
    TIERS,
    Summary,
    model_data_ratio,
    over_budget_note,
    steady_speed,
    tier_uses,
)
from gemini.jobs.run.run_directory import RunDirectory
from gemini.jobs.run.training import Progress, nothing_left
from gemini.jobs.run.verify import Verdict
from gemini.system.config import format_bytes
from gemini.system.durable import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_LINK_NAMES = {
    "h2d": "HOST to DEVICE",
    "d2h": "DEVICE to HOST",
    "disk_read": "read from DISK",
    "disk_write": "written to DISK",
}


def summary_table(summary: Summary, title: str = "gemini train") -> Table:
    """Return a table of the run, one line per fact."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    table.add_row("parameters", f"{summary.parameters:,}")
    if summary.data is not None:
        table.add_row("data", Text(summary.data))
    table.add_row("model data", format_bytes(summary.model_data_bytes))
    if summary.ratio is not None:
        table.add_row("model data / (DEVICE + HOST)", f"{summary.ratio:.2f} x the budget")
    if summary.trained_steps:
        _add_memory_rows(table, summary)
    table.add_row("steps", _steps_text(summary))
    if summary.first_loss is not None and summary.last_loss is not None:
        table.add_row("loss, first to last", _losses_text(summary))
    if summary.eval_loss is not None:
        table.add_row("held-out loss", f"{summary.eval_loss:.4f}")
    if summary.best_eval_loss is not None:
        table.add_row("lowest held-out loss", f"{summary.best_eval_loss:.4f}, after step {summary.best_step}")
    if summary.trained_steps:
        table.add_row("speed", f"{summary.tokens_per_second:,.0f} tokens/s")
        table.add_row("stalled", f"{summary.stall_share:.1%} of the time")
    if summary.verify is not None:
        table.add_row("verify", verdict_text(summary.verify))
    paths = {"checkpoint": summary.checkpoint, "picture": summary.picture, "model": summary.model}
    for name, value in paths.items():
        if value is not None:
            table.add_row(name, Text(value))  # Text, because rich reads brackets in a str as markup
    for note in summary.notes:
        table.add_row("note", Text(note))
    return table


def _add_memory_rows(table: Table, summary: Summary) -> None:
    for name in TIERS:
        if summary.peak_bytes.get(name, 0) or summary.budget_bytes.get(name):
            table.add_row(f"{name.upper()} peak, model data", _peak_text(summary, name))
    non_model_bytes = summary.peak_non_model_bytes
    measured = "not measured" if non_model_bytes is None else format_bytes(non_model_bytes)
    table.add_row("activations and temporaries, peak", measured)
    for link in LINKS:
        if summary.link_bytes.get(link, 0):
            table.add_row(_LINK_NAMES[link], format_bytes(summary.link_bytes[link]))


def verdict_text(verdict: Verdict) -> str:
    """Return one sentence that tells whether both runs are identical."""
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


def _losses_text(summary: Summary) -> str:
    """Return the first and the last loss as text; a first loss from before the resume is marked."""
    step, earlier = summary.first_loss_step, ""
    if step is not None and step <= summary.first_step:
        earlier = f" (step {step}, before the run was resumed)"
    return f"{summary.first_loss:.4f}{earlier} to {summary.last_loss:.4f}"


def _steps_text(summary: Summary) -> str:
    if not summary.trained_steps:
        if not summary.interrupted:
            return nothing_left(summary.last_step)
        return (
            f"none: interrupted before the first the first; {summary.last_step} were done before"
            if summary.last_step
            else ("none: interrupted before the first")
        )
    resumed = f", resumed after {summary.first_step}" if summary.first_step else ""
    ended = ", interrupted" if summary.interrupted else ""
    return f"{summary.trained_steps} in {duration_text(summary.seconds)}{resumed}{ended}"


PLOT_HINT = "no plot of memory per tier: pip install 'gemini-runtime[plot]' to get one"

_MIB = 2**20
_PHASE_COLORS = {"forward": "#dce9f7", "backward": "#fbe6d4", "optimizer": "#e2f1dc"}
_COLORS = {"device": "#2f6fb0", "non_model": "#9dbfe0", "host": "#2a9d8f", "disk": "#8a4fb0"}


def draw_timeline(
    path: str | os.PathLike[str],
    timeline: Sequence[Mapping[str, Any]],
    budgets: Mapping[str, int | None],
) -> bool:
    """Write ``timeline`` (see ``GeminiDDP.timeline``) as a PNG to ``path``, atomically.

    ``budgets`` are bytes per tier, None without a limit. Return False without writing if matplotlib is not
    installed or there is no complete step. Raise IoError if the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    if not timeline:
        return False
    figure = Figure(figsize=(11, 6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)  # draws without a screen, regardless of the user's backend
    device, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_device(device, timeline, budgets.get("device"))
    _draw_below(below, timeline, budgets)
    for axes in (device, below):
        _shade_phases(axes, timeline)
        axes.set_ylabel("MiB")
        axes.set_ylim(bottom=0)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", frameon=False)
    _name_phases(device, timeline)
    device.set_xlim(0, len(timeline))
    figure.suptitle("memory per tier over one training step")
    below.set_xlabel("moment")
    with replacing(Path(path), "write the plot") as temporary:
        figure.savefig(temporary, format="png")
    return True


def phase_spans(timeline: Sequence[Mapping[str, Any]]) -> list[tuple[str, int, int]]:
    """Return each run of equal phases as its name, first and last index in ``timeline``."""
    spans: list[tuple[str, int, int]] = []
    start = 0
    for phase, group in itertools.groupby(str(entry["phase"]) for entry in timeline):
        length = sum(1 for _ in group)
        spans.append((phase, start, start + length - 1))
        start += length
    return spans


def _draw_device(axes: Axes, timeline: Sequence[Mapping[str, Any]], budget: int | None) -> None:
    moments = range(len(timeline))
    axes.stackplot(
        moments,
        _mib(timeline, "device_bytes"),
        _mib(timeline, "non_model_bytes"),
        labels=("DEVICE: model data", "DEVICE: non-model"),
        colors=(_COLORS["device"], _COLORS["non_model"]),
        step="post",
    )
    if budget is not None:
        axes.axhline(
            budget / _MIB, color="#c0392b", linestyle="--", label=f"DEVICE budget {budget / _MIB:.1f}"
        )


def _draw_below(axes: Axes, timeline: Sequence[Mapping[str, Any]], budgets: Mapping[str, int | None]) -> None:
    for name in ("host", "disk"):
        values, color = _mib(timeline, f"{name}_bytes"), _COLORS[name]
        budget = budgets.get(name)
        if budget == 0 and not any(values):
            continue  # the tier is not used
        axes.plot(range(len(timeline)), values, drawstyle="steps-post", color=color, label=name.upper())
        # A limit far above the use (a whole disk) would flatten the line to the floor.
        if budget and budget / _MIB <= 4 * max(*values, 0.25):
            axes.axhline(
                budget / _MIB, color=color, linestyle="--", label=f"{name.upper()} budget {budget / _MIB:.1f}"
            )


def _shade_phases(axes: Axes, timeline: Sequence[Mapping[str, Any]]) -> None:
    for phase, first, last in phase_spans(timeline):
        axes.axvspan(first, last + 1, color=_PHASE_COLORS.get(phase, "#eeeeee"), zorder=0, linewidth=0)


def _name_phases(axes: Axes, timeline: Sequence[Mapping[str, Any]]) -> None:
    """Write each phase's name above its share of the step; the last one ends with the step."""
    above = axes.get_xaxis_transform()
    for phase, first, last in phase_spans(timeline):
        is_end = first > 0 and last + 1 == len(timeline)
        place, side = (last + 1, "right") if is_end else ((first + last + 1) / 2, "center")
        axes.text(place, 1.01, phase, transform=above, ha=side, va="bottom", fontsize="small")


def _mib(timeline: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [float(entry[key]) / _MIB for entry in timeline]


def _plan_note(stats: Mapping[str, Any]) -> Iterator[str]:
    """Yield the predicted and measured step time and memory, if the run used a plan."""
    predicted, measured = stats.get("predicted"), stats.get("measured")
    if predicted and measured:
        found = f"{measured['step_seconds']:.3g} s"
        if "device_bytes" in measured:
            found += f" and {format_bytes(int(measured['device_bytes']))}"
        yield (
            f"the plan predicted {predicted['step_seconds']:.3g} s per step and "
            f"{format_bytes(int(predicted['device_bytes']))} on DEVICE; the last step took {found}"
        )


def summarize(
    progress: Progress, num_parameters: int, directory: RunDirectory | None, *, interrupted: bool
) -> Summary:
    """Combine the numbers of a run, and draw the picture next to the checkpoint."""
    stats, tiers = progress.stats, tier_uses(progress.stats)
    budgets = {name: tiers[name].budget_bytes if name in tiers else 0 for name in TIERS}
    speed, stall_share = steady_speed(progress.reports)
    picture, notes = None, list(progress.notes)
    if directory is not None and progress.timeline:
        try:
            if draw_timeline(directory.picture, progress.timeline, budgets):
                picture = str(directory.picture)
            else:
                notes.append(PLOT_HINT)
        except IoError as error:
            notes.append(str(error))
    notes += over_budget_note(progress.timeline, budgets["device"])
    notes += _plan_note(stats)
    evaluated = [report.eval_loss for report in progress.reports if report.eval_loss is not None]
    return Summary(
        parameters=num_parameters,
        model_data_bytes=int(stats["model_data_bytes"]),
        budget_bytes=budgets,
        ratio=model_data_ratio(int(stats["model_data_bytes"]), budgets),
        peak_bytes={name: use.peak_bytes for name, use in tiers.items()},
        peak_non_model_bytes=max((int(entry["non_model_bytes"]) for entry in progress.timeline), default=0)
        or None,
        link_bytes={link: int(stats[link]["bytes"]) for link in LINKS},
        first_step=progress.first_step,
        last_step=progress.last_step,
        first_loss=progress.losses.get(min(progress.losses, default=0)),
        last_loss=progress.losses.get(max(progress.losses, default=0)),
        first_loss_step=min(progress.losses) + 1 if progress.losses else None,
        eval_loss=evaluated[-1] if evaluated else None,
        tokens=sum(report.tokens for report in progress.reports),
        seconds=sum(report.seconds for report in progress.reports),
        tokens_per_second=speed,
        stall_share=stall_share,
        interrupted=interrupted,
        checkpoint=None if directory is None else str(directory.checkpoint),
        picture=picture,
        notes=tuple(notes),
    )


_OF_THE_END = ("model", "best_eval_loss", "best_step", "verify")


def written(summary: Summary, progress: Progress, directory: RunDirectory | None) -> Summary:
    """Write the summary into the run's directory, and return it, with a note if writing failed."""
    if directory is None:
        return summary
    found = summary.to_dict()
    try:
        if progress.reports or not directory.summary.exists():
            directory.write_summary(found)
        elif not summary.interrupted:  # the numbers stay those of the trained steps; now the run has ended
            ended = {name: found[name] for name in _OF_THE_END if found[name] is not None}
            directory.add_to_summary({**ended, "interrupted": False})
    except IoError as error:
        return replace(summary, notes=(*summary.notes, str(error)))
    return summary
