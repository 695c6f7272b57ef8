"""A backward pass in halves, inputs first and weights later, gives the gradients of one in whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from gemini.parallel.pipeline.split_backward import backward_input, backward_weights

Stage = Callable[[Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, ...]]


def handed_on(received: Sequence[Tensor], w: Sequence[Tensor]) -> tuple[Tensor, ...]:
    x, memory = received
    return torch.tanh(x * w[0]) @ memory, memory


def only_handed_on(received: Sequence[Tensor], w: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return received[0] * w[0], received[1]


def apart(received: Sequence[Tensor], w: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """One output is of weights alone, and another is of it, too: a bias that is computed once."""
    bias = (w[0] * w[1]).exp()
    return torch.tanh(received[0] @ bias) + received[1], bias


def nothing_depends(received: Sequence[Tensor], w: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (w[0] * w[1]).exp(), w[2] * 2


def one_leads_to_another(received: Sequence[Tensor], w: Sequence[Tensor]) -> tuple[Tensor, ...]:
    memory = torch.tanh(received[0] @ w[0])
    return torch.tanh(memory @ w[1]) * received[1], memory


def used_twice(received: Sequence[Tensor], w: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """A weight meets inputs at two nodes, one behind the other, with other weights between."""
    bias = w[0].exp()
    first = torch.tanh(received[0] * bias) @ w[1]
    return (torch.tanh(first * bias) @ w[2] + received[1],)


def met_apart_and_together(received: Sequence[Tensor], w: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Two weights meet inputs at a node each, and a third one at both."""
    a, b = w[0].exp() * w[2], w[1].exp() * w[2]
    return received[0] * a + received[1] * b, received[0] * 2


STAGES: list[Stage] = [
    handed_on,
    only_handed_on,
    apart,
    nothing_depends,
    one_leads_to_another,
    used_twice,
    met_apart_and_together,
]


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_halves_give_the_gradients_of_the_whole(stage: Stage, order: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(3)
    first = [torch.randn(4, 4, generator=draw, dtype=torch.float64) for _ in range(7)]

    def leaves() -> tuple[list[Tensor], list[Tensor]]:
        fresh = [tensor.clone().requires_grad_() for tensor in first[:5]]
        return fresh[:2], fresh[2:]

    received, weights = leaves()
    outputs = stage(received, weights)
    torch.autograd.backward(outputs, first[5 : 5 + len(outputs)])
    wanted = [tensor.grad for tensor in (*received, *weights)]

    received, weights = leaves()
    outputs = stage(received, weights)
    found, rest = backward_input(
        outputs, first[5 : 5 + len(outputs)], received, [weights[index] for index in order]
    )
    assert all(tensor.grad is None for tensor in (*received, *weights))
    backward_weights(rest)
    for got, want in zip([*found, *(tensor.grad for tensor in weights)], wanted, strict=True):
        assert (got is None) == (want is None)
        assert got is None or torch.allclose(got, want, rtol=1e-12)
