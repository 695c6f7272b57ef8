"""The function that one rank runs for an operator on its parts of the tensors.

It is the operator itself, with the part's size among its arguments if it takes a size, or a function that
knows where the part lies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from gemini.planner.operators.conversions import OperatorLayout, part_of

_aten = torch.ops.aten

# The index of the argument that names the shape of the output.
SIZE_ARGUMENTS: dict[Any, int] = {
    _aten.view.default: 1,
    _aten._unsafe_view.default: 1,
    _aten.reshape.default: 1,
    _aten.expand.default: 1,
    _aten.slice_backward.default: 1,
    _aten.select_backward.default: 1,
    _aten.new_zeros.default: 1,
    _aten.new_ones.default: 1,
    _aten.new_empty.default: 1,
    _aten.new_full.default: 1,
}
_AS_RESHAPE = (_aten.view.default, _aten._unsafe_view.default)
# Operators that draw random numbers, one for each element of their first input.
RANDOM = (
    _aten.bernoulli.p,
    _aten.bernoulli.default,
    _aten.native_dropout.default,
    _aten.rand_like.default,
    _aten.randn_like.default,
)


class LocalRank(Protocol):
    """The coordinates of a rank on the mesh, and its collectives."""

    @property
    def place(self) -> tuple[int, ...]:
        """The rank's coordinates."""

    def add_up(self, tensor: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
        """Return the sum of ``tensor`` over the ranks along these axes."""


_Layouts = Sequence[OperatorLayout | None]
# Runs a node: takes the rank, then the arguments of the node.
LocalCall = Callable[..., Any]


def tensors_of(node: fx.Node) -> list[fx.Node]:
    """Return the nodes of a node's tensor arguments, in order, with repetitions."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), lambda each: found.append(each) or each)  # type: ignore[func-returns-value]
    return found


def local_call(
    node: fx.Node,
    inputs: Sequence[OperatorLayout],
    outputs: _Layouts,
    sizes: Sequence[int],
    values: Sequence[torch.Tensor | None],
) -> LocalCall:
    """Return the function that a rank runs for ``node``. It takes the rank and the parts of the arguments."""
    target: Any = node.target
    is_cut = any(each is not None and each.cut for each in (*inputs, *outputs))
    if is_cut and (special := _special(node, inputs, outputs, sizes)) is not None:
        return special
    at = SIZE_ARGUMENTS.get(target)
    function = _aten.reshape.default if target in _AS_RESHAPE else target
    if at is None or not is_cut or outputs[0] is None or values[0] is None:
        return _Unchanged(function)
    return _Sized(function, at, outputs[0].local_shape(values[0].shape, sizes))


class _Unchanged:
    """The operator with unchanged arguments."""

    def __init__(self, target: Any) -> None:
        self._target = target

    @property
    def __name__(self) -> str:
        return str(self._target).removeprefix("aten.").replace(".", "_")

    def __call__(self, _rank: LocalRank, *args: Any, **kwargs: Any) -> Any:
        return self._target(*args, **kwargs)


class _Sized(_Unchanged):
    """The operator with the size of the part instead of the size of the whole tensor."""

    def __init__(self, target: Any, at: int, shape: tuple[int, ...]) -> None:
        super().__init__(target)
        self._at, self._shape = at, shape

    def __call__(self, _rank: LocalRank, *args: Any, **kwargs: Any) -> Any:
        return self._target(*args[: self._at], self._shape, *args[self._at + 1 :], **kwargs)


def _special(
    node: fx.Node, inputs: Sequence[OperatorLayout], outputs: _Layouts, sizes: Sequence[int]
) -> LocalCall | None:
    target = node.target
    if target is _aten.embedding.default and inputs[0].dims[0]:
        return _embedding_of_rows(inputs[0].dims[0], sizes)
    if target is _aten.embedding_dense_backward.default and outputs[0] is not None and outputs[0].dims[0]:
        return _rows_of_gradient(outputs[0].dims[0], sizes)
    if target in (_aten.nll_loss_forward.default, _aten.nll_loss2d_forward.default):
        return _loss_of_parts(target, inputs[0].dims[0])
    if target is _aten.mse_loss_backward.default:
        return _squares_of_parts(math.prod(sizes[axis] for axis in inputs[1].cut))
    if target in RANDOM:
        return _random_of_whole(target, inputs[0], sizes, tuple(tensors_of(node)[0].meta["val"].shape))
    if target is _aten.convolution_backward.default and outputs[2] is not None and outputs[2].cut:
        bias: Any = node.args[3]
        parts = outputs[2].shards(sizes)
        return _Sized(target, 3, tuple(size // parts for size in bias))
    return None


def _first_row(place: Sequence[int], axes: Sequence[int], sizes: Sequence[int], rows: int) -> int:
    """Return the number of the first row on the rank at ``place``, if each rank has ``rows`` rows."""
    number = 0
    for axis in axes:
        number = number * sizes[axis] + place[axis]
    return number * rows


def _embedding_of_rows(axes: tuple[int, ...], sizes: Sequence[int]) -> LocalCall:
    def embedding(rank: LocalRank, weight: torch.Tensor, ids: torch.Tensor, *_options: Any) -> torch.Tensor:
        """Look up the ids with rows on this rank; all other ids give zeros."""
        own = ids - _first_row(rank.place, axes, sizes, weight.shape[0])
        elsewhere = (own < 0) | (own >= weight.shape[0])
        found: torch.Tensor = _aten.embedding.default(weight, own.masked_fill(elsewhere, 0))
        return found.masked_fill_(elsewhere.unsqueeze(-1), 0.0)

    return embedding


def _rows_of_gradient(axes: tuple[int, ...], sizes: Sequence[int]) -> LocalCall:
    parts = math.prod(sizes[axis] for axis in axes)

    def embedding_dense_backward(
        rank: LocalRank, grad: torch.Tensor, ids: torch.Tensor, num_weights: int, padding: int, _scaled: bool
    ) -> torch.Tensor:
        """Return the gradient of this rank's rows. Gradients of all other ids go to one extra row, which is
        cut off."""
        rows = num_weights // parts
        first = _first_row(rank.place, axes, sizes, rows)
        own = ids - first
        elsewhere = (own < 0) | (own >= rows) | (ids == padding)
        made: torch.Tensor = _aten.embedding_dense_backward.default(
            grad, own.masked_fill(elsewhere, rows), rows + 1, -1, False
        )
        return made[:rows]

    return embedding_dense_backward


def _loss_of_parts(target: Any, axes: tuple[int, ...]) -> LocalCall:
    def nll_loss(
        rank: LocalRank,
        scores: torch.Tensor,
        classes: torch.Tensor,
        weight: torch.Tensor | None,
        reduction: int,
        ignored: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss over the samples of all ranks, and their total weight."""
        loss, counted = target(scores, classes, weight, 2, ignored)
        loss, counted = rank.add_up(torch.stack((loss, counted)), axes).unbind()
        return (loss / counted if reduction == 1 else loss), counted

    return nll_loss


def _squares_of_parts(parts: int) -> LocalCall:
    def mse_loss_backward(
        _rank: LocalRank, grad: torch.Tensor, scores: torch.Tensor, targets: torch.Tensor, reduction: int
    ) -> Any:
        """Return the gradient of this part, for a mean over all parts or for a sum."""
        made = _aten.mse_loss_backward.default(grad, scores, targets, reduction)
        return made / parts if reduction == 1 else made

    return mse_loss_backward


def _random_of_whole(
    target: Any, layout: OperatorLayout, sizes: Sequence[int], shape: tuple[int, ...]
) -> LocalCall:
    def random(rank: LocalRank, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Draw for the whole tensor, as every rank does, and keep this rank's part."""
        if target is _aten.native_dropout.default:
            kept, mask = target(tensor.new_ones(shape), *args, **kwargs)
            kept = part_of(kept, layout, sizes, rank.place)
            return tensor * kept, part_of(mask, layout, sizes, rank.place).clone()
        drawn = target(tensor.new_empty(shape), *args, **kwargs)
        return part_of(drawn, layout, sizes, rank.place).clone()

    return random
