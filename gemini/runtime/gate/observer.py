"""Callbacks of a GeminiManager for observers of a step."""

from __future__ import annotations

from typing import Protocol

from gemini.chunk import ChunkObserver
from gemini.runtime.gate.pending import PendingUpdate


class StepObserver(ChunkObserver, Protocol):
    """Is also told where steps begin and end, and runs the updates that were put off.

    Called on the thread that trains; it must leave the manager alone.
    """

    def step_begins(self, number: int) -> None:
        """Step ``number``, from 1, begins with a forward pass."""

    def step_ended(self) -> None:
        """The optimizer has ended a step; planning, which belongs to none, may follow."""

    def step_settled(self) -> None:
        """All that follows from the step is done."""

    def run_update(self, update: PendingUpdate) -> None:
        """Run ``update``, and let pass what it raises."""
