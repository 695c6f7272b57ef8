"""The managers of this process: a fork ends the use of all."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

from gemini.runtime import unusable
from gemini.runtime.snapshot import NO_SNAPSHOT

if TYPE_CHECKING:
    from gemini.runtime.gemini_mgr import GeminiManager

_living: weakref.WeakSet[GeminiManager] = weakref.WeakSet()


def remember(manager: GeminiManager) -> None:
    """Count ``manager`` among the living for as long as it is one."""
    _living.add(manager)


def others(manager: GeminiManager) -> list[GeminiManager]:
    """Return the managers of all other models."""
    return [other for other in _living if other is not manager]


def owner_of(address: int) -> GeminiManager | None:
    """Return the manager of the model, not a closed one, in whose windows ``address`` lies."""
    for manager in list(_living):
        if manager.in_windows(address) and manager.pre_op is not unusable.closed:
            return manager
    return None


def _after_fork_in_child() -> None:
    for manager in _living:
        manager.resident = False
        manager.snapshot = NO_SNAPSHOT  # its thread is in the parent
        manager.pending.clear()
        manager.pre_op = manager.recover = unusable.in_child  # type: ignore[method-assign, assignment]


os.register_at_fork(after_in_child=_after_fork_in_child)
