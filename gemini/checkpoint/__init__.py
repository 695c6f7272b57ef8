"""Checkpoints: everything that a bit-exact resume needs, streamed chunk by chunk, and either complete or
absent.
"""

from gemini.checkpoint.async_saving import SaveHandle, save_async
from gemini.checkpoint.directory import latest
from gemini.checkpoint.loading import CheckpointReader, is_complete, load
from gemini.checkpoint.saving import new_checkpoint, save
from gemini.comm.ranks import Rank

__all__ = [
    "CheckpointReader",
    "Rank",
    "SaveHandle",
    "is_complete",
    "latest",
    "load",
    "new_checkpoint",
    "save",
    "save_async",
]
