"""Our Adam kernels on given arrays, one contender per layout, and the streams that are their limit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gemini import _C
from gemini.chunk.chunk import BLOCK_NUMEL
from gemini.optim import CPUAdam
from gemini.optim.kernels import ARRAYS, AdamRow, AdamStep, AdamTable, run_table
from gemini_bench.adam_peers import HYPER, SAMPLE_NUMEL
from gemini_bench.paired import Contender, filled

PATTERN = "limit, 4 reads and 3 writes"
READ = "limit, reads"

PARAM_SCALE, GRAD_SCALE = 0.02, 1e-3
_PARAM_SEED, _GRAD_SEED = 1, 2

_FORM_TEXTS = {
    "fp32": "fp32",
    "copy": "fp32 + bf16 copy",
    "split": "bf16 + 16 bits",
    "alone": "bf16 without master",
}


@dataclass(frozen=True)
class Layout:
    """How a parameter, its gradient and its moments are kept.

    ``form``: ``"fp32"``; ``"copy"``, fp32 and a bf16 copy; ``"split"``, bf16 and the 16 bits that make it
    the exact fp32 master; ``"alone"``, bf16. ``moments``: ``"fp32"``, ``"bf16"`` or ``"int8"``.
    """

    form: str
    moments: str = "fp32"

    @property
    def name(self) -> str:
        """The contender's name."""
        moments = "" if self.moments == "fp32" else f", {self.moments} moments"
        return f"ours {_FORM_TEXTS[self.form]}{moments}"

    @property
    def grad_dtype(self) -> torch.dtype:
        """The dtype of gradients: the one in which the model computes."""
        return torch.float32 if self.form == "fp32" else torch.bfloat16

    @property
    def _kept_bytes(self) -> float:
        """Bytes per parameter that a step reads and writes."""
        moments = {"fp32": 8.0, "bf16": 4.0, "int8": 2.0 + 2 * 4 / BLOCK_NUMEL}[self.moments]
        return moments + (2 if self.form == "alone" else 4)

    @property
    def held_bytes(self) -> float:
        """Bytes per parameter in memory."""
        return self._kept_bytes + self.grad_dtype.itemsize + (2 if self.form == "copy" else 0)

    @property
    def step_bytes(self) -> float:
        """Bytes per parameter that a step must read and write."""
        return 2 * self._kept_bytes + self.grad_dtype.itemsize + (2 if self.form == "copy" else 0)


FP32 = Layout("fp32")
COPY = Layout("copy")
SPLIT = Layout("split")
ALONE = Layout("alone")
COPY_INT8 = Layout("copy", "int8")
SPLIT_INT8 = Layout("split", "int8")
COPY_BF16 = Layout("copy", "bf16")
SPLIT_BF16 = Layout("split", "bf16")


