"""Display, summary tables and picture, from made-up numbers."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from rich.console import Console

from gemini.jobs.run.display import (
    LineDisplay,
    LiveDisplay,
    ReadingDisplay,
    SilentDisplay,
    duration_text,
    make_display,
)
from gemini.jobs.run.outcome import _draw_device, draw_timeline, phase_spans
from gemini.jobs.run.report import StepReport, TierUse, model_data_ratio, over_budget_note, steady_speed

MIB = 2**20
TIERS = {
    "device": TierUse(12 * MIB, 20 * MIB, 24 * MIB),
    "host": TierUse(0, 0, 0),
    "disk": TierUse(90 * MIB, 90 * MIB, None),
}


def report(step: int, *, seconds: float = 0.5, stalled: float = 0.1) -> StepReport:
    return StepReport(
        step, loss=3.25, lr=1e-3, seconds=seconds, tokens=512, stall_seconds=stalled, tiers=TIERS
    )


def console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=120)


def text_of(screen: Console) -> str:
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def test_live_display_shows_progress_speed_fill_and_stall() -> None:
    display = LiveDisplay(console(terminal=True), steps=40)
    display.step(report(10))
    screen = console(terminal=False)
    screen.print(display.render())
    shown = text_of(screen)
    for part in (
        "step 10/40",
        "loss 3.2500",
        "1,024 tokens/s",
        "15s left",
        "DEVICE",
        "12.0 MiB/24.0 MiB",
        "20% of the last step",
    ):
        assert part in shown
    assert "DISK" in shown
    assert "90.0 MiB" in shown
    assert "HOST" not in shown  # a tier that is not there takes no line


def test_live_display_answers_ctrl_c_before_the_first_step() -> None:
    display = LiveDisplay(console(terminal=True), steps=40)
    display.stopping()
    screen = console(terminal=False)
    screen.print(display.render())
    assert "preparing the first step" in text_of(screen)
    assert "stopping after this step" in text_of(screen)


def test_what_is_done_before_the_first_step_is_shown_as_it_goes_on() -> None:
    lines = console(terminal=False)
    plain, live = LineDisplay(lines, steps=1), LiveDisplay(console(terminal=True), steps=1)
    for done in range(2, 1001, 2):
        plain.progress("pairs", done, 1000)
        live.progress("pairs", done, 1000)
    assert len(text_of(lines).splitlines()) == 20
    assert text_of(lines).endswith("pairs: 1,000/1,000\n")
    screen = console(terminal=False)
    screen.print(live.render())
    assert "pairs: 1,000/1,000" in text_of(screen)


def test_line_display_writes_about_twenty_plain_lines() -> None:
    screen = console(terminal=False)
    with LineDisplay(screen, steps=1000) as display:
        for step in range(1, 1001):
            display.step(report(step))
    lines = text_of(screen).splitlines()
    assert 20 <= len(lines) <= 22
    assert lines[0].startswith("step 1/1000  loss 3.2500")
    assert lines[-1].startswith("step 1000/1000")
    assert "stalled 20%" in lines[0]


def test_display_suits_the_console() -> None:
    assert isinstance(make_display(console(terminal=True), steps=1, quiet=False), LiveDisplay)
    assert isinstance(make_display(console(terminal=False), steps=1, quiet=False), LineDisplay)
    assert type(make_display(console(terminal=True), steps=1, quiet=True)) is SilentDisplay


def test_reading_is_shown_in_a_line_each_half_minute_where_nobody_watches() -> None:
    now = [0.0]
    screen = console(terminal=False)
    with ReadingDisplay(screen, clock=lambda: now[0]) as reading:
        for second in range(0, 100, 7):
            now[0] = second
            reading.show(f"at {second}")
    assert text_of(screen).split("\n") == ["at 35", "at 70", ""]


def test_reading_is_shown_in_a_line_of_a_terminal_that_goes() -> None:
    screen = console(terminal=True)
    with ReadingDisplay(screen) as reading:
        reading.show("line 7 of data.jsonl")
    assert "line 7 of data.jsonl" in text_of(screen)
    assert "\x1b[2K" in text_of(screen)
    silent = console(terminal=True)
    with ReadingDisplay(silent, quiet=True) as reading:
        reading.show("line 7")
    assert text_of(silent) == ""


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0s"), (59.6, "1m00s"), (187, "3m07s"), (7500, "2h05m")])
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_speed_leaves_out_the_step_that_records() -> None:
    speed, stalled = steady_speed([report(1, seconds=50.0), report(2, seconds=1.0), report(3, seconds=1.0)])
    assert speed == pytest.approx(512)
    assert stalled == pytest.approx(0.1)
    assert steady_speed([]) == (0.0, 0.0)


def test_ratio_needs_both_limits() -> None:
    assert model_data_ratio(96, {"device": 16, "host": 8}) == 4.0
    assert model_data_ratio(96, {"device": 16, "host": None}) is None
    assert model_data_ratio(96, {"device": 0, "host": 0}) is None


def test_activations_above_the_budget_are_named_with_the_way_out() -> None:
    (note,) = over_budget_note(timeline(), 4 * MIB)
    assert "DEVICE held 5.0 MiB" in note
    assert "--activation-checkpointing" in note
    assert over_budget_note(timeline(), 5 * MIB) == []
    assert over_budget_note(timeline(), None) == []


def timeline() -> list[dict[str, int | str]]:
    phases = ["forward"] * 4 + ["backward"] * 5 + ["optimizer"] * 2
    return [
        {
            "moment": moment,
            "phase": phase,
            "device_bytes": (moment % 3 + 1) * MIB,
            "host_bytes": 2 * MIB,
            "disk_bytes": 90 * MIB,
            "non_model_bytes": moment * MIB // 4,
        }
        for moment, phase in enumerate(phases)
    ]


def test_phase_spans_cover_the_step() -> None:
    assert phase_spans(timeline()) == [("forward", 0, 3), ("backward", 4, 8), ("optimizer", 9, 10)]


@pytest.mark.parametrize("length", [1, 11])
def test_picture_is_a_png(tmp_path: Path, length: int) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    path = tmp_path / "memory.png"
    assert draw_timeline(path, timeline()[:length], {"device": 4 * MIB, "host": 3 * MIB, "disk": None})
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    assert [entry.name for entry in tmp_path.iterdir()] == ["memory.png"]


@pytest.mark.parametrize("budget", [None, 4 * MIB])
def test_a_line_is_drawn_at_the_budget_that_there_is(budget: int | None) -> None:
    axes = Mock()
    _draw_device(axes, timeline(), budget)
    assert [line.args for line in axes.axhline.call_args_list] == ([] if budget is None else [(4.0,)])


def test_nothing_to_draw_writes_nothing(tmp_path: Path) -> None:
    assert not draw_timeline(tmp_path / "memory.png", [], {})
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not draw_timeline(tmp_path / "memory.png", timeline(), {})
    assert list(tmp_path.iterdir()) == []
