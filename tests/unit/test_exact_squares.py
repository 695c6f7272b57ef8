"""Exact sums of squares by torch's operators: those of the kernel."""

from __future__ import annotations

import math

import pytest
import torch

from gemini.optim.gradients import empty_squares, exact_squares, norm_of, squares_by_operators


def sums(squares: torch.Tensor) -> list[int]:
    """Return the sum for each exponent, whatever its limbs carry."""
    return [sum(limb << 40 * place for place, limb in enumerate(limbs)) for limbs in squares.tolist()]


@pytest.mark.parametrize("numel", [0, 1, 1000, 2**22 + 5])
def test_operators_add_as_the_kernel_does(numel: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    values = torch.randn(numel, generator=generator) * torch.exp2(
        torch.randint(-140, 100, (numel,), generator=generator).float()
    )
    got, want = squares_by_operators(values), exact_squares(values)
    assert sums(got) == sums(want)
    assert torch.equal(norm_of(got), norm_of(want))


def test_sums_carry_where_one_exponent_has_many_elements() -> None:
    values = torch.full((3 * 2**22,), 1.9999999)
    assert sums(squares_by_operators(values)) == sums(exact_squares(values))


@pytest.mark.parametrize("special", [(), (math.inf,), (-math.inf,) * 3, (math.nan,), (math.nan, math.inf)])
def test_norm_of_what_is_not_finite_is_that_of_torch(special: tuple[float, ...]) -> None:
    values = torch.tensor([3.0, *special, 4.0])
    want = torch.linalg.vector_norm(values)
    for squares in (exact_squares(values), squares_by_operators(values)):
        # Of several ranks, one of which has nothing of the kind.
        norm = norm_of(squares + empty_squares() + exact_squares(torch.zeros(2)))
        assert torch.equal(norm.nan_to_num(nan=-1.0), want.nan_to_num(nan=-1.0))
    assert sums(squares_by_operators(values)) == sums(exact_squares(values))
