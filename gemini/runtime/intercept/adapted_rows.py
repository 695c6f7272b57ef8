"""The sum of experts and a low-rank product, ``weight + alpha * left @ right``, as a lazy tensor: rows are
computed when an operator uses them.

PEFT adapts an array of experts this way (``target_parameters``): each pass would compute the sum of all
experts, and backward its whole gradient. Here the sum is a tensor without memory. A grouped product, and a
linear layer with one row, compute a run of used rows, multiply, and free the rows. Backward computes them
again. Each row of sum, product and gradients is computed by the same operators as all rows at once, so it has
the same bits. Any other operator computes the whole sum. See docs/notes/experts.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch._C import DisableTorchFunctionSubclass as PlainTensors
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.nn import functional

from gemini.errors import StateError
from gemini.runtime.gate.gate import CutRef
from gemini.runtime.intercept.functions import METADATA_FUNCTIONS
from gemini.runtime.intercept.rows import Operate, is_view_of_rows, runs_of
from gemini.system.lazy_tensor import LazyTensor, versions_of

_GROUPED: frozenset[Any] = frozenset(
    getattr(owner, name)
    for owner, name in ((torch, "_grouped_mm"), (functional, "grouped_mm"))
    if hasattr(owner, name)
)
_MATMUL: frozenset[Any] = frozenset((torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__))
_ROW_TYPES = (torch.int64, torch.int32)
# From these sizes on, a product of matrices has the same bits in a batch of any size. Below them (rank 1, or
# few multiplications in 16 bits) torch chooses kernels by the batch size.
_LEAST_RANK = 2
_LEAST_MULTIPLICATIONS = 4097


def lazy_sum(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], operate: Operate) -> Any:
    """Return the lazy result of ``torch.baddbmm`` with a frozen, cut tensor; NotImplemented for anything
    else. ``operate`` runs the operator."""
    if func is not torch.baddbmm or len(args) != 3 or kwargs.keys() - {"alpha"}:
        return NotImplemented
    weight, left, right = args
    if type(getattr(weight, "_ref", None)) is not CutRef or forward_ad._current_level >= 0:
        return NotImplemented
    with PlainTensors():
        rank, least = left.shape[-1], _LEAST_MULTIPLICATIONS if weight.element_size() < 4 else 0
        if rank < _LEAST_RANK or weight.shape[1] * weight.shape[2] * rank < least:
            return NotImplemented
        if torch.is_autocast_enabled(weight.device.type):  # the sum has another dtype
            return NotImplemented
        trains = weight.requires_grad or not (left.requires_grad or right.requires_grad)
        shapes = weight.shape[:1] + left.shape[1:2] + right.shape[2:], left.shape[2], left.shape[0]
        is_one_each = shapes == (weight.shape, right.shape[1], right.shape[0])
    if (trains and torch.is_grad_enabled()) or not is_one_each:
        return NotImplemented
    if not torch.is_grad_enabled():  # gradients may be enabled where rows are used later
        left, right = left.detach(), right.detach()
    versions = versions_of(weight, left, right)
    return AdaptedRows(_Sum(weight, left, right, dict(kwargs), operate, versions=versions))


@dataclass(frozen=True)
class _Sum:
    """``weight`` (rows, m, n), cut and frozen; ``left`` (rows, m, rank); ``right`` (rows, rank, n).

    ``operate`` runs ``torch.baddbmm``. ``is_transposed``: the lazy tensor is the transpose of each matrix.
    """

    weight: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor
    options: dict[str, Any]
    operate: Operate
    is_transposed: bool = False
    versions: tuple[int, ...] = ()  # versions of all three when the sum was created

    def check(self) -> None:
        """Raise StateError if a part of the sum was changed in place since it was created."""
        if versions_of(self.weight, self.left, self.right) != self.versions:
            raise StateError(
                "a weight of experts, or an adapter on it, was changed in place between the sum of both and "
                "its use; compute the sum again after the change"
            )

    def whole(self) -> torch.Tensor:
        """Compute and return all rows. Raises as a PreOp."""
        ref: CutRef = self.weight._ref  # type: ignore[attr-defined]
        args = (self.weight, self.left, self.right)
        with torch.autocast(self.weight.device.type, enabled=False):  # as when the sum was created
            return self._turned(self.operate(args, self.options, ref, ref.tensors))

    def rows(self, run: range, factors: _Factors) -> torch.Tensor:
        """Compute and return a run of rows. Raises as a PreOp."""
        weight: Any = self.weight[run.start : run.stop]
        args = (weight, factors.left[run.start : run.stop], factors.right[run.start : run.stop])
        return self._turned(self.operate(args, self.options, weight._ref, weight._ref.tensors))

    def _turned(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.transpose(-2, -1) if self.is_transposed else rows

    def gradients(self, grad: torch.Tensor, run: range, factors: _Factors) -> None:
        """Add the gradients of a run of rows to ``factors``, as the backward of ``torch.baddbmm`` does."""
        given = self._turned(grad)
        alpha = self.options.get("alpha", 1)
        rows = slice(run.start, run.stop)
        if factors.left_grad is not None:
            made = given.bmm(factors.right[rows].transpose(1, 2))
            factors.left_grad[rows] = made if alpha == 1 else made * alpha
        if factors.right_grad is not None:
            made = factors.left[rows].transpose(1, 2).bmm(given)
            factors.right_grad[rows] = made if alpha == 1 else made * alpha


class _Factors:
    """Copies of both factors as ordinary tensors. Operators on rows then use only expert chunks, so the order
    of a step does not depend on the number of runs. In backward also their gradients, None for a factor that
    needs none."""

    def __init__(self, left: torch.Tensor, right: torch.Tensor) -> None:
        self.left, self.right = left.clone(), right.clone()
        self.left_grad: torch.Tensor | None = None
        self.right_grad: torch.Tensor | None = None

    def with_gradients(self, of_left: bool, of_right: bool) -> _Factors:
        """Create the gradients that are needed, as zeros; return self."""
        self.left_grad = torch.zeros_like(self.left) if of_left else None
        self.right_grad = torch.zeros_like(self.right) if of_right else None
        return self


class _Groups(NamedTuple):
    """Groups of tokens: the tokens of ``row`` end at ``ends[row]`` and begin where those of the previous row
    end. ``runs``: runs of used rows."""

    ends: list[int]
    offsets: torch.Tensor
    runs: list[range]

    def each(self) -> Iterator[tuple[range, slice, torch.Tensor]]:
        """Yield each run, the slice of its tokens, and the ends of its rows' tokens within the slice."""
        for run in self.runs:
            begin = self.ends[run.start - 1] if run.start else 0
            offsets = self.offsets[run.start : run.stop] - begin
            yield run, slice(begin, self.ends[run.stop - 1]), offsets


