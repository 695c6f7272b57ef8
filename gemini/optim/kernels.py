"""The Adam kernels on torch tensors: settings as numbers, storage formats of the moments, and the call that
updates the tensors of many rows in place.

C++ gets addresses, from rows that own their tensors, so autograd's version counters do not change. A caller
that updates tensors which autograd may have saved increments them itself. docs/notes/adam.md describes the
layouts of moments, their bytes and their effect on the numbers.
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


def floats_of(group: Mapping[str, Any], *names: str) -> dict[str, float]:
    """Return settings of a group as floats; one-element tensors count as numbers. Raises ConfigError for
    others.
    """
    try:
        return {name: float(group[name]) for name in names}
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ConfigError(f"{', '.join(names)} must be numbers: {error}") from None


def betas_of(group: Mapping[str, Any]) -> tuple[float, float]:
    """Return the betas of a group. Raises ConfigError if they are not two numbers."""
    try:
        first, second = (float(beta) for beta in group["betas"])
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise ConfigError(f"betas are {group['betas']!r}; they must be two numbers in [0, 1)") from None
    return first, second


def require_non_negative(**settings: float) -> None:
    """Raise ConfigError if a setting is negative or NaN."""
    for name, value in settings.items():
        if not value >= 0.0:
            raise ConfigError(f"{name} is {value!r}; it must be 0 or more")


def require_betas(betas: tuple[float, float]) -> None:
    """Raise ConfigError if ``betas`` are not two numbers in [0, 1)."""
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ConfigError(f"betas are {betas!r}; they must be two numbers in [0, 1)")


STATE_DTYPES = ("fp32", "bf16", "int8")
MOMENTS = ("exp_avg", "exp_avg_sq")
SCALES = ("exp_avg_scale", "exp_avg_sq_scale")
ARRAYS = (*MOMENTS, *SCALES, "remainder")  # the state arrays of all formats

_MAX_CODE = 127.0
_MAX_ROOT_CODE = 255.0
_MIN_SCALE = 2.0**-63  # must equal the constant in csrc/adam/quantize.h


def step_count(count: float) -> torch.Tensor:
    """Return a step count as torch's Adam keeps it: an fp32 CPU tensor, independent of torch's default dtype
    and device.
    """
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
    """How Adam's states are stored. ``state_dtype``: of the moments. ``remainders``: also keep the low 16
    bits of bf16 parameters' fp32 masters.

    Raises:
        ConfigError: an unknown ``state_dtype``.
    """

    state_dtype: str = "fp32"
    remainders: bool = False

    def __post_init__(self) -> None:
        if self.state_dtype not in STATE_DTYPES:
            raise ConfigError(f"state_dtype is {self.state_dtype!r}; it can be {', '.join(STATE_DTYPES)}")

    def parts(self, param: torch.Tensor) -> tuple[StateSpec, ...]:
        """Return the arrays of the state of ``param``."""
        return self.parts_for(param.dtype)

    def parts_for(self, dtype: torch.dtype) -> tuple[StateSpec, ...]:
        """Return the arrays of the state of a parameter of ``dtype``."""
        parts = _PARTS[self.state_dtype]
        return (*parts, _REMAINDER) if self.remainders and dtype == torch.bfloat16 else parts

    def nbytes(self, param: torch.Tensor) -> int:
        """Return the bytes of the state of ``param``."""
        return sum(part.nbytes(param.numel()) for part in self.parts(param))

    def zeros(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the state before the first step; arrays with one value per element have the parameter's
        memory order.
        """
        return {part.name: self._empty(part, param).zero_() for part in self.parts(param)}

    def empty(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return uninitialized state arrays."""
        return {part.name: self._empty(part, param) for part in self.parts(param)}

    def _empty(self, part: StateSpec, param: torch.Tensor) -> torch.Tensor:
        if part.per_block:
            return torch.empty(part.count(param.numel()), dtype=part.dtype, device=param.device)
        return torch.empty_strided(param.size(), param.stride(), dtype=part.dtype, device=param.device)

    def complete(self, state: Mapping[str, Any], param: torch.Tensor) -> bool:
        """Return whether ``state`` has all arrays of this format."""
        return all(part.name in state for part in self.parts(param))

    def fitted(self, state: dict[str, Any], param: torch.Tensor, label: str) -> dict[str, Any]:
        """Return the complete ``state``, with its arrays in the current memory order of ``param``.

        Raises:
            ConfigError: an array has another dtype, shape or device; ``label`` names the parameter.
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
        """Return a state with fp32 moments, as in torch.

        int8 scales and remainders stay in the result, so that :meth:`imported` restores every bit. If the
        moments are not fp32 already, all tensors are copies.
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
        """Convert fp32 moments, and the extra arrays that :meth:`exported` left, to new arrays of this
        format.

        Moments that do not come from this format are rounded to nearest.

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
    """Multiply a dense fp32 tensor of codes in place by the scales of its blocks."""
    values = flat(codes)
    whole = values.numel() // BLOCK_NUMEL
    if whole:
        values[: whole * BLOCK_NUMEL].view(whole, BLOCK_NUMEL).mul_(scale[:whole, None])
    values[whole * BLOCK_NUMEL :].mul_(scale[whole:])
    return codes


def _encode(
    moments: Mapping[str, torch.Tensor], state: Mapping[str, Any], result: Mapping[str, torch.Tensor]
) -> None:
    """Fill the arrays of int8 moments. If the moments were decoded with the scales in ``state``, keep these
    scales.
    """
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
    """Return the nearest codes, as floats. The code of a second moment is 0 only if its whole block is 0."""
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
    """Elements of one parameter, as the kernels update them.

    A row keeps its tensors, so no address outlives its memory. ``states`` maps names to tensors: ``exp_avg``,
    ``exp_avg_sq``; with int8 moments also their ``_scale``; with ``remainder`` a bf16 parameter is the upper
    half of an exact fp32 master. None stands for a state that :meth:`KeptAdamTable.place_states` places
    later. Tensors must be dense, in one memory order, of the right dtypes: this is not checked.
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
        """Args:
            param: the parameter.
            grad: its gradient.
            states: its states by name.
            state_dtype: how the moments are stored.
            half_out: receives a 16-bit copy of the new fp32 parameter.
            elements: the range of ``param`` and ``grad`` to update, in memory order; the states contain only
                this range. None: all.
            first: the index of the first element of ``param`` within the whole parameter.
            step_index: the index of the row's step among the steps of a call.

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
        """Return a copy without gradient, to be kept between steps for :meth:`again`."""
        row = AdamRow.__new__(AdamRow)
        row.columns, row.start, row.tensors = self.columns, self.start, self.tensors
        row.grad = self.grad.new_empty(0)
        return row

    def again(self, grad: torch.Tensor, step_index: int) -> AdamRow:
        """Return the row for another step: the same memory with another gradient."""
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
    """Rows in the form that C++ reads. Keeps their tensors, so nothing that a call uses is freed before it
    returns.
    """

    def __init__(self, rows: Sequence[AdamRow]) -> None:
        """Take over ``rows``, at least one."""
        self._owners: Sequence[AdamRow] = tuple(rows)
        self._columns = np.array([row.columns for row in self._owners], dtype=np.int64)
        # Cached: a pass over large tensors evicts numpy's code from the CPU caches, so calls to it are slow.
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
        """Update the tensors of all rows, or of ``rows``, in place, without the GIL. Each row has the index
        of its entry in ``options``. Return whether all gradients were finite if the options ask for the
        check, else True.
        """
        address, count = self._address, self._num_rows
        if rows is not None:
            address, count = address + rows.start * self._columns.strides[0], rows.stop - rows.start
        return _C.adam_step(address, count, options, threads=threads, processors=processors)

    def launch(self, options: list[_C.AdamOptions], *, stream: int) -> bool:
        """Update the tensors of all rows in place on a GPU, in the order of ``stream``, its
        current stream.
        """
        return _C.cuda_adam_step(self._address, self._num_rows, options, stream=stream)


class KeptAdamTable(AdamTable):
    """A table that is kept between steps: each step takes its gradients and releases them.

    The caller must keep parameters and states at their addresses. Not thread-safe.
    """

    def __init__(self, rows: Sequence[AdamRow], grad_of: Sequence[int] | None = None) -> None:
        """Take over ``rows``, with the gradients of the first step.

        ``grad_of``: for rows that share gradients, the index of each row's gradient among those that
        :meth:`take_gradients` finds. None: one gradient per row.
        """
        super().__init__(rows)
        self._tensors = [row.tensors for row in rows]
        self._grads: Sequence[torch.Tensor] = [row.grad for row in rows]
        self._owners = ()  # the rows would keep the first step's gradients alive
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
        """Take the gradients that ``watch`` finds. Return False, and take none, if an object that it watches
        was replaced.
        """
        found = watch.take_gradients(params, all_states, self._taken_address, self._stride)
        self._grads = found or []
        if found is not None and self._grad_of is not None:
            self._columns[:, _GRAD_COLUMN] = self._taken[self._grad_of] + self._grad_starts
        return found is not None

    def let_gradients_go(self) -> None:
        """Release the gradients."""
        self._grads = []

    def set_steps(self, indices: npt.NDArray[np.int64]) -> None:
        """Set the index of each row's options."""
        self._columns[:, _STEP_COLUMN] = indices

    def place_states(
        self, rows: slice, offsets: Mapping[str, npt.NDArray[np.int64]], memory: torch.Tensor
    ) -> None:
        """Set the addresses of the states of ``rows``: ``offsets`` are bytes in ``memory`` by state name, -1
        for a state that a row lacks. ``memory`` is kept alive until the next call.
        """
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
        """See :meth:`AdamTable.run_on_cpu`. Raises StateError if no gradients were taken."""
        self._require_gradients()
        return super().run_on_cpu(options, threads=threads, processors=processors, rows=rows)

    def launch(self, options: list[_C.AdamOptions], *, stream: int) -> bool:
        """See :meth:`AdamTable.launch`. Raises StateError if no gradients were taken."""
        self._require_gradients()
        return super().launch(options, stream=stream)

    def _require_gradients(self) -> None:
        if not self._grads:
            raise StateError("the gradients of these rows were released; read those of this step first")


TYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def has_cuda_kernel() -> bool:
    """Return whether this build can update CUDA tensors."""
    return _C.build_info()["cuda"] is not None


@dataclass(frozen=True)
class AdamHyper:
    """The settings of one Adam step.

    Raises:
        ConfigError: a value is out of range.
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
        """Read the settings from a parameter group; one-element tensors count as numbers."""
        return cls(
            **floats_of(group, "lr", "eps", "weight_decay"),
            betas=betas_of(group),
            bias_correction=bool(group["bias_correction"]),
            adamw_mode=bool(group["adamw_mode"]),
        )


@dataclass(frozen=True)
class GradScale:
    """The transform of a gradient before the update:
    ``clamp(g * pre_scale, -clip_value, clip_value) * post_scale``.
    """

    pre_scale: float = 1.0
    clip_value: float = math.inf
    post_scale: float = 1.0


@dataclass(frozen=True)
class AdamStep:
    """One step: its settings, its number (from 1), and the transform of the gradient.

    ``check_finite``: the kernel checks every gradient element, before the transform.
    """

    hyper: AdamHyper
    number: int
    scale: GradScale = GradScale()
    check_finite: bool = False

    def options(self) -> _C.AdamOptions:
        """Return the step as the kernel's options."""
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
    """Update the tensors of ``rows`` in place; each row has the index of its entry in ``steps``.

    On the CPU at most ``torch.get_num_threads()`` threads work, without the GIL, on ``processors`` if given;
    on a GPU one launch goes to the current stream.

    Returns:
        Whether all gradients were finite if a step has ``check_finite``; else True.

    Raises:
        StateError: an address is null or misaligned, or a step is below 1; nothing has changed.
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

    All are dense CPU tensors of one shape and memory order; only the gradient may have another order and is
    then copied. ``param`` is fp32 or 16-bit; a 16-bit update is computed on its fp32 cast and rounded back.
    ``half_out`` receives a 16-bit copy of the new fp32 parameter; it may be the gradient itself.

    Returns:
        Whether the gradient was finite; True without ``check_finite``.

    Raises:
        ConfigError: names a tensor that does not fit; nothing has changed.
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
    """Return the sum of squares of a dense fp32, bf16 or fp16 tensor, accumulated in double in one read.

    It is NaN or infinite exactly if an element is not finite. On the CPU the bits do not depend on the number
    of threads or the instruction set; on a GPU they are those of torch's norm. For the 2-norm of several
    tensors, add their sums and take the square root.

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
    if tensor._is_zerotensor():  # torch's ZeroTensor has no memory
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