def start_param(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the parameter that every contender starts from, in new memory."""
    return filled(numel, dtype, scale=PARAM_SCALE, seed=_PARAM_SEED)


def start_grad(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the gradient that every contender gets, in new memory."""
    return filled(numel, dtype, scale=GRAD_SCALE, seed=_GRAD_SEED)


def kernel_contender(layout: Layout, numel: int) -> Contender:
    """Return steps of one flat tensor of ``numel`` elements by our kernel, with torch's number of threads."""
    held = _arrays(layout, numel)
    run = _kernel_call([_table_row(layout, held)])
    return Contender(layout.name, run, layout.step_bytes * numel, lambda: _start_of_param(layout, held))


def many_rows_contender(name: str, sizes: Sequence[int]) -> Contender:
    """Return one call of the kernel over fp32 tensors of these sizes, each in its own allocation."""
    held = [
        {
            "param": param,
            "grad": grad,
            "exp_avg": torch.zeros_like(param),
            "exp_avg_sq": torch.zeros_like(param),
        }
        for param, grad in _params_and_grads(sizes)
    ]
    run = _kernel_call([_table_row(FP32, arrays) for arrays in held])
    return Contender(name, run, FP32.step_bytes * sum(sizes), lambda: _start_of_param(FP32, held[0]))


def adam(params: Sequence[Tensor]) -> CPUAdam:
    """Return our optimizer with the settings that all contenders use."""
    return CPUAdam(params, lr=HYPER.lr, betas=HYPER.betas, eps=HYPER.eps, weight_decay=HYPER.weight_decay)


def step_contender(
    name: str, make: Callable[[Sequence[Tensor]], torch.optim.Optimizer], sizes: Sequence[int]
) -> Contender:
    """Return ``step`` of an optimizer over fp32 tensors of these sizes, each in its own allocation."""
    params = []
    for param, grad in _params_and_grads(sizes):
        param.grad = grad
        params.append(param)
    return Contender(name, make(params).step, FP32.step_bytes * sum(sizes), lambda: params[0][:SAMPLE_NUMEL])


def _params_and_grads(sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Return tensors that together are what one of the same total size starts from."""
    numel = sum(sizes)
    param, grad = start_param(numel), start_grad(numel)
    if len(sizes) == 1:
        return [(param, grad)]
    starts = itertools.accumulate(sizes[:-1], initial=0)
    parts = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    return [(param[part].clone(), grad[part].clone()) for part in parts]


def _table_row(layout: Layout, held: dict[str, Tensor]) -> AdamRow:
    """Return the row of a whole tensor for the kernel's table."""
    states = {name: held[name] for name in ARRAYS if name in held}
    half_out = held.get("half_out")
    return AdamRow(held["param"], held["grad"], states, state_dtype=layout.moments, half_out=half_out)


def _kernel_call(rows: Sequence[AdamRow]) -> Callable[[], None]:
    """Return one step over ``rows``; each call continues from the previous one."""
    table = AdamTable(rows)
    step = 0

    def run() -> None:
        nonlocal step
        step += 1
        run_table(table, [AdamStep(HYPER, step).options()], torch.device("cpu"))

    return run


def _arrays(layout: Layout, numel: int) -> dict[str, Tensor]:
    """Return the arrays of a layout by their columns; the moments are zero."""
    wide = layout.form in ("fp32", "copy")
    held = {
        "param": start_param(numel, torch.float32 if wide else torch.bfloat16),
        "grad": start_grad(numel, layout.grad_dtype),
    }
    if layout.form == "copy":
        held["half_out"] = _zeros(numel, torch.bfloat16)
    if layout.form == "split":
        held["remainder"] = _zeros(numel, torch.int16)
    for name, code in (("exp_avg", torch.int8), ("exp_avg_sq", torch.uint8)):
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": code}[layout.moments]
        held[name] = _zeros(numel, dtype)
        if layout.moments == "int8":
            held[f"{name}_scale"] = _zeros(-(-numel // BLOCK_NUMEL), torch.float32)
    return held


def _zeros(numel: int, dtype: torch.dtype) -> Tensor:
    """Return zeros in allocated pages; ``torch.zeros`` may allocate pages only at the first write."""
    return torch.empty(numel, dtype=dtype).fill_(0)


def _start_of_param(layout: Layout, held: dict[str, Tensor]) -> Tensor:
    start = held["param"][:SAMPLE_NUMEL]
    if layout.form != "split":
        return start
    # The remainder is the difference of the master's bits and the bf16's, as a signed number.
    bits = start.view(torch.int16).int().bitwise_left_shift(16)
    return (bits + held["remainder"][:SAMPLE_NUMEL].int()).view(torch.float32)


def pattern_contender(numel: int) -> Contender:
    """Return the pure stream with the traffic of an fp32 step, over its own arrays."""
    arrays = [start_param(numel), start_grad(numel), start_param(numel), start_param(numel)]

    def run() -> None:
        param, grad, exp_avg, exp_avg_sq = (array.data_ptr() for array in arrays)
        _C.stream_adam_pattern(param, grad, exp_avg, exp_avg_sq, numel, threads=torch.get_num_threads())

    return Contender(PATTERN, run, FP32.step_bytes * numel)


def read_contender(numel: int) -> Contender:
    """Return the pure read of one fp32 array."""
    array = start_grad(numel)
    return Contender(
        READ,
        lambda: _C.stream_read(array.data_ptr(), 4 * numel, threads=torch.get_num_threads()),
        4 * numel,
    )


def sum_squares_contender(name: str, array: Tensor) -> Contender:
    """Return the sum of the squares of ``array`` with its finite check."""
    dtype = {torch.float32: "fp32", torch.bfloat16: "bf16"}[array.dtype]
    return Contender(
        name,
        lambda: _C.sum_squares(array.data_ptr(), array.numel(), dtype, threads=torch.get_num_threads()),
        array.element_size() * array.numel(),
    )
