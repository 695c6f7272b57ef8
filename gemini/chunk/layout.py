"""Layouts: pack parameters into chunks of one size, search for the size that wastes least, and handle the
memory order of dense tensors.

A layout counts elements and is the same for every chunk kind (parameter, gradient, moments): element ``i`` of
a parameter and element ``i`` of its gradient have the same chunk index and offset. It holds no memory.

The search packs the tensors for all candidate sizes at once, exactly as ``ChunkLayout.build`` would: one pass
over the tensors, each step a few vector operations over the candidates.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import prod
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.parameter import is_lazy

from gemini.chunk.chunk import BLOCK_NUMEL
from gemini.comm.peers import CUT_NUMEL
from gemini.errors import ConfigError
from gemini.system.config import format_bytes

logger = logging.getLogger(__name__)


TENSOR_ALIGN_BYTES = 64  # a cache line, and the widest vector the kernels load
CHUNK_ALIGN_BYTES = 4096  # a page: the unit of windows and of O_DIRECT


@dataclass(frozen=True)
class TensorSlot:
    """The place of one parameter. ``offset`` and ``numel`` count elements within the chunk.

    ``stride``: of the view at this place. It is the parameter's if its elements are dense in some order of
    its dimensions, otherwise (expanded, sliced) the contiguous one.
    """

    name: str
    chunk: int
    offset: int
    numel: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Apart:
    """A tensor that shares its chunk only with adjacent tensors of the same ``key``. With ``parts`` > 1 it
    has a chunk of its own, which is cut into that many parts of equal size and of whole pages; they move
    separately."""

    key: Hashable
    parts: int = 1


@dataclass(frozen=True)
class ChunkLayout:
    """All slots in placement order, and the size of each chunk in elements.

    ``chunk_numel`` is the common size. A chunk is larger only if it holds one tensor that is larger, and
    smaller only if it ends a run: before such a tensor, or at the end of the model. ``chunk_parts``: the
    number of parts of each chunk; empty if none is cut.
    """

    slots: tuple[TensorSlot, ...]
    chunk_numels: tuple[int, ...]
    chunk_numel: int
    chunk_parts: tuple[int, ...] = ()

    @classmethod
    def build(
        cls,
        named_tensors: Iterable[tuple[str, torch.Tensor | Sequence[int]]],
        chunk_numel: int,
        *,
        itemsize: int,
        order: Sequence[str] | None = None,
        align_bytes: int = TENSOR_ALIGN_BYTES,
        apart: Mapping[str, Apart] = MappingProxyType({}),
    ) -> ChunkLayout:
        """Pack tensors (or bare shapes) one after another; each chunk holds a consecutive run of them.

        The order is the given one (initialization order), or ``order`` (names by first use in execution);
        names missing from ``order`` follow at the end as given. Only shapes and strides are read: tensors may
        be on ``meta``.

        Args:
            chunk_numel: the chunk size, rounded up to whole pages.
            itemsize: of the *smallest* element of any chunk kind. In that kind and in all wider ones every
                offset is a multiple of ``align_bytes`` (a power of two up to a page), and every chunk a whole
                number of 4 KiB pages. A tensor that a cut of the chunk may go through begins where cuts fall
                between its blocks.
            apart: tensors by name that share no chunk with others.

        Raises:
            ConfigError: duplicate names or tensors, lazy or sparse parameters, or unknown names in ``order``.
        """
        page_numel = page_elements(itemsize)
        if chunk_numel <= 0:
            raise ConfigError(f"chunk_numel is {chunk_numel}; a chunk holds at least one element")
        packer = _Packer(round_up(chunk_numel, page_numel), align_elements(itemsize, align_bytes), page_numel)
        for name, tensor in _in_order(_checked(named_tensors), order):
            packer.add(name, *_geometry(name, tensor), apart.get(name, _TOGETHER))
        packer.close_run()
        parts = tuple(packer.chunk_parts) if any(count > 1 for count in packer.chunk_parts) else ()
        return cls(tuple(packer.slots), tuple(packer.chunk_numels), packer.chunk_numel, parts)

    @property
    def num_chunks(self) -> int:
        """The number of chunks."""
        return len(self.chunk_numels)

    @property
    def used_numel(self) -> int:
        """The elements that belong to parameters."""
        return sum(slot.numel for slot in self.slots)

    @property
    def wasted_numel(self) -> int:
        """The elements that belong to no parameter: alignment, padding and unused tails."""
        return sum(self.chunk_numels) - self.used_numel

    def parts_of(self, chunk: int) -> int:
        """Return the number of parts of a chunk."""
        return self.chunk_parts[chunk] if self.chunk_parts else 1

    def slot(self, name: str) -> TensorSlot:
        """Return the slot of a parameter. Raises KeyError for an unknown name."""
        return self._slot_by_name[name]

    def chunk_of(self, name: str) -> int:
        """Return the index of the chunk that holds a parameter. Raises KeyError for an unknown name."""
        return self.slot(name).chunk

    def slots_of(self, chunk: int) -> tuple[TensorSlot, ...]:
        """Return the slots of one chunk, by rising offset. Raises IndexError if there is no such chunk."""
        return self._slots_by_chunk[chunk]

    def signature(self) -> str:
        """Return a digest that is equal exactly for equal layouts; it identifies the layout of a recorded
        trace."""
        cut = (self.chunk_parts,) if self.chunk_parts else ()
        text = repr((self.slots, self.chunk_numels, self.chunk_numel, *cut))
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def _slot_by_name(self) -> dict[str, TensorSlot]:
        return {slot.name: slot for slot in self.slots}

    @cached_property
    def _slots_by_chunk(self) -> tuple[tuple[TensorSlot, ...], ...]:
        groups: list[list[TensorSlot]] = [[] for _ in self.chunk_numels]
        for slot in self.slots:
            groups[slot.chunk].append(slot)
        return tuple(tuple(group) for group in groups)


_TOGETHER = Apart(None)


class _Packer:
    """Places tensors one by one. A run is the stretch between two tensors that are larger than a chunk, or
    between tensors that must be apart."""

    def __init__(self, chunk_numel: int, align_numel: int, page_numel: int) -> None:
        self.chunk_numel = chunk_numel
        self.slots: list[TensorSlot] = []
        self.chunk_numels: list[int] = []  # sizes of the closed chunks
        self.chunk_parts: list[int] = []
        self._apart = _TOGETHER  # the constraint of the open run
        self._align_numel = align_numel
        self._page_numel = page_numel
        self._end: int | None = None  # end of the last tensor in the open chunk; None: none is open

    def add(self, name: str, shape: tuple[int, ...], stride: tuple[int, ...], apart: Apart) -> None:
        numel = occupied_elements(prod(shape))
        if apart != self._apart:
            self.close_run()
            self._apart = apart
        if numel > self.chunk_numel or apart.parts > 1:
            self.close_run()
            self._place(name, shape, stride, 0)
            self.close_run(apart.parts)
            return
        offset = 0 if self._end is None else round_up(self._end, self._align_numel)
        if offset % CUT_NUMEL + numel > CUT_NUMEL:
            offset = round_up(offset, BLOCK_NUMEL)
        if offset + numel > self.chunk_numel:
            self._close(self.chunk_numel)
            offset = 0
        self._place(name, shape, stride, offset)

    def close_run(self, parts: int = 1) -> None:
        """Close the open chunk, if any, at its used size, cut into ``parts``."""
        if self._end is not None:
            self._close(round_up(self._end, self._page_numel), parts)

    def _place(self, name: str, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> None:
        numel = prod(shape)
        self.slots.append(TensorSlot(name, len(self.chunk_numels), offset, numel, shape, stride))
        self._end = offset + occupied_elements(numel)

    def _close(self, numel: int, parts: int = 1) -> None:
        self.chunk_numels.append(numel)
        self.chunk_parts.append(parts)
        self._end = None


def round_up(value: int, unit: int) -> int:
    """Return the smallest multiple of ``unit`` that is not below ``value``."""
    return -(-value // unit) * unit


def occupied_elements(numel: int) -> int:
    """Return the number of elements that a tensor occupies: an empty one counts as 1, to have a place of its
    own."""
    return max(numel, 1)


def align_elements(itemsize: int, align_bytes: int = TENSOR_ALIGN_BYTES) -> int:
    """Return the unit of tensor offsets in elements of ``itemsize`` bytes. Raises ConfigError for other
    sizes."""
    if itemsize not in (1, 2, 4, 8, 16):
        raise ConfigError(f"itemsize is {itemsize}; elements of 1, 2, 4, 8 or 16 bytes are supported")
    return align_bytes // itemsize


def page_elements(itemsize: int) -> int:
    """Return the unit of chunk sizes in elements of ``itemsize`` bytes. Raises ConfigError as
    ``align_elements``."""
    return align_elements(itemsize, CHUNK_ALIGN_BYTES)


def _checked(
    named_tensors: Iterable[tuple[str, torch.Tensor | Sequence[int]]],
) -> dict[str, torch.Tensor | Sequence[int]]:
    """Return the tensors by name. Raises ConfigError for a name or a tensor that occurs twice."""
    by_name: dict[str, torch.Tensor | Sequence[int]] = {}
    name_of: dict[int, str] = {}
    for name, tensor in named_tensors:
        if name in by_name:
            raise ConfigError(f"parameter {name!r} is given twice")
        if isinstance(tensor, torch.Tensor):
            first = name_of.setdefault(id(tensor), name)
            if first != name:
                raise ConfigError(f"parameters {first!r} and {name!r} are one tensor (tied); give it once")
        by_name[name] = tensor
    return by_name


def _in_order(
    by_name: dict[str, torch.Tensor | Sequence[int]], order: Sequence[str] | None
) -> Iterable[tuple[str, torch.Tensor | Sequence[int]]]:
    if order is None:
        return by_name.items()
    unknown = [name for name in order if name not in by_name]
    if unknown:
        raise ConfigError(
            f"the order names {len(unknown)} unknown parameters, first {unknown[0]!r}: another model?"
        )
    return ((name, by_name[name]) for name in dict.fromkeys((*order, *by_name)))


def _geometry(name: str, tensor: torch.Tensor | Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape and the stride of the view that will replace ``tensor``."""
    if not isinstance(tensor, torch.Tensor):
        shape = tuple(tensor)
        if min(shape, default=0) < 0:
            raise ConfigError(f"parameter {name!r} has the shape {shape}; a size cannot be negative")
        return shape, _contiguous_stride(shape)
    if is_lazy(tensor):
        raise ConfigError(
            f"parameter {name!r} has no shape yet (lazy module); run the model once before wrapping it"
        )
    if tensor.layout != torch.strided:
        raise ConfigError(
            f"parameter {name!r} is {tensor.layout}; only strided (dense) parameters can be managed"
        )
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    return shape, stride if is_dense(tensor) else _contiguous_stride(shape)


