"""Recorded steps: what happened when, as data, as a trace file and as an HTML page."""

from gemini.timeline.event_recorder import TimelineRecorder
from gemini.timeline.events import (
    Fill,
    Operator,
    Phase,
    StepSpan,
    Timeline,
    Transfer,
    Update,
    Wait,
    WaitShare,
)
from gemini.timeline.summary import LinkUse, StepSummary, summarize

__all__ = [
    "Fill",
    "LinkUse",
    "Operator",
    "Phase",
    "StepSpan",
    "StepSummary",
    "Timeline",
    "TimelineRecorder",
    "Transfer",
    "Update",
    "Wait",
    "WaitShare",
    "summarize",
]
