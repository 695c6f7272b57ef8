"""Operators that read some rows of a tensor and leave the others: an index, and a product of groups of tokens
with one expert's matrix each.

Of a tensor that lies in several chunks they get only those with rows that they read; views of one read
nothing. Where these have no room together, the operator is run in turns. Each row of its result needs one row
of the tensor and is the same whichever others are made beside it; the rows are put back in their order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as PlainTensors

from gemini.runtime.gate.gate import CutRef
from gemini.runtime.gate.guards import span_bytes

Given = tuple[tuple[Any, ...], dict[str, Any]]  # what an operator is given
# Runs the operator with these chunks of a tensor that is cut, and with all of its other operands.
Operate = Callable[[tuple[Any, ...], dict[str, Any], tuple[int, ...]], Any]

_VIEWS = frozenset(
    getattr(torch.Tensor, name)
    for name in (
        *("view", "select", "narrow", "transpose", "permute", "t", "swapaxes", "swapdims", "movedim"),
        *("unsqueeze", "squeeze", "unbind", "split", "chunk", "unflatten", "expand"),
    )
) | {torch.Tensor.mT.__get__, torch.Tensor.T.__get__, torch.transpose, torch.unbind, torch.permute}  # type: ignore[attr-defined]
_ROW_TYPES = (torch.int64, torch.int32)
_PRODUCTS = frozenset(("_grouped_mm", "grouped_mm", "grouped_mm_fallback"))


def is_view(func: Any, args: tuple[Any, ...]) -> bool:
    """Say whether ``func(*args)`` names a part of its operand's memory and reads none of it."""
    if func is not torch.Tensor.__getitem__:
        return func in _VIEWS
    indices = args[1] if type(args[1]) is tuple else args[1:2]
    return all(map(_is_basic, indices))


def _is_basic(index: Any) -> bool:
    if isinstance(index, torch.Tensor):
        return index.dim() == 0 and index.dtype not in (torch.bool, torch.uint8)
    return index is None or index is ... or type(index) in (int, slice)


def run_by_rows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operate: Operate) -> Any:
    """Run ``func`` with those chunks alone that it reads of the one tensor among ``args`` that is cut;
    NotImplemented where it may read all of it. Raises as a PreOp."""
    work: _Work | None = None
    if func is torch.Tensor.__setitem__ and _is_cut(args[0]) and is_view(torch.Tensor.__getitem__, args):
        return operate(args, kwargs, _covering(args[0], args[1]))
    if func is torch.Tensor.__getitem__ and _is_cut(args[0]):
        rows = _rows_of_index(args[1], len(args[0]))
        work = _Index(args, kwargs, rows) if rows is not None else None
    elif getattr(func, "__name__", "") in _PRODUCTS and len(args) >= 2 and _is_cut(args[1]):
        offsets = args[2] if len(args) == 3 else kwargs.get("offs")
        if offsets is not None and args[0].dim() == 2 and args[1].dim() == 3 and len(args) <= 3:
            work = _Product(args, kwargs, offsets)
    return work.run(operate) if work is not None else NotImplemented


def _is_cut(tensor: Any) -> bool:
    return type(getattr(tensor, "_ref", None)) is CutRef


def _rows_of_index(index: Any, num_rows: int) -> list[int] | None:
    """Return the row of each element of an index, None where it is of another kind."""
    if not isinstance(index, torch.Tensor) or index.dim() != 1 or index.dtype not in _ROW_TYPES:
        return None
    rows: list[int] = index.tolist()
    inside = all(-num_rows <= row < num_rows for row in rows)  # else torch refuses it
    return [row % num_rows for row in rows] if inside and rows else None


