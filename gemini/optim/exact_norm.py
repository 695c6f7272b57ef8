"""The 2-norm of a vector in parts, with the same bits however it is cut."""

from __future__ import annotations

from fractions import Fraction

import torch

from gemini import _C

_EXPONENTS = 256  # of fp32; the last one counts what is not finite
_LIMBS = 3
_LIMB_BITS = 40
_BIAS = 150  # of an exponent, for a significand that is an integer


def empty_squares() -> torch.Tensor:
    """Return the exact sum of no squares: int64, shape (exponents, limbs). Such sums can be added."""
    return torch.zeros(_EXPONENTS, _LIMBS, dtype=torch.int64)


def exact_squares(values: torch.Tensor) -> torch.Tensor:
    """Return the exact sum of the squares of dense fp32 elements, one dimension, in CPU memory."""
    if values.dtype != torch.float32 or values.dim() != 1 or not values.is_contiguous():
        raise ValueError(
            f"exact_squares takes a flat fp32 tensor, not {values.dtype} of {tuple(values.shape)}"
        )
    limbs = _C.exact_squares(values.data_ptr(), values.numel())
    return torch.tensor(limbs, dtype=torch.int64).view(_EXPONENTS, _LIMBS)


def norm_of(squares: torch.Tensor) -> torch.Tensor:
    """Return the square root of a sum of squares, an fp32 scalar: rounded from the exact sum to double, then
    to fp32; NaN where an element was not finite."""
    sums = squares.tolist()
    if any(sums[-1]):
        return torch.tensor(float("nan"))
    total = Fraction(0)
    for exponent, limbs in enumerate(sums[:-1]):
        significands = sum(limb << _LIMB_BITS * place for place, limb in enumerate(limbs))
        if significands:
            total += significands * Fraction(2) ** (2 * (max(exponent, 1) - _BIAS))
    return torch.tensor(float(total), dtype=torch.float64).sqrt().float()
