"""Helpers for pipeline stages that a program builds itself."""

from __future__ import annotations

from gemini.parallel.launch import global_context
from gemini.parallel.pipeline import SharedParameters


def PipelineSharedModuleWrapper(pipeline_ranks: list[int]) -> SharedParameters:
    """Return an object that shares parameters among these ranks of the launched run's pipelines."""
    return SharedParameters(global_context.mesh.axis("pp"), pipeline_ranks)
