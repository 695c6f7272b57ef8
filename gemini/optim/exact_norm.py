"""The 2-norm of a vector in parts, with the same bits however it is cut."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import torch

from gemini import _C

_EXPONENTS = 256  # of fp32; the last one counts what is not finite
_INFINITE, _NO_NUMBER = 0, 1  # in which limb
_LIMBS = 3
_LIMB_BITS = 40
_LIMB_MASK = 2**_LIMB_BITS - 1
_BLOCK = 2**22  # elements whose lower limbs may be added before there is a carry
_LANES = 64
_BIAS = 150  # of an exponent, for a significand that is an integer


def empty_squares() -> torch.Tensor:
    """Return the exact sum of no squares: int64, shape (exponents, limbs). Such sums can be added."""
    return torch.zeros(_EXPONENTS, _LIMBS, dtype=torch.int64, device="cpu")


def exact_squares(values: torch.Tensor) -> torch.Tensor:
    """Return the exact sum, in CPU memory, of the squares of dense fp32 elements, one dimension."""
    if values.dtype != torch.float32 or values.dim() != 1 or not values.is_contiguous():
        raise ValueError(
            f"exact_squares takes a flat fp32 tensor, not {values.dtype} of {tuple(values.shape)}"
        )
    if values.device.type != "cpu":
        return squares_by_operators(values).cpu()
    limbs = _C.exact_squares(values.data_ptr(), values.numel())
    return torch.tensor(limbs, dtype=torch.int64, device="cpu").view(_EXPONENTS, _LIMBS)


def squares_by_operators(values: torch.Tensor) -> torch.Tensor:
    """Sum as :func:`exact_squares`, with torch's operators on the device of ``values``, where the sum stays.

    Integers are added, so the order, which a GPU does not keep, is of no account.
    """
    # Of many elements, sums of equal exponents side by side: many threads add to each.
    num_lanes = min(_LANES, 1 + values.numel() // _EXPONENTS)
    sums = torch.zeros(_LIMBS, num_lanes * _EXPONENTS, dtype=torch.int64, device=values.device)
    lanes = torch.arange(min(_BLOCK, values.numel()), device=values.device) % num_lanes * _EXPONENTS
    for block in values.view(torch.int32).split(_BLOCK):
        exponents = (block >> 23) & 255
        significands = (block & (2**23 - 1)).long() + (exponents > 0).long() * 2**23
        counted = torch.where(significands > 2**23, 2**_LIMB_BITS, 1)
        squares = torch.where(exponents == _EXPONENTS - 1, counted, significands * significands)
        places = lanes[: block.numel()] + exponents
        sums[0].scatter_add_(0, places, squares & _LIMB_MASK)
        sums[1].scatter_add_(0, places, squares >> _LIMB_BITS)
        for lower, upper in pairwise(sums):
            upper.add_(lower >> _LIMB_BITS)
            lower.bitwise_and_(_LIMB_MASK)
    return sums.view(_LIMBS, num_lanes, _EXPONENTS).sum(1).t().contiguous()


def norm_of(squares: torch.Tensor) -> torch.Tensor:
    """Return the square root of a sum of squares, an fp32 scalar: rounded from the exact sum to double, then
    to fp32; as torch's, NaN where an element was no number, else infinite where one was infinite."""
    *sums, special = squares.tolist()
    if special[_NO_NUMBER]:
        return torch.tensor(math.nan, dtype=torch.float32, device="cpu")
    if special[_INFINITE]:
        return torch.tensor(math.inf, dtype=torch.float32, device="cpu")
    total = Fraction(0)
    for exponent, limbs in enumerate(sums):
        significands = sum(limb << _LIMB_BITS * place for place, limb in enumerate(limbs))
        if significands:
            total += significands * Fraction(2) ** (2 * (max(exponent, 1) - _BIAS))
    return torch.tensor(float(total), dtype=torch.float64, device="cpu").sqrt().float()
