"""What a run has come to, put together: numbers, the picture, the summary's file."""

from __future__ import annotations

from dataclasses import replace

from gemini.errors import IoError
from gemini.jobs.run.picture import PLOT_HINT, draw_timeline
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
from gemini.jobs.run.training import Progress


def summarize(
    progress: Progress, num_parameters: int, directory: RunDirectory | None, *, interrupted: bool
) -> Summary:
    """Put the numbers together and draw the picture next to the checkpoint."""
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


def written(summary: Summary, progress: Progress, directory: RunDirectory | None) -> Summary:
    """Write the summary into the run's directory; return it, with a note where that failed."""
    if directory is None or not progress.reports:  # then there is that of the steps that were trained
        return summary
    try:
        directory.write_summary(summary.to_dict())
    except IoError as error:
        return replace(summary, notes=(*summary.notes, str(error)))
    return summary