def _contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


_MEGA = 2**20
_DEFAULT_HIDDEN_DIM = 1024

_Numels = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SearchResult:
    """The chosen chunk size, used and wasted elements, and the duration of the search."""

    chunk_numel: int
    wasted_numel: int
    used_numel: int
    seconds: float

    def report(self, *, printed: bool = True) -> None:
        """Log the three lines at INFO; with ``printed`` also write them to standard output."""
        for line in self.lines():
            logger.info("%s", line)
        if printed:
            sys.stdout.write("\n".join(self.lines()) + "\n")

    def lines(self) -> tuple[str, str, str]:
        """Return the three lines of the report. ``MB`` means 2**20 elements there, as in ColossalAI's
        report."""
        used, wasted = self.used_numel / _MEGA, self.wasted_numel / _MEGA
        percent = 100 * self.wasted_numel / max(self.used_numel + self.wasted_numel, 1)
        return (
            f"searching chunk configuration is completed in {self.seconds:.2f} s.",
            f"used number: {used:.2f} MB, wasted number: {wasted:.2f} MB",
            f"total wasted percentage is {percent:.2f}%",
        )


def search_chunk_size(
    params_or_numels: torch.nn.Module | Iterable[torch.Tensor | int],
    *,
    search_range_mb: float = 32,
    min_chunk_size_mb: float = 32,
    hidden_dim: int | None = None,
    itemsize: int = 4,
    max_chunk_bytes: int | None = None,
    align_bytes: int = TENSOR_ALIGN_BYTES,
    verbose: bool = False,
) -> SearchResult:
    """Return the chunk size between the minimum and the minimum plus the range that wastes least.

    Tensors are packed in the given order. A model that fits into the minimum gets one chunk of its own size.
    A tensor larger than the chunk gets its own and wastes only padding; whether it fits a budget is not
    checked.

    Args:
        search_range_mb, min_chunk_size_mb: the range and its minimum in MiB, for a chunk of the kind with the
            smallest elements.
        hidden_dim: step between candidates in elements (None: 1024). Candidates are rounded up to whole 4 KiB
            pages; among equals the smallest wins.
        itemsize: bytes of the smallest element of any chunk kind.
        max_chunk_bytes: upper bound of candidates, for the same kind. If the minimum is above it, the range
            is from half of it to all of it.
        align_bytes: as in :meth:`ChunkLayout.build`.
        verbose: log the lines of the report at INFO; :meth:`SearchResult.report` writes them to standard
            output.

    Raises:
        ConfigError: the sizes allow no chunk.
    """
    begin = time.perf_counter()
    numels = _numels_of(params_or_numels)
    used_numel = sum(numels)
    sizes = [round_up(occupied_elements(numel), align_elements(itemsize, align_bytes)) for numel in numels]
    page_numel = page_elements(itemsize)
    smallest, largest = _bounds(search_range_mb, min_chunk_size_mb, itemsize, max_chunk_bytes)
    total = round_up(max(_end_of_all(sizes), 1), page_numel)
    if total <= smallest:
        candidates = np.array([total], dtype=np.int64)
    else:
        step = _DEFAULT_HIDDEN_DIM if hidden_dim is None else hidden_dim
        candidates = _candidates(smallest, largest, step, page_numel)
    slack = _slack(sizes, candidates, page_numel)
    best = int(np.argmin(slack))
    result = SearchResult(
        chunk_numel=int(candidates[best]),
        wasted_numel=int(slack[best]) + sum(sizes) - used_numel,
        used_numel=used_numel,
        seconds=time.perf_counter() - begin,
    )
    if verbose:
        for line in result.lines():
            logger.info("%s", line)
    return result


