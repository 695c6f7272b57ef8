"""Recorded steps: what happened when, as data, as a trace file and as an HTML page."""

from gemini.timeline.event_recorder import TimelineRecorder
from gemini.timeline.events import Timeline
from gemini.timeline.summary import StepSummary, summarize

__all__ = [
    "StepSummary",
    "Timeline",
    "TimelineRecorder",
    "summarize",
]
