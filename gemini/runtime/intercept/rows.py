"""Runs operators that read only some rows of a tensor: an index, and a product of groups of tokens with one
expert's matrix each.

If the tensor lies in several chunks, only those with rows that are read are pinned; views read nothing. If
these do not fit on DEVICE together, the operator runs in turns. Each row of the result needs one row of the
tensor and does not depend on which other rows are computed with it; the rows are put back in order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch._C import DisableTorchFunctionSubclass as PlainTensors

from gemini.runtime.gate.gate import CutRef, TensorRef
from gemini.runtime.gate.guards import span_bytes
from gemini.runtime.intercept.row_leaves import row_gradient_of

Given = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments of an operator
# Runs the operator with only these tensors of a cut operand, and all tensors of its other operands.
Operate = Callable[[tuple[Any, ...], dict[str, Any], CutRef, tuple[int, ...]], Any]

_VIEWS = frozenset(
    getattr(torch.Tensor, name)
    for name in (
        *("view", "select", "narrow", "transpose", "permute", "t", "swapaxes", "swapdims", "movedim"),
        *("unsqueeze", "squeeze", "unbind", "split", "chunk", "unflatten", "expand"),
    )
) | {
    *(torch.transpose, torch.permute, torch.unbind, torch.split, torch.chunk, torch.select, torch.narrow),
    *(torch.squeeze, torch.unsqueeze, torch.swapaxes, torch.movedim),
    torch.Tensor.mT.__get__,  # type: ignore[attr-defined]
    torch.Tensor.T.__get__,  # type: ignore[attr-defined]
}
# 1 / share of DEVICE for one turn if turns must not depend on what is on DEVICE; and for one run of rows that
# train, because their gradient is as large and in no chunk until backward has made it.
_SHARE_OF_TURNS, _SHARE_OF_RUNS = 4, 16
_ROW_TYPES = (torch.int64, torch.int32)
_PRODUCTS = frozenset(("_grouped_mm", "grouped_mm", "grouped_mm_fallback"))


def is_view_of_rows(func: Any, args: tuple[Any, ...]) -> bool:
    """Say whether ``func(*args)`` returns a view of its operand and reads no element."""
    if func is not torch.Tensor.__getitem__:
        return func in _VIEWS
    indices = args[1] if type(args[1]) is tuple else args[1:2]
    return all(map(_is_basic, indices))


def _is_basic(index: Any) -> bool:
    if isinstance(index, torch.Tensor):
        return index.dim() == 0 and index.dtype not in (torch.bool, torch.uint8)
    return index is None or index is ... or type(index) in (int, slice)


def run_by_rows(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[Any], operate: Operate
) -> Any:
    """Run ``func`` with only the chunks that it reads of one cut operand; NotImplemented if it may read all
    of it. Raises as a PreOp, and as ``func`` for a bad index."""
    if func is torch.Tensor.__setitem__ and _is_cut(args[0], operands):
        if is_view_of_rows(torch.Tensor.__getitem__, args):
            return operate(args, kwargs, args[0]._ref, _covering(args[0], args[1]))
    elif func is torch.Tensor.__getitem__ and _is_cut(args[0], operands):
        rows = _rows_of_index(args[1], len(args[0]))
        if rows is not None and (args[1] is not rows.index or rows.rows.dim() != 1):
            tensors = _together(_of_rows(args[0], rows.used()).values())
            return operate(args, kwargs, args[0]._ref, tensors)
        if rows is not None:
            return _Index(args, kwargs, operands, rows).run(operate)
    elif getattr(func, "__name__", "") in _PRODUCTS and 2 <= len(args) <= 3 and _is_cut(args[1], operands):
        offsets = args[2] if len(args) == 3 else kwargs.get("offs")
        if isinstance(offsets, torch.Tensor) and _are_groups(args, offsets):
            return _GroupedProduct(args, kwargs, operands, offsets).run(operate)
    return NotImplemented


def _is_cut(tensor: Any, operands: Sequence[Any]) -> bool:
    """Say whether a tensor is cut and occurs once among the operands."""
    ref = getattr(tensor, "_ref", None)
    return type(ref) is CutRef and sum(operand._ref is ref for operand in operands) == 1


def _are_groups(args: tuple[Any, ...], offsets: torch.Tensor) -> bool:
    """Say whether the first operand's tokens are in groups, one for each matrix of the second operand."""
    sizes = args[0].dim(), args[1].dim(), offsets.dim()
    return sizes == (2, 3, 1) and offsets.dtype in _ROW_TYPES


