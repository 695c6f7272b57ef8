"""Rows for the Adam kernels. A row owns the tensors that its addresses are of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gemini import _C
from gemini.chunk.chunk import BLOCK_NUMEL
from gemini.errors import StateError

# The columns that C++ reads (csrc/bindings/bind_adam.cpp): param, grad, exp_avg, exp_avg_sq, exp_avg_scale,
# exp_avg_sq_scale, half_out, remainder, numel, first block, layout, index of the step.
_GRAD_COLUMN = 1
_STATE_COLUMNS = {"exp_avg": 2, "exp_avg_sq": 3, "exp_avg_scale": 4, "exp_avg_sq_scale": 5, "remainder": 7}
_STEP_COLUMN = 11
_NUM_COLUMNS = 12

_GRAD_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_COPY_FORMS = {None: 0, torch.bfloat16: 1, torch.float16: 2}
_HALF_FORMS = {torch.bfloat16: 4, torch.float16: 5}
_REMAINDER_FORM = 3
_MOMENT_TYPES = {"fp32": 0, "bf16": 1, "int8": 2}


class AdamRow:
    """What the kernels update together: elements of one parameter.

    A row is made from tensors and keeps them, so no address outlives its memory. ``states`` has tensors by
    name (``exp_avg``, ``exp_avg_sq``, with int8 moments their ``_scale``; a ``remainder`` makes a bf16
    parameter half of an exact fp32 master). None stands for one that :meth:`KeptAdamTable.place_states`
    places. Tensors are dense, in one order, of the right types: this is not checked.
    """

    __slots__ = ("columns", "grad", "start", "tensors")

    def __init__(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        states: Mapping[str, torch.Tensor | None],
        *,
        state_dtype: str = "fp32",
        half_out: torch.Tensor | None = None,
        elements: slice | None = None,
        first: int = 0,
        step_index: int = 0,
    ) -> None:
        """``elements``: which of ``param`` and ``grad``, in memory order; the states have these alone.
        ``first``: which element of the whole parameter is the first one of ``param``. ``step_index``: which
        of the steps of a call.

        Raises:
            StateError: compact moments start inside a block.
        """
        start, stop = (0, param.numel()) if elements is None else (elements.start, elements.stop)
        block, inside_block = divmod(first + start, BLOCK_NUMEL)
        if inside_block and state_dtype != "fp32":
            raise StateError(
                f"a piece of {state_dtype} moments starts at element {first + start}, not a multiple of "
                f"{BLOCK_NUMEL}"
            )
        if param.dtype == torch.float32:
            form = _COPY_FORMS[None if half_out is None else half_out.dtype]
        else:
            form = _REMAINDER_FORM if "remainder" in states else _HALF_FORMS[param.dtype]
        exp_avg, exp_avg_sq = states["exp_avg"], states["exp_avg_sq"]
        exp_avg_scale, exp_avg_sq_scale = states.get("exp_avg_scale"), states.get("exp_avg_sq_scale")
        remainder = states.get("remainder")
        self.grad = grad
        self.start = start
        self.tensors = (param, half_out, *states.values())
        self.columns = (
            param.data_ptr() + param.element_size() * start,
            grad.data_ptr() + grad.element_size() * start,
            0 if exp_avg is None else exp_avg.data_ptr(),
            0 if exp_avg_sq is None else exp_avg_sq.data_ptr(),
            0 if exp_avg_scale is None else exp_avg_scale.data_ptr(),
            0 if exp_avg_sq_scale is None else exp_avg_sq_scale.data_ptr(),
            0 if half_out is None else half_out.data_ptr() + 2 * start,
            0 if remainder is None else remainder.data_ptr(),
            stop - start,
            block,
            _GRAD_TYPES[grad.dtype] | form << 4 | _MOMENT_TYPES[state_dtype] << 8,
            step_index,
        )


class AdamTable:
    """Rows as C++ reads them, with their tensors: nothing that a call uses is freed before it returns."""

    def __init__(self, rows: Sequence[AdamRow]) -> None:
        """Take over ``rows``, at least one."""
        self._owners: Sequence[AdamRow] = tuple(rows)
        self._columns = np.array([row.columns for row in self._owners], dtype=np.int64)
        # A pass over large tensors leaves the caches nothing of numpy: a step asks it for little.
        self._num_rows, self._address = len(self._owners), self._columns.ctypes.data

    def __len__(self) -> int:
        return self._num_rows

    def run_on_cpu(
        self,
        options: list[_C.AdamOptions],
        *,
        threads: int,
        processors: Sequence[int] = (),
        rows: slice | None = None,
    ) -> bool:
        """Update the tensors of all rows, or of ``rows``, in place, without the GIL; each says which of
        ``options`` it takes. Return whether all gradients were finite, where these ask; else True."""
        address, count = self._address, self._num_rows
        if rows is not None:
            address, count = address + rows.start * self._columns.strides[0], rows.stop - rows.start
        return _C.adam_step(address, count, options, threads=threads, processors=processors)

    def launch(self, options: list[_C.AdamOptions], *, stream: int) -> bool:
        """Have a GPU update the tensors of all rows in place, in the order of its current ``stream``."""
        return _C.cuda_adam_step(self._address, self._num_rows, options, stream=stream)


class KeptAdamTable(AdamTable):
    """A table that is kept from step to step: each step takes its gradients, and lets them go.

    The caller sees to it that parameters and states stay where they are. Not thread-safe.
    """

    def __init__(self, rows: Sequence[AdamRow], grad_of: Sequence[int] | None = None) -> None:
        """Take over ``rows``, with the gradients of the first step. ``grad_of``: the place of each row's
        gradient among those that :meth:`take_gradients` finds, where rows share them."""
        super().__init__(rows)
        self._tensors = [row.tensors for row in rows]
        self._grads: Sequence[torch.Tensor] = [row.grad for row in rows]
        self._owners = ()  # which have the gradients of the first step for good
        self._memory: torch.Tensor | None = None
        self._taken, self._stride = self._columns[:, _GRAD_COLUMN], _NUM_COLUMNS
        self._grad_of: npt.NDArray[np.int64] | None = None
        if grad_of is not None:
            self._grad_of = np.array(grad_of, dtype=np.int64)
            starts = [row.grad.element_size() * row.start for row in rows]
            self._grad_starts = np.array(starts, dtype=np.int64)
            self._taken, self._stride = np.zeros(1 + max(grad_of), dtype=np.int64), 1
        self._taken_address = self._taken.ctypes.data

    def take_gradients(
        self, watch: _C.TensorWatch, params: list[list[torch.Tensor]], all_states: dict[torch.Tensor, Any]
    ) -> bool:
        """Take the gradients that ``watch`` finds. False, without gradients, when something that it watches
        was replaced."""
        found = watch.take_gradients(params, all_states, self._taken_address, self._stride)
        self._grads = found or []
        if found is not None and self._grad_of is not None:
            self._columns[:, _GRAD_COLUMN] = self._taken[self._grad_of] + self._grad_starts
        return found is not None

    def let_gradients_go(self) -> None:
        """Keep gradients no longer."""
        self._grads = []

    def set_steps(self, indices: npt.NDArray[np.int64]) -> None:
        """Say for each row which of the options of a call it takes."""
        self._columns[:, _STEP_COLUMN] = indices

    def place_states(
        self, rows: slice, offsets: Mapping[str, npt.NDArray[np.int64]], memory: torch.Tensor
    ) -> None:
        """Say that the states of ``rows`` are in ``memory``, by name at these bytes of it, -1 where there is
        none. It is kept until others are placed."""
        self._memory, address = memory, memory.data_ptr()
        for name, starts in offsets.items():
            here = starts[rows]
            self._columns[rows, _STATE_COLUMNS[name]] = np.where(here < 0, 0, here + address)

    def run_on_cpu(
        self,
        options: list[_C.AdamOptions],
        *,
        threads: int,
        processors: Sequence[int] = (),
        rows: slice | None = None,
    ) -> bool:
        """As :meth:`AdamTable.run_on_cpu`. Raises StateError without gradients of this step."""
        self._require_gradients()
        return super().run_on_cpu(options, threads=threads, processors=processors, rows=rows)

    def launch(self, options: list[_C.AdamOptions], *, stream: int) -> bool:
        """As :meth:`AdamTable.launch`. Raises StateError without gradients of this step."""
        self._require_gradients()
        return super().launch(options, stream=stream)

    def _require_gradients(self) -> None:
        if not self._grads:
            raise StateError("the gradients of these rows were let go; take those of this step first")
