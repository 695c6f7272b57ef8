"""Checkpoints: everything a bit-exact resume needs, streamed chunk by chunk, complete or not there."""

from gemini.checkpoint.contents import Scheduler
from gemini.checkpoint.loading import is_complete, load
from gemini.checkpoint.saving import save

__all__ = ["Scheduler", "is_complete", "load", "save"]
