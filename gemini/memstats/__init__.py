"""Memory statistics of one iteration: what is used when, and how much memory is not the model's."""

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
