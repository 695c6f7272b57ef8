"""The table of an optimizer's parameters whose states are in memory, kept from step to step.

A model has thousands of small tensors; checking each one's state, type and order anew would cost far more
than updating it. So rows are built once, with every check, and a step only verifies that nothing they rely
on has been replaced, and fills in the gradients' addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch

from gemini import _C

from .kernels import GRAD_COLUMN, STEP_COLUMN, AdamHyper, AdamStep, GradScale, Row, make_row, run_rows
from .state_format import ARRAYS, StateFormat


@dataclass(frozen=True)
class Member:
    """A parameter to update; ``group`` is its index in ``param_groups``, ``grad`` in its memory order."""

    param: torch.Tensor
    grad: torch.Tensor
    group: int
    state: dict[str, Any]


class StepRows:
    """Rows of parameters on one device, whose states are complete.

    Every state's ``step`` becomes an element of one tensor, so that counting a step is one operation. The
    elements are independent: setting one changes no other.
    """

    def __init__(
        self, members: Sequence[Member], state_format: StateFormat, all_states: dict[torch.Tensor, Any]
    ) -> None:
        """Build the table of ``members``, of which there is at least one; all have been checked.

        ``all_states`` are the optimizer's, by parameter.
        """
        self.device = members[0].param.device
        self._groups = np.array([member.group for member in members], dtype=np.int64)
        counts = torch.tensor([float(member.state["step"]) for member in members])
        for member, count in zip(members, counts.unbind(), strict=True):
            _move_step(member.state, count)
        self._counts = counts.numpy()
        self._table = np.array([_row(member, state_format) for member in members], dtype=np.int64)
        self._grads = [member.grad for member in members]  # some may be copies
        # The watch compares identities and holds nothing: what it knows must not go away before it does.
        params, states = [member.param for member in members], [member.state for member in members]
        others = list(all_states.values())
        self._kept = (params, states, [list(state.values()) for state in states], others)
        self._watch = _C.TensorWatch(params, states, ["step", *ARRAYS], self._grads, others)

    def __len__(self) -> int:
        return len(self._table)

    def take_gradients(
        self, params: Sequence[list[torch.Tensor]], all_states: dict[torch.Tensor, Any]
    ) -> bool:
        """Take the addresses of the gradients of ``params``, those to update by group, into the table.

        False when they are not what the rows were built for: a parameter moved to another group, one, a
        state, a tensor of one or its memory was replaced, or a gradient has another type or order. Then
        everything is to be checked, and a new table built.
        """
        if np.bincount(self._groups, minlength=len(params)).tolist() != [len(group) for group in params]:
            return False
        flat = list(chain.from_iterable(params))
        column = self._table[:, GRAD_COLUMN]
        return self._watch.take_gradients(flat, all_states, column.ctypes.data, len(self._table[0]))

    def run(self, hypers: Sequence[AdamHyper], scale: GradScale) -> None:
        """Update all rows in one call and count the step; ``hypers`` by group."""
        keys = self._groups + len(hypers) * (self._counts.astype(np.int64) + 1)
        distinct, self._table[:, STEP_COLUMN] = np.unique(keys, return_inverse=True)
        steps = [AdamStep(hypers[key % len(hypers)], int(key // len(hypers)), scale) for key in distinct]
        run_rows(self._table, steps, self.device)
        self._counts += 1.0
        self._grads = []


def _move_step(state: dict[str, Any], count: torch.Tensor) -> None:
    """Make ``count`` the state's step; the object stays, so that a state dict goes on showing the present."""
    held = state["step"]
    if isinstance(held, torch.Tensor) and (held.dtype, held.shape, held.device) == (
        count.dtype,
        count.shape,
        count.device,
    ):
        held.data = count
    else:
        state["step"] = count


def _row(member: Member, state_format: StateFormat) -> Row:
    addresses = {part.name: member.state[part.name].data_ptr() for part in state_format.parts(member.param)}
    return make_row(member.param, member.grad, addresses, state_dtype=state_format.state_dtype)
