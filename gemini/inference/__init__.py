"""Inference for models that need not fit in memory: requests, and an engine that batches them.

Imported on use: ``from gemini.inference import Engine, Request``.
"""

from __future__ import annotations

from gemini.inference.engine import Engine
from gemini.inference.request import Answer, Generation, QueueFullError, Request

__all__ = ["Answer", "Engine", "Generation", "QueueFullError", "Request"]