class _IndexedRows(NamedTuple):
    """The rows that an index selects; ``index`` is its part for the first dimension."""

    index: Any
    rows: torch.Tensor

    def used(self) -> list[int]:
        """Return the distinct rows, ascending."""
        found: list[int] = self.rows.unique().tolist()
        return found


def _rows_of_index(index: Any, num_rows: int) -> _IndexedRows | None:
    """Return the rows that an index selects; None if its first part does not select rows. Raises as torch for
    rows out of range."""
    first = index[0] if type(index) is tuple and index else index
    if not isinstance(first, (torch.Tensor, list, range)):
        return None
    if isinstance(first, torch.Tensor) and first.dtype == torch.bool and first.dim() != 1:
        return None
    return _IndexedRows(first, torch.arange(num_rows, dtype=torch.int64, device="cpu")[first])


class _RowOperator(ABC):
    """An operator with one result row per selected row of the tensor ``weight``; each depends on that row
    alone."""

    def __init__(self, weight: torch.Tensor, operands: Sequence[Any], num_rows: int) -> None:
        """``num_rows``: rows of the result."""
        self._weight, self._num_rows = weight, num_rows
        self._others = [operand._ref for operand in operands if operand is not weight]

    def run(self, operate: Operate) -> torch.Tensor:
        """Return the result, computed in as many turns as DEVICE requires. Raises as a PreOp."""
        ref: CutRef = self._weight._ref  # type: ignore[attr-defined]
        used = _of_rows(self._weight, self.used())
        if used and row_gradient_of(self._weight) is not None:
            return self._run_on_leaves(operate, used)
        turns = list(_turns(ref, used, self._others))
        if len(turns) < 2:
            return operate(*self.all(), ref, _together(used.values()))  # type: ignore[no-any-return]
        made, places = [], []
        for turn in turns:
            places.append(self.places(turn))
            args, kwargs = self.some(turn, places[-1])
            made.append(operate(args, kwargs, ref, _together(used[row] for row in turn)))
        return self._in_order(torch.cat(made), torch.cat(places))

    def _run_on_leaves(self, operate: Operate, used: Mapping[int, tuple[int, ...]]) -> torch.Tensor:
        """As :meth:`run`, on runs of consecutive rows, each a leaf of the graph."""
        runs = list(_runs(self._weight._ref, used, self._others))  # type: ignore[attr-defined]
        made, places = [], []
        for rows, place, given in zip(runs, *self.on_runs(runs), strict=True):
            leaf: Any = self._weight[rows.start : rows.stop]
            args, kwargs = given(leaf)
            made.append(operate(args, kwargs, leaf._ref, leaf._ref.tensors))
            places.append(place)
        return self._in_order(torch.cat(made), torch.cat(places))

    @abstractmethod
    def used(self) -> list[int]:
        """Return the rows of ``weight`` that are needed, ascending."""

    @abstractmethod
    def places(self, rows: Sequence[int]) -> torch.Tensor:
        """Return the indices of the result's rows that need ``rows``."""

    @abstractmethod
    def on_runs(
        self, runs: Sequence[range]
    ) -> tuple[list[torch.Tensor], list[Callable[[torch.Tensor], Given]]]:
        """Return, for each run of rows of ``weight``, the indices of the result's rows that need it,
        ascending; and for each run a function that maps the run's rows, as a tensor, to the arguments that
        compute these result rows."""

    @abstractmethod
    def all(self) -> Given:
        """Return the arguments of the whole operator."""

    @abstractmethod
    def some(self, rows: Sequence[int], places: torch.Tensor) -> Given:
        """Return the arguments that compute the result's rows at ``places``, which need ``rows``."""

    def _in_order(self, made: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return the computed rows at their places; rows that need no row of ``weight`` are zeros."""
        missing = self._num_rows - len(places)
        if missing:
            made = torch.cat((made, made.new_zeros(missing, *made.shape[1:])))
            behind = torch.arange(len(places), self._num_rows, device=places.device)
            places = torch.cat((places, behind))
        order = places.argsort()
        is_ordered = bool((order == torch.arange(len(order), device=order.device)).all())
        return made if is_ordered else made[order]


class _Index(_RowOperator):
    """Indexing of a tensor's rows."""

    def __init__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[Any], rows: _IndexedRows
    ) -> None:
        super().__init__(args[0], operands, len(rows.rows))
        self._args, self._kwargs, self._rows = args, kwargs, rows

    def used(self) -> list[int]:
        return self._rows.used()

    def places(self, rows: Sequence[int]) -> torch.Tensor:
        chosen = torch.isin(self._rows.rows, torch.tensor(rows, dtype=torch.int64, device="cpu"))
        return chosen.nonzero().flatten()

    def on_runs(
        self, runs: Sequence[range]
    ) -> tuple[list[torch.Tensor], list[Callable[[torch.Tensor], Given]]]:
        places = [self.places(run) for run in runs]
        inside = [self._rows.rows[place] - run.start for place, run in zip(places, runs, strict=True)]
        return places, [partial(self._of_leaf, index) for index in inside]

    def _of_leaf(self, index: torch.Tensor, leaf: torch.Tensor) -> Given:
        return (leaf, index), self._kwargs

    def all(self) -> Given:
        return self._args, self._kwargs

    def some(self, rows: Sequence[int], places: torch.Tensor) -> Given:
        return (self._args[0], self._rows.rows[places]), self._kwargs


