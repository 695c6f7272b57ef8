"""How an optimizer keeps a parameter's moments, and how they become torch's fp32 moments and back.

The layouts, their bytes and what they do to the numbers: docs/notes/adam.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gemini.chunk.chunk import BLOCK_NUMEL, StateSpec, num_blocks
from gemini.chunk.dense import flat, is_dense, ordered_like, same_order
from gemini.errors import ConfigError

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
