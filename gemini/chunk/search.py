"""The chunk size that wastes least.

Every candidate size is tried exactly as ``ChunkLayout.build`` would pack it, all candidates at once: one pass
over the tensors, each step a handful of vector operations over the candidates.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch

from gemini.chunk.chunk import BLOCK_NUMEL
from gemini.chunk.layout import (
    CHUNK_ALIGN_BYTES,
    TENSOR_ALIGN_BYTES,
    align_elements,
    occupied_elements,
    page_elements,
    round_up,
)
from gemini.comm.peers import CUT_NUMEL
from gemini.errors import ConfigError

logger = logging.getLogger(__name__)

_MEGA = 2**20
_DEFAULT_HIDDEN_DIM = 1024

_Numels = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SearchResult:
    """The chosen chunk size and what it costs, in elements, and how long the search took."""

    chunk_numel: int
    wasted_numel: int
    used_numel: int
    seconds: float

    def report(self, *, printed: bool = True) -> None:
        """Log the three lines at INFO; where ``printed``, write them to standard output, too."""
        for line in self.lines():
            logger.info("%s", line)
        if printed:
            sys.stdout.write("\n".join(self.lines()) + "\n")

    def lines(self) -> tuple[str, str, str]:
        """Return the three lines of the report; ``MB`` there means 2**20 elements, as in the seeds."""
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

    Tensors count in the given order. Candidates are ``hidden_dim`` elements apart (None: 1024) and rounded up
    to whole 4 KiB pages; of equals the smallest wins. ``itemsize`` is that of the smallest element of any
    chunk kind, and the ``_mb`` (2**20 bytes) and ``_bytes`` arguments are sizes of a chunk of that kind.
    ``max_chunk_bytes`` caps every candidate; where the minimum is above it, the range is from half of it to
    all of it. A model that fits into the minimum gets one chunk of its own size. A tensor larger than the
    chunk has its own and wastes padding only; whether it fits a budget is not asked here. ``align_bytes`` is
    that of :meth:`ChunkLayout.build`. ``verbose`` logs
    the lines of the report at INFO; :meth:`SearchResult.report` is what writes them to standard output.
    Raises ConfigError for sizes that allow no chunk at all.
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
    """Return the smallest and the largest chunk size in elements, whole pages both."""
    if min_chunk_size_mb <= 0 or search_range_mb < 0:
        raise ConfigError(
            f"min_chunk_size_mb is {min_chunk_size_mb} and search_range_mb is {search_range_mb}; "
            f"the minimum must be above 0 and the range not below"
        )
    if max_chunk_bytes is not None and max_chunk_bytes < CHUNK_ALIGN_BYTES:
        raise ConfigError(
            f"a chunk may have {max_chunk_bytes} bytes but the smallest possible has {CHUNK_ALIGN_BYTES}; "
            f"raise device_bytes"
        )
    page_numel = page_elements(itemsize)
    smallest = round_up(int(min_chunk_size_mb * _MEGA) // itemsize, page_numel)
    smallest = max(smallest, page_numel)
    largest = smallest + int(search_range_mb * _MEGA) // itemsize // page_numel * page_numel
    if max_chunk_bytes is not None:
        cap = max_chunk_bytes // CHUNK_ALIGN_BYTES * page_numel
        # A cap below the minimum still leaves a range to search: half a chunk moves almost as well as a whole
        # one.
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
    """Return the end of the last of the tensors where one chunk holds them all."""
    end = 0
    for size in sizes:
        end += (-end % BLOCK_NUMEL if end % CUT_NUMEL + size > CUT_NUMEL else 0) + size
    return end


def _slack(sizes: Sequence[int], candidates: _Numels, page_numel: int) -> _Numels:
    """Return, per candidate chunk size, the elements that no aligned tensor covers."""
    fill = np.zeros_like(candidates)  # of the open chunk
    slack = np.zeros_like(candidates)  # of the closed chunks
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
                # It gets a chunk of its own and ends the run, so the open chunk is cut to what it uses.
                slack[oversized] += -fill[oversized] % page_numel + -size % page_numel
                fill[oversized] = -size  # plus size below: nothing is open
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
    """Put ``count`` tensors of one size behind each other, none of which is cut; return how full the open
    chunk is, and what was left of those that are closed."""
    fit = (candidates - fill) // size
    each = candidates // size  # of a whole chunk
    closed = np.maximum(count - fit - 1, 0) // each  # behind the first
    behind = (count - fit - closed * each) * size
    left = candidates - fill - fit * size + closed * (candidates - each * size)
    is_open = count <= fit
    return np.where(is_open, fill + count * size, behind), np.where(is_open, 0, left)
