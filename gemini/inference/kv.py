"""Keys and values of sequences: a fixed number of bytes, from which each sequence gets one piece for all of
its tokens before its first pass.

So a sequence that has begun never lacks memory, and nothing is copied when it grows. How many bytes a token
takes is known after the first pass; until then one sequence has all bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gemini.errors import OutOfBudgetError
from gemini.system.config import format_bytes

_ALIGNMENT = 64  # bytes, for vector loads


@dataclass(frozen=True)
class _Shape:
    """Of what one layer keeps of a token: heads and their sizes, for keys and values."""

    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype

    def key_bytes(self, tokens: int) -> int:
        return _aligned(self.heads * self.key_size * tokens * self.dtype.itemsize)

    def nbytes(self, tokens: int) -> int:
        return self.key_bytes(tokens) + _aligned(self.heads * self.value_size * tokens * self.dtype.itemsize)


class KVMemory:
    """``nbytes`` bytes of ``device`` for keys and values. Pages are taken from the system when they are first
    written."""

    def __init__(self, nbytes: int, device: torch.device | str = "cpu") -> None:
        self.nbytes = nbytes
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._shapes: dict[int, _Shape] = {}
        self._is_measured = False
        self._free = [(0, nbytes)]  # (first byte, end), in order, never touching
        self.peak_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Return what sequences hold now."""
        return self.nbytes - sum(end - first for first, end in self._free)

    def needed_bytes(self, tokens: int) -> int | None:
        """Return what a sequence of ``tokens`` takes, or None before the first pass."""
        if not self._is_measured:
            return None
        return sum(shape.nbytes(tokens) for shape in self._shapes.values())

    def check(self, tokens: int) -> None:
        """Raise OutOfBudgetError if a sequence of ``tokens`` is known to fit never."""
        needed = self.needed_bytes(tokens)
        if needed is not None and needed > self.nbytes:
            raise _too_long(tokens, needed, self.nbytes)

    def reserve(self, tokens: int) -> Sequence | None:
        """Return a sequence that will have at most ``tokens`` tokens, or None while others hold the memory.

        Raises:
            OutOfBudgetError: it never fits.
        """
        self.check(tokens)
        needed = self.needed_bytes(tokens)
        if needed is None:
            if self.used_bytes:
                return None  # the first one is still in its first pass
            needed = self.nbytes
        for index, (first, end) in enumerate(self._free):
            if end - first >= needed:
                self._free[index : index + 1] = [(first + needed, end)] if end - first > needed else []
                self.peak_bytes = max(self.peak_bytes, self.used_bytes)
                return Sequence(self, first, first + needed, tokens)
        return None

    def shape_of(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> _Shape:
        """Return what ``layer`` keeps of a token."""
        shape = self._shapes.get(layer)
        if shape is None:
            shape = _Shape(key.shape[0], key.shape[-1], value.shape[-1], key.dtype)
            self._shapes[layer] = shape
        return shape

    def bytes_of(self, first: int, nbytes: int) -> torch.Tensor:
        """Return a piece of the memory."""
        return self._memory[first : first + nbytes]

    def measured(self, sequence: Sequence) -> None:
        """After a pass with ``sequence``, which used each layer: a token's bytes are known from now on."""
        if not self._is_measured:
            self._is_measured = True
            self.peak_bytes = 0
            needed = self.needed_bytes(sequence.capacity) or 0
            self.release(sequence.first + needed, sequence.end)
            sequence.end = sequence.first + needed
            self.peak_bytes = self.used_bytes

    def release(self, first: int, end: int) -> None:
        """Take a piece back."""
        if first == end:
            return
        pieces = sorted([*self._free, (first, end)])
        self._free = pieces[:1]
        for piece in pieces[1:]:
            if piece[0] == self._free[-1][1]:
                self._free[-1] = (self._free[-1][0], piece[1])
            else:
                self._free.append(piece)


class Sequence:
    """The keys and values of one sequence, at most ``capacity`` tokens. ``length`` of them are there."""

    def __init__(self, memory: KVMemory, first: int, end: int, capacity: int) -> None:
        self.first, self.end, self.capacity = first, end, capacity
        self.length = 0
        self._memory = memory
        self._next_byte = first
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store what a pass adds, [heads, tokens, size], and return all keys and values so far.

        A pass that fails and comes again writes the same places.
        """
        if layer not in self._layers:
            self._layers[layer] = self._place(self._memory.shape_of(layer, key, value))
        keys, values = self._layers[layer]
        end = self.length + key.shape[1]
        keys[:, self.length : end] = key
        values[:, self.length : end] = value
        return keys[:, :end], values[:, :end]

    def advance(self, tokens: int) -> None:
        """After a pass: its tokens are part of the sequence."""
        self._memory.measured(self)
        self.length += tokens

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self._layers.clear()
        self._memory.release(self.first, self.end)
        self.end = self.first

    def _place(self, shape: _Shape) -> tuple[torch.Tensor, torch.Tensor]:
        first, middle = self._next_byte, self._next_byte + shape.key_bytes(self.capacity)
        self._next_byte = first + shape.nbytes(self.capacity)
        if self._next_byte > self.end:
            raise _too_long(self.capacity, self._next_byte - self.first, self._memory.nbytes, at_least=True)
        return (
            self._tensor(first, shape.heads, shape.key_size, shape.dtype),
            self._tensor(middle, shape.heads, shape.value_size, shape.dtype),
        )

    def _tensor(self, first: int, heads: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        count = heads * self.capacity * size
        raw = self._memory.bytes_of(first, count * dtype.itemsize)
        return raw.view(dtype).view(heads, self.capacity, size)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _too_long(tokens: int, needed: int, budget: int, *, at_least: bool = False) -> OutOfBudgetError:
    return OutOfBudgetError(
        f"keys and values of {tokens:,} tokens take {'over ' if at_least else ''}{format_bytes(needed)}, "
        f"and kv_bytes is {format_bytes(budget)}; ask for fewer tokens, or raise kv_bytes"
    )
