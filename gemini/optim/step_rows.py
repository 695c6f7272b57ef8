"""The table of an optimizer's parameters whose states are in memory, kept from step to step.

A model has thousands of small tensors; checking each one's state, type and order anew would cost far more
than updating it. So rows are built once, with every check, and a step only verifies that nothing they rely
on has been replaced, and fills in the gradients' addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gemini import _C

from .kernels import GRAD_COLUMN, STEP_COLUMN, AdamHyper, AdamStep, GradScale, Row, make_row, run_rows
from .state_format import ARRAYS, StateFormat

# How C++ looks at a tensor in one call; torch before 2.10 has none.
_EXCHANGE = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)


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
        counts = torch.tensor(
            [float(member.state["step"]) for member in members], dtype=torch.float32, device="cpu"
        )
        for member, count in zip(members, counts.unbind(), strict=True):
            _move_step(member.state, count)
        self._counts = counts.numpy()
        self._table = np.array([_row(member, state_format) for member in members], dtype=np.int64)
        self._grads = [member.grad for member in members]  # some may be copies
        # The watch compares identities and holds nothing: what it knows must not go away before it does.
        self.params = [member.param for member in members]
        states, others = [member.state for member in members], list(all_states.values())
        self._kept = (states, [list(state.values()) for state in states], others)
        groups = self._groups.tolist()
        self._watch = _C.TensorWatch(
            self.params, groups, states, ["step", *ARRAYS], self._grads, others, _EXCHANGE
        )

    def __len__(self) -> int:
        return len(self._table)

    def take_gradients(self, params: list[list[torch.Tensor]], all_states: dict[torch.Tensor, Any]) -> bool:
        """Take the addresses of the gradients of ``params``, by group and on one device, into the table.

        False when those with a gradient are not what the rows were built for: a parameter moved to another
        group, one, a state, a tensor of one or its memory was replaced, or a gradient has another type or
        order. Then everything is to be checked, and a new table built.
        """
        column = self._table[:, GRAD_COLUMN]
        return self._watch.take_gradients(params, all_states, column.ctypes.data, len(self._table[0]))

    def run(self, hypers: Sequence[AdamHyper], scale: GradScale) -> None:
        """Update all rows in one call and count the step; ``hypers`` by group."""
        first = int(self._counts[0])
        if (self._counts == first).all():  # as almost always, and sorting takes a while
            self._table[:, STEP_COLUMN] = self._groups
            steps = [AdamStep(hyper, first + 1, scale) for hyper in hypers]
        else:
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
