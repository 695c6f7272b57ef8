"""The exchange of tokens: each goes to the ranks of its experts, and the results come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gemini.parallel.mesh import Axis


class _RowExchange(torch.autograd.Function):
    """Rows to other ranks; in backward, their gradients to where they came from."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, axis: Axis, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        ctx.back = axis, received, sent
        return axis.exchange_rows(rows.contiguous(), sent, received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        axis, sent, received = ctx.back
        return axis.exchange_rows(grad.contiguous(), sent, received), None, None, None


def through_experts(
    axis: Axis, rows: Tensor, counts: Tensor, compute: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Return what experts on the ranks of ``axis`` make of ``rows``, in the order of the rows. All ranks call
    it, those without rows too.

    Args:
        rows: sorted by expert.
        counts: how many rows each of all experts has.
        compute: makes results of rows that are sorted by this rank's experts, and of how many each has.
    """
    to_ranks = counts.view(axis.size, -1)
    one_each = [1] * axis.size
    from_ranks = axis.exchange_rows(to_ranks.contiguous(), one_each, one_each)
    sent, received = to_ranks.sum(1).tolist(), from_ranks.sum(1).tolist()
    arrived = _exchanged(rows, axis, sent, received)
    # By rank, and of each by expert: an expert takes its rows together, in the order of the ranks.
    numbers = torch.arange(to_ranks.shape[1], dtype=torch.int64, device=counts.device)
    owners = numbers.repeat(axis.size).repeat_interleave(from_ranks.flatten(), output_size=len(arrived))
    order = owners.argsort(stable=True)
    made = compute(arrived.index_select(0, order), from_ranks.sum(0))
    return _exchanged(torch.empty_like(made).index_copy(0, order, made), axis, received, sent)


def _exchanged(rows: Tensor, axis: Axis, sent: list[int], received: list[int]) -> Tensor:
    return _RowExchange.apply(rows, axis, sent, received)  # type: ignore[no-untyped-call, no-any-return]