class _Work(ABC):
    """An operator whose result has rows of its own, each made with one row of the tensor ``weight``.

    ``needs``: which row of ``weight`` each of them needs, from the first on.
    """

    def __init__(self, weight: torch.Tensor, needs: Sequence[int], num_rows: int) -> None:
        self._weight, self._needs, self._num_rows = weight, needs, num_rows

    def run(self, operate: Operate) -> torch.Tensor:
        """Return the result, made in as many turns as it takes. Raises as a PreOp."""
        used = _of_rows(self._weight, sorted(set(self._needs)))
        turns = list(_turns(self._weight._ref, used))  # type: ignore[attr-defined]
        if len(turns) < 2:
            return operate(*self.all(), _together(used.values()))  # type: ignore[no-any-return]
        made, places = [], []
        for turn in turns:
            chosen = set(turn)
            mine = [place for place, row in enumerate(self._needs) if row in chosen]
            made.append(operate(*self.some(turn, mine), _together(used[row] for row in turn)))
            places += mine
        return self._in_order(
            torch.cat(made), torch.tensor(places, dtype=torch.int64, device=self._weight.device)
        )

    @abstractmethod
    def all(self) -> Given:
        """Return the arguments of the whole operator."""

    @abstractmethod
    def some(self, rows: Sequence[int], places: Sequence[int]) -> Given:
        """Return those of what makes the rows of the result at ``places``, which need ``rows``."""

    def _in_order(self, made: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return the rows where they belong; those that need nothing are zeros."""
        missing = self._num_rows - len(places)
        if missing:
            made = torch.cat((made, made.new_zeros(missing, *made.shape[1:])))
            behind = torch.arange(len(places), self._num_rows, device=places.device)
            places = torch.cat((places, behind))
        return made[places.argsort()]


class _Index(_Work):
    """Rows of a tensor, one after another."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Sequence[int]) -> None:
        super().__init__(args[0], rows, len(rows))
        self._args, self._kwargs = args, kwargs

    def all(self) -> Given:
        return self._args, self._kwargs

    def some(self, rows: Sequence[int], places: Sequence[int]) -> Given:
        return (self._args[0], self._args[1][list(places)]), self._kwargs


class _Product(_Work):
    """A product of groups of tokens: ``args[0]`` has those of the first expert first, ``offsets`` is where
    the tokens of each end."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], offsets: torch.Tensor) -> None:
        ends: list[int] = offsets.tolist()
        self._counts = [end - begin for begin, end in pairwise((0, *ends))]
        needs = [expert for expert, count in enumerate(self._counts) for _ in range(count)]
        super().__init__(args[1], needs, len(args[0]))
        self._args, self._kwargs, self._offsets = args, kwargs, offsets

    def all(self) -> Given:
        return self._args, self._kwargs

    def some(self, rows: Sequence[int], places: Sequence[int]) -> Given:
        chosen = set(rows)
        ends = accumulate(count if expert in chosen else 0 for expert, count in enumerate(self._counts))
        offsets = self._offsets.new_tensor(list(ends))
        given, weight, *rest = self._args
        if rest:
            return (given[list(places)], weight, offsets), self._kwargs
        return (given[list(places)], weight), {**self._kwargs, "offs": offsets}


def _covering(weight: torch.Tensor, index: Any) -> tuple[int, ...]:
    """Return the tensors of the chunk table that have what an index names of a weight."""
    with PlainTensors():
        part = weight[index]
        address, nbytes = part.data_ptr(), span_bytes(part)
    found: tuple[int, ...] = weight._ref.covering(address, nbytes)  # type: ignore[attr-defined]
    return found


def _of_rows(weight: torch.Tensor, rows: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Return of each row the tensors of the chunk table that have it."""
    ref: CutRef = weight._ref  # type: ignore[attr-defined]
    with PlainTensors():
        begin, step = weight.data_ptr(), weight.stride(0) * weight.itemsize
        nbytes = span_bytes(weight[0])
    return {row: ref.covering(begin + row * step, nbytes) for row in rows}


def _together(needed: Iterable[Sequence[int]]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(tensor for tensors in needed for tensor in tensors))


def _turns(ref: CutRef, needed: Mapping[int, Sequence[int]]) -> Iterable[list[int]]:
    """Yield rows whose chunks have room together, those that are on DEVICE first; each turn ascending.
    ``needed``: of each row its tensors."""
    chunks = ref.manager.chunks
    most = max(1, chunks.table.limit() // ref.part_bytes)
    if len(_together(needed.values())) <= most:
        yield list(needed)
        return
    waiting = sorted(needed, key=lambda row: not all(map(chunks.is_on_device, needed[row])))
    turn: list[int] = []
    taken: set[int] = set()
    for row in waiting:
        if turn and len(taken.union(needed[row])) > most:
            yield sorted(turn)
            turn, taken = [], set()
        turn.append(row)
        taken.update(needed[row])
    yield sorted(turn)