class _Product(torch.autograd.Function):
    """A grouped product: tokens (tokens, k), each group times a row of a sum, give (tokens, n)."""

    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, left: torch.Tensor, right: torch.Tensor, of: _Sum, groups: _Groups
    ) -> torch.Tensor:
        ctx.save_for_backward(tokens, left, right)
        ctx.of, ctx.groups = replace(of, left=left.detach(), right=right.detach()), groups
        factors = _Factors(left, right)
        made = tokens.new_zeros(len(tokens), of.weight.shape[1 if of.is_transposed else 2])
        for run, part, offsets in groups.each():
            made[part] = functional.grouped_mm(tokens[part], of.rows(run, factors), offs=offsets)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        tokens, left, right = ctx.saved_tensors
        of, needs = ctx.of, ctx.needs_input_grad
        factors = _Factors(left, right).with_gradients(*needs[1:3])
        of_tokens = torch.zeros_like(tokens) if needs[0] else None
        for run, part, offsets in ctx.groups.each():
            given, taken = grad[part], tokens[part]
            if of_tokens is not None:
                rows = of.rows(run, factors).transpose(-2, -1)
                of_tokens[part] = functional.grouped_mm(given, rows, offs=offsets)
                del rows
            of.gradients(_gradient_of_rows(given, taken, offsets, of.is_transposed), run, factors)
        return of_tokens, factors.left_grad, factors.right_grad, None, None


def _gradient_of_rows(
    grad: torch.Tensor, tokens: torch.Tensor, offsets: torch.Tensor, is_transposed: bool
) -> torch.Tensor:
    """Return the gradient of the rows that groups were multiplied with, computed as torch does for a
    transposed or a plain matrix."""
    if is_transposed:
        made = functional.grouped_mm(grad.transpose(-2, -1), tokens, offs=offsets)
        return made.transpose(-2, -1)
    return functional.grouped_mm(tokens.transpose(-2, -1), grad, offs=offsets)


