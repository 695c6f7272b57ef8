"""A picture of one step: who held how much memory on which tier, moment by moment."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemini.system.durable import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOT_HINT = "no picture of memory per tier: pip install 'gemini-runtime[plot]' draws it next time"

_MIB = 2**20
_PHASE_COLORS = {"forward": "#dce9f7", "backward": "#fbe6d4", "optimizer": "#e2f1dc"}
_COLORS = {"device": "#2f6fb0", "non_model": "#9dbfe0", "host": "#2a9d8f", "disk": "#8a4fb0"}


def draw_timeline(
    path: str | os.PathLike[str],
    timeline: Sequence[Mapping[str, Any]],
    budgets: Mapping[str, int | None],
) -> bool:
    """Write ``timeline`` (see ``GeminiDDP.timeline``) as a PNG to ``path``, whole or not at all.

    ``budgets`` are bytes per tier, None without a limit. Return False, having written nothing, if matplotlib
    is not installed or there is no complete step to draw. Raise IoError where the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    if not timeline:
        return False
    figure = Figure(figsize=(11, 6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)  # draws without a screen, whatever backend the user has chosen
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
    with replacing(Path(path), "write the picture") as temporary:
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
            continue  # a tier that is not there
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
