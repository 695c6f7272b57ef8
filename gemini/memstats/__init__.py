"""Memory statistics of an iteration: which chunks are used when, and how much memory non-model data takes."""

from gemini.memstats.collector import MemStatsCollector
from gemini.memstats.trace import Trace

__all__ = [
    "MemStatsCollector",
    "Trace",
]
