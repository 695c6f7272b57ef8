"""The Adam kernels on torch tensors: settings of groups as numbers, how moments are kept, and the call that
updates the tensors of many rows in place.

Addresses go to C++ directly, from rows that own their tensors : autograd's version counters do not move. A
caller that updates tensors which autograd may have saved bumps them itself. The layouts of moments, their
bytes and what they do to the numbers: docs/notes/adam.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gemini import _C
from gemini.chunk.chunk import BLOCK_NUMEL, StateSpec, num_blocks
from gemini.chunk.layout import flat, is_dense, ordered_like, same_order
from gemini.errors import ConfigError, StateError
from gemini.system.device import launching


def numbers_of(group: Mapping[str, Any], *names: str) -> dict[str, float]:
    """Return settings of a group; one-element tensors count as numbers. Raises ConfigError for what
    is none."""
    try:
        return {name: float(group[name]) for name in names}
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ConfigError(f"{', '.join(names)} must be numbers: {error}") from None


def betas_of(group: Mapping[str, Any]) -> tuple[float, float]:
    """Return the betas of a group. Raises ConfigError for what are not two numbers."""
    try:
        first, second = (float(beta) for beta in group["betas"])
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise ConfigError(f"betas are {group['betas']!r}; they must be two numbers in [0, 1)") from None
    return first, second


def require_non_negative(**settings: float) -> None:
    """Raise ConfigError for a setting that is below 0, or NaN."""
    for name, value in settings.items():
        if not value >= 0.0:
            raise ConfigError(f"{name} is {value!r}; it must be 0 or more")


def require_betas(betas: tuple[float, float]) -> None:
    """Raise ConfigError for betas that are not two numbers in [0, 1)."""
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ConfigError(f"betas are {betas!r}; they must be two numbers in [0, 1)")


STATE_DTYPES = ("fp32", "bf16", "int8")
MOMENTS = ("exp_avg", "exp_avg_sq")
SCALES = ("exp_avg_scale", "exp_avg_sq_scale")
ARRAYS = (*MOMENTS, *SCALES, "remainder")  # of any format

_MAX_CODE = 127.0
_MAX_ROOT_CODE = 255.0
_MIN_SCALE = 2.0**-63  # as csrc/adam/quantize.h


def step_count(count: float) -> torch.Tensor:
    """Return a count of steps as torch's Adam keeps it: fp32, on the CPU, whatever torch's defaults are."""
    return torch.tensor(float(count), dtype=torch.float32, device="cpu")


_REMAINDER = StateSpec("remainder", torch.int16)
_PARTS = {
    "fp32": (StateSpec("exp_avg", torch.float32), StateSpec("exp_avg_sq", torch.float32)),
    "bf16": (StateSpec("exp_avg", torch.bfloat16), StateSpec("exp_avg_sq", torch.bfloat16)),
    "int8": (
        StateSpec("exp_avg", torch.int8),
        StateSpec("exp_avg_sq", torch.uint8),
        StateSpec("exp_avg_scale", torch.float32, per_block=True),
        StateSpec("exp_avg_sq_scale", torch.float32, per_block=True),
    ),
}


@dataclass(frozen=True)
class StateFormat:
    """``state_dtype`` of the moments; ``remainders`` keeps the low 16 bits of bf16 parameters' masters.

    Raises:
        ConfigError: no such ``state_dtype``.
    """

    state_dtype: str = "fp32"
    remainders: bool = False

    def __post_init__(self) -> None:
        if self.state_dtype not in STATE_DTYPES:
            raise ConfigError(f"state_dtype is {self.state_dtype!r}; it can be {', '.join(STATE_DTYPES)}")

    def parts(self, param: torch.Tensor) -> tuple[StateSpec, ...]:
        """Return the arrays of one parameter's state."""
        return self.parts_for(param.dtype)

    def parts_for(self, dtype: torch.dtype) -> tuple[StateSpec, ...]:
        """Return the arrays of the state of a parameter of ``dtype``."""
        parts = _PARTS[self.state_dtype]
        return (*parts, _REMAINDER) if self.remainders and dtype == torch.bfloat16 else parts

    def nbytes(self, param: torch.Tensor) -> int:
        """Return the bytes of one parameter's state."""
        return sum(part.nbytes(param.numel()) for part in self.parts(param))

    def zeros(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the state before the first step: element arrays in the parameter's memory order."""
        return {part.name: self._empty(part, param).zero_() for part in self.parts(param)}

    def empty(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the arrays of a state, to be filled."""
        return {part.name: self._empty(part, param) for part in self.parts(param)}

    def _empty(self, part: StateSpec, param: torch.Tensor) -> torch.Tensor:
        if part.per_block:
            return torch.empty(part.count(param.numel()), dtype=part.dtype, device=param.device)
        return torch.empty_strided(param.size(), param.stride(), dtype=part.dtype, device=param.device)

    def complete(self, state: Mapping[str, Any], param: torch.Tensor) -> bool:
        """Say whether ``state`` has all arrays of this format."""
        return all(part.name in state for part in self.parts(param))

    def fitted(self, state: dict[str, Any], param: torch.Tensor, label: str) -> dict[str, Any]:
        """Return the complete ``state``, or one with its arrays in the memory order that ``param`` has now.

        Raises:
            ConfigError: an array is of another type, shape or device; ``label`` names the parameter.
        """
        ordered = True
        for part in self.parts(param):
            value = state[part.name]
            shape = (part.count(param.numel()),) if part.per_block else tuple(param.shape)
            found = (value.dtype, tuple(value.shape), value.device)
            if found != (part.dtype, shape, param.device):
                raise ConfigError(
                    f"{part.name} of {label} is {found[0]} of shape {found[1]} on {found[2]}; "
                    f"it must be {part.dtype} of shape {shape} on {param.device}"
                )
            ordered &= is_dense(value) and (part.per_block or same_order(value, param))
        return state if ordered else {**state, **self.imported(self.exported(state), param)}

    def exported(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state with fp32 moments, as torch has them.

        int8 scales and remainders stay beside them: with them :meth:`imported` gives every bit back. Where
        the moments are not fp32 already, all tensors are copies.
        """
        if self.state_dtype == "fp32" or "exp_avg" not in state:
            return dict(state)
        exp_avg, exp_avg_sq = state["exp_avg"].float(), state["exp_avg_sq"].float()
        if self.state_dtype == "int8":
            _times_scale(exp_avg, state["exp_avg_scale"])
            _times_scale(exp_avg_sq, state["exp_avg_sq_scale"]).square_()
        copies = {
            k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items() if k not in MOMENTS
        }
        both = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, **copies}
        return {name: both[name] for name in state}

    def imported(self, state: Mapping[str, Any], param: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return own arrays of this format from fp32 moments (and what :meth:`exported` left beside them).

        Rounds to nearest where the moments do not come from this format.

        Raises:
            ConfigError: a tensor has another shape.
        """
        moments = {name: ordered_like(state[name], param, torch.float32) for name in MOMENTS}
        result = self.empty(param)
        if self.state_dtype == "int8":
            _encode(moments, state, result)
        else:
            for name in MOMENTS:
                result[name].copy_(moments[name])
        if "remainder" in result:
            saved = state.get("remainder")
            if saved is None or saved.dtype != torch.int16:  # torch casts what it loads for a bf16 parameter
                result["remainder"].zero_()
            else:
                result["remainder"].copy_(ordered_like(saved, param, torch.int16))
        return result


def _times_scale(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply a dense fp32 tensor of codes by its blocks' scales, in place."""
    values = flat(codes)
    whole = values.numel() // BLOCK_NUMEL
    if whole:
        values[: whole * BLOCK_NUMEL].view(whole, BLOCK_NUMEL).mul_(scale[:whole, None])
    values[whole * BLOCK_NUMEL :].mul_(scale[whole:])
    return codes


def _encode(
    moments: Mapping[str, torch.Tensor], state: Mapping[str, Any], result: Mapping[str, torch.Tensor]
) -> None:
    """Fill the arrays of int8 moments, with the scales in ``state`` if the moments come from them."""
    for name, scale_name in zip(MOMENTS, SCALES, strict=True):
        values = flat(moments[name])
        given, scale = state.get(scale_name), result[scale_name]
        if given is not None and given.shape == scale.shape and given.dtype == scale.dtype:
            codes = _codes(name, values, given)
            if _equal(_decoded(name, codes, given), values):
                flat(result[name]).copy_(codes)
                scale.copy_(given)
                continue
        largest = _MAX_CODE if name == "exp_avg" else _MAX_ROOT_CODE
        scale.copy_(_block_maxima(_rooted(name, values)) / largest)
        scale[scale < _MIN_SCALE] = 0.0
        flat(result[name]).copy_(_codes(name, values, scale))


def _rooted(name: str, values: torch.Tensor) -> torch.Tensor:
    return values.sqrt() if name == "exp_avg_sq" else values


def _codes(name: str, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the nearest codes, as floats; a second moment's is never 0 unless its whole block is."""
    spread = scale.repeat_interleave(BLOCK_NUMEL)[: values.numel()]
    lowest, largest = (-_MAX_CODE, _MAX_CODE) if name == "exp_avg" else (1.0, _MAX_ROOT_CODE)
    codes = (_rooted(name, values) / spread).round_().clamp_(lowest, largest)
    codes[(spread == 0) | ~torch.isfinite(spread)] = 0.0
    return codes


def _decoded(name: str, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    values = _times_scale(codes.clone(), scale)
    return values.square_() if name == "exp_avg_sq" else values


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _block_maxima(values: torch.Tensor) -> torch.Tensor:
    padded = values.new_zeros(num_blocks(values.numel()) * BLOCK_NUMEL)
    padded[: values.numel()] = values.abs()
    maxima = padded.view(-1, BLOCK_NUMEL).amax(1)
    return torch.where(torch.isfinite(maxima), maxima, torch.nan)


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

    def without_gradient(self) -> AdamRow:
        """Return the row as one that is kept from step to step, for :meth:`again`."""
        row = AdamRow.__new__(AdamRow)
        row.columns, row.start, row.tensors = self.columns, self.start, self.tensors
        row.grad = self.grad.new_empty(0)
        return row

    def again(self, grad: torch.Tensor, step_index: int) -> AdamRow:
        """Return the row of another step: the same memory, with another gradient."""
        row = AdamRow.__new__(AdamRow)
        row.grad, row.start, row.tensors = grad, self.start, self.tensors
        columns, size = self.columns, grad.element_size()
        layout = columns[-2] & ~0xF | _GRAD_TYPES[grad.dtype]
        row.columns = (
            columns[0],
            grad.data_ptr() + size * self.start,
            *columns[2:-2],
            layout,
            step_index,
        )
        return row


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
        self._owners = ()  # which have the gradients of the first step permanently
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


TYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def has_cuda_kernel() -> bool:
    """Say whether this build can update CUDA tensors."""
    return _C.build_info()["cuda"] is not None


@dataclass(frozen=True)
class AdamHyper:
    """What one step of Adam needs to know besides the tensors.

    Raises:
        ConfigError: for a value outside its range.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    bias_correction: bool = True
    adamw_mode: bool = True

    def __post_init__(self) -> None:
        require_non_negative(lr=self.lr, eps=self.eps, weight_decay=self.weight_decay)
        require_betas(self.betas)

    @classmethod
    def from_group(cls, group: Mapping[str, Any]) -> AdamHyper:
        """Read an optimizer's parameter group; one-element tensors count as numbers."""
        return cls(
            **numbers_of(group, "lr", "eps", "weight_decay"),
            betas=betas_of(group),
            bias_correction=bool(group["bias_correction"]),
            adamw_mode=bool(group["adamw_mode"]),
        )


@dataclass(frozen=True)
class GradScale:
    """What happens to a gradient first: ``clamp(g * pre_scale, -clip_value, clip_value) * post_scale``."""

    pre_scale: float = 1.0
    clip_value: float = math.inf
    post_scale: float = 1.0


@dataclass(frozen=True)
class AdamStep:
    """One step: its hyper-parameters, its number (from 1), the gradient's scaling.

    ``check_finite`` has the kernel look at every gradient, before any scaling.
    """

    hyper: AdamHyper
    number: int
    scale: GradScale = GradScale()
    check_finite: bool = False

    def options(self) -> _C.AdamOptions:
        """Return the step as the kernel takes it."""
        hyper, scale = self.hyper, self.scale
        return _C.AdamOptions(
            lr=hyper.lr,
            beta1=hyper.betas[0],
            beta2=hyper.betas[1],
            eps=hyper.eps,
            weight_decay=hyper.weight_decay,
            step=self.number,
            bias_correction=hyper.bias_correction,
            adamw_mode=hyper.adamw_mode,
            pre_scale=scale.pre_scale,
            clip_value=scale.clip_value,
            post_scale=scale.post_scale,
            check_finite=self.check_finite,
        )


def run_rows(
    rows: Sequence[AdamRow],
    steps: Sequence[AdamStep],
    device: torch.device | str = "cpu",
    processors: Sequence[int] = (),
) -> bool:
    """Update the tensors of ``rows`` in place; each row says which of ``steps`` it takes.

    On the CPU at most ``torch.get_num_threads()`` threads work, without the GIL, on ``processors`` where they
    are given; on a GPU one launch goes to the current stream.

    Returns:
        Whether all gradients were finite, where ``check_finite`` asks; else True.

    Raises:
        StateError: for a null or misaligned address or a step below 1; nothing has changed.
    """
    if not rows:
        return True
    options = [step.options() for step in steps]
    return run_table(AdamTable(rows), options, torch.device(device), processors)


def run_table(
    table: AdamTable,
    options: list[_C.AdamOptions],
    device: torch.device,
    processors: Sequence[int] = (),
) -> bool:
    """Update the tensors of a table's rows in place; see :func:`run_rows`."""
    if device.type == "cpu":
        return table.run_on_cpu(options, threads=torch.get_num_threads(), processors=processors)
    with launching(device) as stream:
        return table.launch(options, stream=stream)


def adam_update(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    hyper: AdamHyper,
    step: int,
    *,
    half_out: torch.Tensor | None = None,
    pre_scale: float = 1.0,
    clip_value: float = math.inf,
    post_scale: float = 1.0,
    check_finite: bool = False,
) -> bool:
    """Update ``param`` and its fp32 moments in place by step number ``step`` (from 1).

    All are dense CPU tensors of one shape and memory order; only the gradient is copied when its order
    differs. ``param`` is fp32, or 16-bit: then the update is computed on its fp32 cast and rounded back.
    ``half_out`` receives a 16-bit copy of the new fp32 parameter; it may be the gradient itself.

    Returns:
        Whether the gradient was finite; True without ``check_finite``.

    Raises:
        ConfigError: naming the tensor that does not fit; nothing has changed.
    """
    _check("param", param, param, tuple(TYPE_NAMES))
    if grad.dtype not in TYPE_NAMES:
        raise ConfigError(f"grad is {grad.dtype}; it must be fp32, bf16 or fp16")
    grad = ordered_like(grad, param, grad.dtype)
    _check("exp_avg", exp_avg, param, (torch.float32,))
    _check("exp_avg_sq", exp_avg_sq, param, (torch.float32,))
    if half_out is not None:
        _check("half_out", half_out, param, (torch.bfloat16, torch.float16))
        if param.dtype != torch.float32:
            raise ConfigError(f"half_out goes with an fp32 param, not one of {param.dtype}")
    row = AdamRow(param, grad, {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}, half_out=half_out)
    scale = GradScale(pre_scale, clip_value, post_scale)
    return run_rows([row], [AdamStep(hyper, step, scale, check_finite)])


def sum_of_squares(tensor: torch.Tensor) -> float:
    """Return the sum of the squares of a dense tensor of floats, added in double in one read.

    NaN or infinite exactly when an element is not finite. On the CPU the bits do not depend on threads or
    the instruction set; on a GPU they are those of torch's norm. The square root is the 2-norm; over several
    tensors, add first.

    Raises:
        ConfigError: a tensor of another kind.
    """
    on_gpu = tensor.device.type == "cuda"
    if not (on_gpu or tensor.device.type == "cpu") or tensor.dtype not in TYPE_NAMES or not is_dense(tensor):
        raise ConfigError(
            f"{tensor.dtype} on {tensor.device} with strides {tensor.stride()}; sum_of_squares takes dense "
            "fp32, bf16 and fp16 tensors of the CPU or a GPU"
        )
    if on_gpu:
        return float(torch.linalg.vector_norm(tensor, dtype=torch.float64).square())
    if tensor._is_zerotensor():  # of torch's, without memory
        return 0.0
    return _C.sum_squares(
        tensor.data_ptr(), tensor.numel(), TYPE_NAMES[tensor.dtype], threads=torch.get_num_threads()
    )


def _check(name: str, tensor: torch.Tensor, param: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in dtypes:
        raise ConfigError(f"{name} is {tensor.dtype}; it must be {' or '.join(str(d) for d in dtypes)}")
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or not is_dense(tensor):
        raise ConfigError(
            f"{name} ({tensor.layout} on {tensor.device}, strides as given) must be a CPU tensor without gaps"
        )
    if tensor.shape != param.shape or not same_order(tensor, param):
        raise ConfigError(
            f"{name} of shape {tuple(tensor.shape)} and param of shape {tuple(param.shape)} "
            "must agree in shape and memory order"
        )
