"""StepRows: the kernel rows of an optimizer's parameters with states in memory, kept between steps.

A model has thousands of small tensors; checking each one's state, dtype and order in every step would cost
far more than the update. So rows are built once, with every check. A step only verifies that none of the
objects they rely on was replaced, and takes the gradients.
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

# With it C++ reads a tensor's metadata in one call; torch before 2.10 has none.
TENSOR_EXCHANGE = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)


@dataclass(frozen=True)
class Member:
    """A parameter to update. ``group``: its index in ``param_groups``. ``grad``: in its memory order."""

    param: torch.Tensor
    grad: torch.Tensor
    group: int
    state: dict[str, Any]


class StepRows:
    """Rows of parameters on one device, with complete states.

    Every state's ``step`` becomes an element of one tensor, so one operation counts all steps. Setting one
    element changes no other.
    """

    def __init__(
        self, members: Sequence[Member], state_format: StateFormat, all_states: dict[torch.Tensor, Any]
    ) -> None:
        """Build the table of ``members``, at least one; all have been checked. ``all_states``: the
        optimizer's states by parameter.
        """
        self.device = members[0].param.device
        self._groups = np.array([member.group for member in members], dtype=np.int64)
        counts = torch.tensor(
            [float(member.state["step"]) for member in members], dtype=torch.float32, device="cpu"
        )
        for member, count in zip(members, counts.unbind(), strict=True):
            _move_step(member.state, count)
        self._counts = counts.numpy()
        self._numbered = b""  # the counts for which ``_steps`` and the table's last column are valid
        self._steps: list[tuple[int, int]] = []  # group and count of each distinct step
        self._table = KeptAdamTable([_row(member, state_format) for member in members])
        self._options: list[_C.AdamOptions] = []  # by group
        self._optioned: tuple[list[AdamHyper], GradScale] | None = None  # the sources of ``_options``
        # Cached: a pass over large tensors evicts numpy's code from the CPU caches, so calls to it are slow.
        self._counts_address = self._counts.ctypes.data
        # The watch compares identities and owns nothing: the objects must live as long as it does.
        self.params = [member.param for member in members]
        states, others = [member.state for member in members], list(all_states.values())
        self._kept = (states, [list(state.values()) for state in states], others)
        groups = self._groups.tolist()
        grads = [member.grad for member in members]
        self._watch = _C.TensorWatch(
            self.params, groups, states, ["step", *ARRAYS], grads, others, TENSOR_EXCHANGE
        )

    def __len__(self) -> int:
        return len(self._table)

    def take_gradients(self, params: list[list[torch.Tensor]], all_states: dict[torch.Tensor, Any]) -> bool:
        """Take the gradients of ``params``, given by group and on one device; they are kept until run or
        released.

        Return False if the rows no longer fit: a parameter changed its group; a parameter, state, state
        tensor or its memory was replaced; or a gradient has another dtype or order. The caller must then
        check everything and build new rows.
        """
        return self._table.take_gradients(self._watch, params, all_states)

    def let_gradients_go(self) -> None:
        """Release the gradients."""
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
        # All counts grow by one, so distinct steps stay distinct and the table's column stays valid.
        self._steps = [(group, count + 1) for group, count in self._steps]
        self._numbered = self._counts.tobytes()

    def _number(self, num_groups: int) -> None:
        """Find the distinct (group, count) pairs of the rows, and set each row's index among them."""
        keys = self._groups + num_groups * self._counts.astype(np.int64)
        distinct, indices = np.unique(keys, return_inverse=True)
        self._table.set_steps(indices)
        self._steps = [(key % num_groups, key // num_groups) for key in distinct.tolist()]


def _move_step(state: dict[str, Any], count: torch.Tensor) -> None:
    """Make ``count`` the state's step tensor. The tensor object stays the same, so earlier state dicts keep
    showing the current count.
    """
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
