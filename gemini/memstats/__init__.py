"""Memory statistics of an iteration: which chunks are used when, and how much memory non-model data takes."""

from gemini.memstats.collector import MemStatsCollector
from gemini.memstats.monitor import FakeMonitor, MemoryMonitor, ProcessMonitor
from gemini.memstats.trace import LINKS, LinkSpeed, Trace

__all__ = [
    "LINKS",
    "FakeMonitor",
    "LinkSpeed",
    "MemStatsCollector",
    "MemoryMonitor",
    "ProcessMonitor",
    "Trace",
]
