"""The gates of this process's models: whose an address is; a fork ends the use of all; after the last one
classes are again what they were."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable

import torch

from gemini.runtime.gate.gate import Gate

_living: weakref.WeakSet[Gate] = weakref.WeakSet()
_undo: list[Callable[[], None]] = []


def remember(gate: Gate) -> None:
    """Count ``gate`` among the living for as long as it is one: until neither its model nor a managed tensor,
    which refuses use once the model is closed, is left."""
    weakref.finalize(gate, _one_is_gone).atexit = False
    _living.add(gate)


def at_the_last(undo: Callable[[], None]) -> None:
    """Have ``undo`` called once, as soon as no gate lives."""
    _undo.append(undo)


def _one_is_gone() -> None:
    if next(iter(_living), None) is None:
        while _undo:
            _undo.pop()()


def others(gate: Gate) -> list[Gate]:
    """Return the gates of all other models."""
    return [other for other in _living if other is not gate]


def parameter_at(address: int) -> torch.nn.Parameter | None:
    """Return the managed parameter, of a model that is not closed, in whose memory ``address`` lies."""
    for gate in list(_living):
        if address in gate.windows and not gate.is_closed:
            return gate.parameters.at(address)
    return None


def _after_fork_in_child() -> None:
    for gate in _living:
        gate.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork_in_child)
