"""The exchange of tokens: tokens are sent to the ranks of their experts, and the results come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gemini.parallel.mesh import Axis


class _RowExchange(torch.autograd.Function):
    """Sends rows to other ranks; backward sends their gradients back."""

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
    """Return the results of the experts on the ranks of ``axis`` for ``rows``, in the order of the rows.
    Collective, also on ranks without rows.

    Args:
        rows: sorted by expert.
        counts: the number of rows for each expert of all ranks.
        compute: takes rows sorted by this rank's experts and the number of rows for each; returns the
            results.
    """
    to_ranks = counts.view(axis.size, -1)
    one_each = [1] * axis.size
    from_ranks = axis.exchange_rows(to_ranks.contiguous(), one_each, one_each)
    sent, received = to_ranks.sum(1).tolist(), from_ranks.sum(1).tolist()
    arrived = _exchanged(rows, axis, sent, received)
    # Rows arrive by rank, and by expert within each. An expert takes its rows together, in rank order.
    numbers = torch.arange(to_ranks.shape[1], dtype=torch.int64, device=counts.device)
    owners = numbers.repeat(axis.size).repeat_interleave(from_ranks.flatten(), output_size=len(arrived))
    order = owners.argsort(stable=True)
    made = compute(arrived.index_select(0, order), from_ranks.sum(0))
    return _exchanged(torch.empty_like(made).index_copy(0, order, made), axis, received, sent)


def _exchanged(rows: Tensor, axis: Axis, sent: list[int], received: list[int]) -> Tensor:
    return _RowExchange.apply(rows, axis, sent, received)  # type: ignore[no-untyped-call, no-any-return]
