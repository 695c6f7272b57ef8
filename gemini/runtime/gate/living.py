"""The gates of this process's models: whose an address is; a fork ends the use of all."""

from __future__ import annotations

import os
import weakref

import torch

from gemini.runtime.gate.gate import Gate

_living: weakref.WeakSet[Gate] = weakref.WeakSet()


def remember(gate: Gate) -> None:
    """Count ``gate`` among the living for as long as it is one."""
    _living.add(gate)


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