def _numels_of(params_or_numels: torch.nn.Module | Iterable[torch.Tensor | int]) -> list[int]:
    if isinstance(params_or_numels, torch.nn.Module):
        params_or_numels = params_or_numels.parameters()
    numels = [item.numel() if isinstance(item, torch.Tensor) else int(item) for item in params_or_numels]
    if min(numels, default=0) < 0:
        raise ConfigError(f"a tensor has {min(numels)} elements; a number of elements cannot be negative")
    return numels


def _bounds(
    search_range_mb: float, min_chunk_size_mb: float, itemsize: int, max_chunk_bytes: int | None
) -> tuple[int, int]:
    """Return the smallest and the largest chunk size in elements, both whole pages."""
    if min_chunk_size_mb <= 0 or search_range_mb < 0:
        raise ConfigError(
            f"min_chunk_size_mb is {min_chunk_size_mb} and search_range_mb is {search_range_mb}; "
            f"the minimum must be above 0 and the range not below"
        )
    if max_chunk_bytes is not None and max_chunk_bytes < CHUNK_ALIGN_BYTES:
        raise ConfigError(
            f"a chunk may have at most {max_chunk_bytes:,} bytes, but the smallest chunk has "
            f"{format_bytes(CHUNK_ALIGN_BYTES)}; raise device_bytes"
        )
    page_numel = page_elements(itemsize)
    smallest = round_up(int(min_chunk_size_mb * _MEGA) // itemsize, page_numel)
    smallest = max(smallest, page_numel)
    largest = smallest + int(search_range_mb * _MEGA) // itemsize // page_numel * page_numel
    if max_chunk_bytes is not None:
        cap = max_chunk_bytes // CHUNK_ALIGN_BYTES * page_numel
        # A cap below the minimum still leaves a range to search: half a chunk transfers almost as efficiently
        # as a whole one.
        smallest = smallest if smallest <= cap else round_up(cap // 2, page_numel)
        largest = min(largest, cap)
    return smallest, largest


def _candidates(smallest: int, largest: int, hidden_dim: int, page_numel: int) -> _Numels:
    if hidden_dim <= 0:
        raise ConfigError(f"hidden_dim is {hidden_dim}; the search step must be above 0")
    sizes = np.arange(smallest, largest + 1, hidden_dim, dtype=np.int64)
    return np.unique(
        -(-sizes // page_numel) * page_numel
    )  # largest is whole pages: none is rounded beyond it


def _end_of_all(sizes: Sequence[int]) -> int:
    """Return the end of the last tensor if one chunk holds all tensors."""
    end = 0
    for size in sizes:
        end += (-end % BLOCK_NUMEL if end % CUT_NUMEL + size > CUT_NUMEL else 0) + size
    return end


def _slack(sizes: Sequence[int], candidates: _Numels, page_numel: int) -> _Numels:
    """Return, per candidate chunk size, the elements that no aligned tensor covers."""
    fill = np.zeros_like(candidates)  # fill of the open chunk
    slack = np.zeros_like(candidates)  # slack of the closed chunks
    smallest = int(candidates[0])
    for size, run in groupby(sizes):
        count = sum(1 for _ in run)
        if count > 1 and 0 < size <= smallest and CUT_NUMEL % size == 0 and not (fill % size).any():
            fill, left = _filled(fill, candidates, size, count)
            slack += left
            continue
        for _ in range(count):
            if size > smallest:
                oversized = size > candidates
                # The tensor gets a chunk of its own and ends the run, so the open chunk shrinks to its used
                # size.
                slack[oversized] += -fill[oversized] % page_numel + -size % page_numel
                fill[oversized] = -size  # becomes 0 when size is added below: no chunk is open
            cut = (fill % CUT_NUMEL + size > CUT_NUMEL) & (fill > 0)
            gap = np.where(cut, -fill % BLOCK_NUMEL, 0) if cut.any() else 0
            end = fill + gap + size
            closes = end > candidates
            if closes.any():
                slack[closes] += (candidates - fill - gap)[closes]
                end[closes] = size
            slack += gap
            fill = end
    return slack + -fill % page_numel


def _filled(fill: _Numels, candidates: _Numels, size: int, count: int) -> tuple[_Numels, _Numels]:
    """Pack ``count`` tensors of one size one behind another, with none cut; return the fill of the open
    chunk, and the slack of the closed chunks."""
    fit = (candidates - fill) // size
    each = candidates // size  # tensors per whole chunk
    closed = np.maximum(count - fit - 1, 0) // each  # after the first
    behind = (count - fit - closed * each) * size
    left = candidates - fill - fit * size + closed * (candidates - each * size)
    is_open = count <= fit
    return np.where(is_open, fill + count * size, behind), np.where(is_open, 0, left)


def is_dense(tensor: torch.Tensor) -> bool:
    """Say whether the elements fill one stretch of memory without gaps or overlaps, in any order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def same_order(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether two dense tensors of equal shape have the same memory order."""
    if one.is_contiguous() and other.is_contiguous():
        return True
    pairs = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(size == 1 or left == right for size, left, right in pairs)


def ordered_like(value: torch.Tensor, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``value`` in the memory order and on the device of ``like``, as ``dtype``; a copy only if
    needed.

    Raises:
        ConfigError: the shapes differ.
    """
    if value.shape != like.shape:
        raise ConfigError(f"a tensor has shape {tuple(value.shape)}; it must have {tuple(like.shape)}")
    plain = value.dtype == dtype and value.device == like.device and not value.is_neg()
    plain = plain and (value.data_ptr() != 0 or value.numel() == 0)  # torch's zero tensors have no memory
    if plain and is_dense(value) and same_order(value, like):
        return value
    copy = torch.empty_strided(like.size(), like.stride(), dtype=dtype, device=like.device)
    return copy.copy_(value.detach())


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """View a dense tensor's elements in memory order."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