class _RowProduct(torch.autograd.Function):
    """The product of tokens (tokens, k) with one row of a sum, a matrix (k, n), or (n, k) for a linear layer;
    gives (tokens, n)."""

    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, left: torch.Tensor, right: torch.Tensor, of: _Sum, is_linear: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(tokens, left, right)
        ctx.of = replace(of, left=left.detach(), right=right.detach())
        ctx.is_linear = is_linear
        row = of.rows(range(1), _Factors(left, right))[0]
        return functional.linear(tokens, row) if is_linear else tokens.mm(row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        tokens, left, right = ctx.saved_tensors
        of_tokens, needs = None, ctx.needs_input_grad
        factors = _Factors(left, right).with_gradients(*needs[1:3])
        if needs[0]:
            row = ctx.of.rows(range(1), factors)[0]
            of_tokens = grad.mm(row if ctx.is_linear else row.t())
            del row
        of_row = grad.t().mm(tokens) if ctx.is_linear else tokens.t().mm(grad)
        ctx.of.gradients(of_row[None], range(1), factors)
        return of_tokens, factors.left_grad, factors.right_grad, None, None


class AdaptedRows(LazyTensor):
    """A :class:`_Sum`, or one row of it if ``is_row``, without memory until an operator needs more than
    single rows."""

    description = METADATA_FUNCTIONS
    lost_gradient = (
        "the gradient of an adapted array of experts goes to a place where nobody computes it further: an "
        "operator that asks no class of its operands took the array; give it array.clone()"
    )

    _sum: _Sum
    _is_row: bool

    @staticmethod
    def __new__(cls, of: _Sum, *, is_row: bool = False) -> AdaptedRows:
        with PlainTensors():
            (count, *shape), dtype = of.weight.shape, of.weight.dtype
            trains = torch.is_grad_enabled() and (of.left.requires_grad or of.right.requires_grad)
        strides = [shape[1], 1]
        if of.is_transposed:
            shape, strides = shape[::-1], strides[::-1]
        if not is_row:
            shape, strides = [count, *shape], [shape[0] * shape[1], *strides]
        made = cls.without_memory(of.weight, shape, trains=trains, strides=strides, dtype=dtype)
        made._sum, made._is_row = of, is_row
        return made

    def compute(self) -> torch.Tensor:
        """Compute and return all rows, or the one row. Raises as :meth:`_Sum.check` and as a PreOp."""
        self._sum.check()
        rows = self._sum.whole()
        return rows[0] if self._is_row else rows

    @classmethod
    def without_values(cls, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return parts as lazy rows, and products with them computed by runs of used rows."""
        for rule in (_part, _grouped, _with_row):
            found = rule(func, args, kwargs)
            if found is not NotImplemented:
                return found
        return NotImplemented


# -- rules that keep rows lazy; each returns NotImplemented if the operator needs the whole sum -------------


def _part(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Select one row, or transpose every matrix."""
    rows = args[0]
    if type(rows) is not AdaptedRows or rows._is_row or rows._whole is not None or kwargs:
        return NotImplemented
    of = rows._sum
    if func in (torch.transpose, torch.Tensor.transpose) and sorted(d % 3 for d in args[1:]) == [1, 2]:
        return AdaptedRows(replace(of, is_transposed=not of.is_transposed))
    if func is not torch.Tensor.__getitem__ or not is_view_of_rows(func, args):
        return NotImplemented
    if not isinstance(args[1], (int, torch.Tensor)):
        return NotImplemented
    of.check()
    row = range(len(of.weight))[int(args[1])]
    weight, left, right = (each[row : row + 1] for each in (of.weight, of.left, of.right))
    versions = versions_of(weight, left, right)
    return AdaptedRows(replace(of, weight=weight, left=left, right=right, versions=versions), is_row=True)


def _grouped(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Multiply groups of tokens, each with a row."""
    given = {name: value for name, value in kwargs.items() if value is not None}
    if func not in _GROUPED or len(args) != 2 or given.keys() != {"offs"}:
        return NotImplemented
    tokens, rows = args
    offsets = given["offs"]
    if not _multiplies(tokens, rows) or rows._is_row:
        return NotImplemented
    if not isinstance(offsets, torch.Tensor) or offsets.dtype not in _ROW_TYPES or offsets.dim() != 1:
        return NotImplemented
    of, ends = rows._sum, offsets.tolist()
    of.check()
    used = [row for row, end in enumerate(ends) if end > (ends[row - 1] if row else 0)]
    return _Product.apply(tokens, of.left, of.right, of, _Groups(ends, offsets, runs_of(of.weight, used)))  # type: ignore[no-untyped-call]


def _with_row(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Apply a linear layer with one row, or multiply with it."""
    is_linear = func is functional.linear
    if not (is_linear or func in _MATMUL) or len(args) != 2 or kwargs:
        return NotImplemented
    tokens, row = args
    if not _multiplies(tokens, row) or not row._is_row or row._sum.is_transposed:
        return NotImplemented
    row._sum.check()
    return _RowProduct.apply(tokens, row._sum.left, row._sum.right, row._sum, is_linear)  # type: ignore[no-untyped-call]


def _multiplies(tokens: Any, rows: Any) -> bool:
    """Say whether ``tokens`` is a plain tensor of the dtype of ``rows``, and ``rows`` were not computed
    yet."""
    if type(rows) is not AdaptedRows or rows._whole is not None or type(tokens) is not torch.Tensor:
        return False
    is_same = tokens.dim() == 2 and len(tokens) > 0 and tokens.dtype is rows.dtype
    return is_same and not torch.is_autocast_enabled(tokens.device.type)
