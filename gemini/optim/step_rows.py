"""The table of an optimizer's parameters with states in memory, kept from step to step.

A model has thousands of small tensors; checking each one's state, type and order again would cost far more
than updating it. So rows are built once, with every check, and a step only verifies that nothing they rely
on has been replaced, and takes the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gemini import _C
from gemini.optim.kernels import (
    ARRAYS,
    AdamHyper,
    AdamRow,
    AdamStep,
    GradScale,
    KeptAdamTable,
    StateFormat,
    run_table,
)

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
        """Build the table of ``members``, one or more; all have been checked.

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
        self._numbered = b""  # the counts that ``_steps`` and the table's last column are for
        self._steps: list[tuple[int, int]] = []  # group and count of each distinct step
        self._table = KeptAdamTable([_row(member, state_format) for member in members])
        self._options: list[_C.AdamOptions] = []  # by group
        self._optioned: tuple[list[AdamHyper], GradScale] | None = None  # what they were made from
        # A pass over large tensors leaves the caches nothing of numpy: a step asks it for little.
        self._counts_address = self._counts.ctypes.data
        # The watch compares identities and holds nothing: what it knows must not go away before it does.
        self.params = [member.param for member in members]
        states, others = [member.state for member in members], list(all_states.values())
        self._kept = (states, [list(state.values()) for state in states], others)
        groups = self._groups.tolist()
        grads = [member.grad for member in members]
        self._watch = _C.TensorWatch(self.params, groups, states, ["step", *ARRAYS], grads, others, _EXCHANGE)

    def __len__(self) -> int:
        return len(self._table)

    def take_gradients(self, params: list[list[torch.Tensor]], all_states: dict[torch.Tensor, Any]) -> bool:
        """Take the gradients of ``params``, by group and on one device, until they were run or let go.

        False when those with a gradient are not what the rows were built for: a parameter moved to another
        group, one, a state, a tensor of one or its memory was replaced, or a gradient has another type or
        order. Then everything is to be checked, and a new table built.
        """
        return self._table.take_gradients(self._watch, params, all_states)

    def let_gradients_go(self) -> None:
        """Keep no gradients any longer."""
        self._table.let_gradients_go()

    def run(self, hypers: list[AdamHyper], scale: GradScale) -> None:
        """Update all rows in one call and count the step; ``hypers`` by group."""
        if self._counts.tobytes() != self._numbered:
            self._number(len(hypers))
        if (hypers, scale) != self._optioned:
            self._options = [AdamStep(hyper, 1, scale).options() for hyper in hypers]
            self._optioned = (hypers, scale)
        options = [self._options[group].at(count + 1) for group, count in self._steps]
        run_table(self._table, options, self.device)
        _C.count_steps(self._counts_address, len(self))
        # Steps that differ still do when each has counted one more: the column stays.
        self._steps = [(group, count + 1) for group, count in self._steps]
        self._numbered = self._counts.tobytes()

    def _number(self, num_groups: int) -> None:
        """Find the distinct steps of the rows, and which of them each row takes."""
        keys = self._groups + num_groups * self._counts.astype(np.int64)
        distinct, indices = np.unique(keys, return_inverse=True)
        self._table.set_steps(indices)
        self._steps = [(key % num_groups, key // num_groups) for key in distinct.tolist()]


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


def _row(member: Member, state_format: StateFormat) -> AdamRow:
    states = {part.name: member.state[part.name] for part in state_format.parts(member.param)}
    return AdamRow(member.param, member.grad, states, state_dtype=state_format.state_dtype)
