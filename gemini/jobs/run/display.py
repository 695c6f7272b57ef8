"""Shows the progress of a run to people: a live panel on a terminal, occasional plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.status import Status
from rich.table import Table
from rich.text import Text

from gemini.jobs.run.report import StepReport, TierUse
from gemini.system.config import format_bytes

STOPPING = "stopping after this step; a second signal stops at once and loses unsaved steps"
_RECENT_STEPS = 20
_PLAIN_LINES = 20
_BAR_WIDTH = 32
SECONDS_OF_A_LINE = 30.0  # interval of lines while data is read
_TIER_STYLES = {"device": "green", "host": "cyan", "disk": "magenta"}


class Display(Protocol):
    """Receives the progress of a run. A context manager around the whole run."""

    def __enter__(self) -> Display:
        """Take the screen."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give the screen back."""

    def note(self, text: str) -> None:
        """Show a message that stays on the screen."""

    def progress(self, what: str, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` are finished, before the first step."""

    def step(self, report: StepReport) -> None:
        """Show a finished training step."""

    def stopping(self) -> None:
        """Announce that the run ends after this step. Safe within a signal handler."""

    def verifying(self, step: int) -> None:
        """Show that the unmanaged run has finished ``step`` (from 1)."""


class SilentDisplay:
    """Shows only the answer to Ctrl-C."""

    def __enter__(self) -> SilentDisplay:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return

    def note(self, text: str) -> None:
        """Do nothing."""

    def progress(self, what: str, done: int, total: int) -> None:
        """Do nothing."""

    def step(self, report: StepReport) -> None:
        """Do nothing."""

    def stopping(self) -> None:
        """Write one line directly to descriptor 2: the handler may have interrupted a buffered write to the
        same stream."""
        if sys.stderr is not None:  # otherwise descriptor 2 may be some other file
            with suppress(OSError):
                os.write(2, f"{STOPPING}\n".encode("ascii"))

    def verifying(self, step: int) -> None:
        """Do nothing."""


class LineDisplay(SilentDisplay):
    """Writes about twenty lines per run, for logs and pipes."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._every = max(1, steps // _PLAIN_LINES)
        self._twentieths = 0  # finished twentieths of the work before the first step

    def note(self, text: str) -> None:
        """Write ``text`` as a line."""
        self._write(text)

    def progress(self, what: str, done: int, total: int) -> None:
        """Write a line for each twentieth."""
        twentieths = done * _PLAIN_LINES // total
        if twentieths > self._twentieths:
            self._write(f"{what}: {done:,}/{total:,}")
        self._twentieths = twentieths

    def step(self, report: StepReport) -> None:
        """Write a line for the first, the last and every n-th step."""
        if not self._is_due(report.step) and report.eval_loss is None:
            return
        tiers = "  ".join(f"{name} {fill_text(use)}" for name, use in report.tiers.items())
        self._write(
            f"step {report.step}/{self._steps}  loss {loss_text(report)}  lr {report.lr:.2e}  "
            f"{report.tokens_per_second:,.0f} tokens/s  stalled {report.stall_share:.0%}  {tiers}"
        )

    def verifying(self, step: int) -> None:
        """Write a line for the first, the last and every n-th step of the unmanaged run."""
        if self._is_due(step):
            self._write(f"verify: unmanaged step {step}/{self._steps}")

    def _is_due(self, step: int) -> bool:
        return step in (1, self._steps) or step % self._every == 0

    def _write(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


class LiveDisplay:
    """Redraws one panel in place: progress, loss, speed and the fill of every tier."""

    def __init__(self, console: Console, steps: int) -> None:
        self._steps = steps
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._report: StepReport | None = None
        self._doing = "preparing the first step ..."
        self._verified = 0
        self._stopping = False
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self.render)

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.stop()

    def note(self, text: str) -> None:
        """Write ``text`` above the panel."""
        self._live.console.print(text, highlight=False, markup=False)

    def progress(self, what: str, done: int, total: int) -> None:
        """Show the progress at the next refresh."""
        self._doing = f"{what}: {done:,}/{total:,}"

    def step(self, report: StepReport) -> None:
        """Show ``report`` at the next refresh."""
        self._recent.append(report.seconds)
        self._report = report

    def stopping(self) -> None:
        """Show the message at the next refresh."""
        self._stopping = True

    def verifying(self, step: int) -> None:
        """Show the progress of the unmanaged run at the next refresh."""
        self._verified = step

    def render(self) -> RenderableType:
        """Return the current panel."""
        report = self._report
        parts: list[RenderableType] = []
        if report is None:
            parts.append(Text(self._doing, style="dim"))
        else:
            parts += [self._progress(report), _tier_table(report)]
        if self._verified:
            parts.append(Text(f"verify: unmanaged step {self._verified}/{self._steps}", style="yellow"))
        if self._stopping:
            parts.append(Text(STOPPING, style="bold red"))
        return Group(*parts)

    def _progress(self, report: StepReport) -> RenderableType:
        left = (self._steps - report.step) * sum(self._recent) / max(1, len(self._recent))
        grid = Table.grid(padding=(0, 2))
        grid.add_row(
            Text(f"step {report.step}/{self._steps}", style="bold"),
            ProgressBar(total=self._steps, completed=report.step, width=_BAR_WIDTH),
            Text(f"loss {loss_text(report)}", style="bold yellow"),
            f"{report.tokens_per_second:,.0f} tokens/s",
            f"{duration_text(left)} left",
        )
        return grid


class ReadingDisplay:
    """Shows the progress of reading the data, before steps are displayed. A context manager.

    On a terminal it updates one line. Elsewhere it prints a line every :data:`SECONDS_OF_A_LINE`, so none if
    reading is short. ``quiet``: show nothing.
    """

    def __init__(
        self, console: Console, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._quiet = quiet
        self._clock = clock
        self._due = clock() + SECONDS_OF_A_LINE
        self._status = Status("reading the data", console=console)
        self._is_live = console.is_terminal and not quiet

    def __enter__(self) -> ReadingDisplay:
        if self._is_live:
            self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_live:
            self._status.stop()

    def show(self, text: str) -> None:
        """Show ``text``, the current progress."""
        if self._is_live:
            self._status.update(Text(text, style="dim"))
        elif not self._quiet and self._clock() >= self._due:
            self._due = self._clock() + SECONDS_OF_A_LINE
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def make_display(console: Console, *, steps: int, quiet: bool) -> Display:
    """Return the display that suits ``console``."""
    if quiet:
        return SilentDisplay()
    return LiveDisplay(console, steps) if console.is_terminal else LineDisplay(console, steps)


def loss_text(report: StepReport) -> str:
    """Return the loss of a step as text, with the held-out loss if it is known."""
    held_out = "" if report.eval_loss is None else f" (held out {report.eval_loss:.4f})"
    return f"{report.loss:.4f}{held_out}"


def fill_text(use: TierUse) -> str:
    """Return ``12.0 MiB/24.0 MiB``, or only the first part if there is no limit."""
    limit = "" if use.budget_bytes is None else f"/{format_bytes(use.budget_bytes)}"
    return format_bytes(use.nbytes) + limit


def duration_text(seconds: float) -> str:
    """Return a duration as ``42s``, ``3m07s`` or ``2h05m``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def _tier_table(report: StepReport) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    for name, use in report.tiers.items():
        if use.budget_bytes == 0 and use.nbytes == 0:
            continue
        total = use.budget_bytes or max(use.peak_bytes, 1)
        bar = ProgressBar(
            total=total,
            completed=use.nbytes,
            width=_BAR_WIDTH,
            complete_style=_TIER_STYLES.get(name, "green"),
        )
        grid.add_row(name.upper(), bar, fill_text(use))
    share = report.stall_share
    stalled = ProgressBar(total=1.0, completed=share, width=_BAR_WIDTH, complete_style="red")
    grid.add_row("stalled", stalled, f"{share:.0%} of the last step, lr {report.lr:.2e}")
    return grid