class _GroupedProduct(_RowOperator):
    """A product of groups of tokens: the tokens in ``args[0]`` are sorted by expert, and ``offsets`` is where
    those of each expert end."""

    def __init__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[Any], offsets: torch.Tensor
    ) -> None:
        super().__init__(args[1], operands, len(args[0]))
        ends: list[int] = offsets.tolist()
        self._begins, self._ends = [0, *ends[:-1]], ends
        self._args, self._kwargs, self._offsets = args, kwargs, offsets

    def used(self) -> list[int]:
        each = enumerate(zip(self._begins, self._ends, strict=True))
        return [expert for expert, (begin, end) in each if end > begin]

    def places(self, rows: Sequence[int]) -> torch.Tensor:
        device = self._offsets.device
        ranges = [range(self._begins[row], self._ends[row]) for row in rows]
        each = [torch.arange(r.start, r.stop, dtype=torch.int64, device=device) for r in ranges]
        return torch.cat(each)

    def on_runs(
        self, runs: Sequence[range]
    ) -> tuple[list[torch.Tensor], list[Callable[[torch.Tensor], Given]]]:
        places = [self.places(run) for run in runs]
        counts = [len(place) for place in places]
        tokens = self._args[0].split([*counts, self._num_rows - sum(counts)])
        return places, [partial(self._of_leaf, of, run) for of, run in zip(tokens, runs, strict=False)]

    def _of_leaf(self, tokens: torch.Tensor, run: range, leaf: torch.Tensor) -> Given:
        offsets = self._offsets[run.start : run.stop] - self._begins[run.start]
        return self._given(tokens, leaf, offsets)

    def all(self) -> Given:
        return self._args, self._kwargs

    def some(self, rows: Sequence[int], places: torch.Tensor) -> Given:
        counts = [0] * len(self._ends)
        for row in rows:
            counts[row] = self._ends[row] - self._begins[row]
        offsets = self._offsets.new_tensor(list(accumulate(counts)))
        return self._given(self._args[0][places], self._args[1], offsets)

    def _given(self, tokens: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> Given:
        if len(self._args) == 3:
            return (tokens, weight, offsets), self._kwargs
        return (tokens, weight), {**self._kwargs, "offs": offsets}


def _covering(weight: torch.Tensor, index: Any) -> tuple[int, ...]:
    """Return the chunk-table tensors that contain the indexed part of a weight."""
    with PlainTensors():
        part = weight[index]
        address, nbytes = part.data_ptr(), span_bytes(part)
    found: tuple[int, ...] = weight._ref.covering(address, nbytes)  # type: ignore[attr-defined]
    return found


def _of_rows(weight: torch.Tensor, rows: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Return for each row the chunk-table tensors that contain it."""
    ref: CutRef = weight._ref  # type: ignore[attr-defined]
    with PlainTensors():
        begin, step = weight.data_ptr(), weight.stride(0) * weight.itemsize
        nbytes = span_bytes(weight[0])
    return {row: ref.covering(begin + row * step, nbytes) for row in rows}


def _together(needed: Iterable[Sequence[int]]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(tensor for tensors in needed for tensor in tensors))


def runs_of(weight: torch.Tensor, rows: Sequence[int]) -> list[range]:
    """Return ascending ``rows`` of a cut tensor as runs; the chunks of each run fit on DEVICE together.
    Deterministic."""
    used = _of_rows(weight, rows)
    return list(_runs(weight._ref, used, [])) if used else []  # type: ignore[attr-defined]


def _turns(
    ref: CutRef, needed: Mapping[int, Sequence[int]], others: Sequence[TensorRef]
) -> Iterable[list[int]]:
    """Yield groups of rows; the chunks of each group fit together beside those of ``others``. Each group is
    ascending. Rows on DEVICE come first, except with gradients enabled: checkpointing runs the operator again
    and must get the same groups. ``needed``: the tensors of each row."""
    chunks = ref.manager.chunks
    again = torch.is_grad_enabled()
    room = chunks.budgets.device_bytes // _SHARE_OF_TURNS if again else chunks.table.limit()
    most = _most_parts(ref, room, others)
    if len(_together(needed.values())) <= most:
        yield list(needed)
        return
    waiting = list(needed)
    if not again:
        waiting.sort(key=lambda row: not all(map(chunks.is_on_device, needed[row])))
    turn: list[int] = []
    taken: set[int] = set()
    for row in waiting:
        if turn and len(taken.union(needed[row])) > most:
            yield sorted(turn)
            turn, taken = [], set()
        turn.append(row)
        taken.update(needed[row])
    yield sorted(turn)


def _most_parts(ref: CutRef, room: int, others: Sequence[TensorRef]) -> int:
    """Return how many parts of a tensor fit in ``room`` beside the chunks of ``others``; at least 1."""
    chunks = ref.manager.chunks
    beside = {chunks.table.chunk_of(tensor) for other in others for tensor in other.tensors}
    room -= sum(chunks.chunks[chunk].spec.nbytes for chunk in beside)
    return max(1, room // ref.part_bytes)


def _runs(ref: CutRef, needed: Mapping[int, Sequence[int]], others: Sequence[TensorRef]) -> Iterator[range]:
    """Yield runs of consecutive rows, as many as fit together. Deterministic, because checkpointing runs the
    operator again. ``needed``: the tensors of each row, ascending."""
    most = _most_parts(ref, ref.manager.chunks.budgets.device_bytes // _SHARE_OF_RUNS, others)
    run, taken = range(0), set[int]()
    for row, tensors in needed.items():
        if run and (row != run.stop or len(taken.union(tensors)) > most):
            yield run
            run = range(0)
        if not run:
            run, taken = range(row, row), set()
        run = range(run.start, row + 1)
        taken.update(tensors)
    yield run
