"""Memory for keys and values: a fixed number of bytes, from which each sequence gets one piece for all its
tokens before its first pass.

So a sequence that has begun never lacks memory, and nothing is copied when it grows. The bytes of a token are
known after the first pass; until then one sequence has all bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from gemini.errors import ConfigError, OutOfBudgetError
from gemini.system.config import format_bytes

_ALIGNMENT = 64  # bytes, for vector loads

KeysAndValues = tuple[torch.Tensor, torch.Tensor]


class Sequence(Protocol):
    """The keys and values of one sequence, or of a batch of rows of equal length. ``length``: tokens stored.
    ``capacity``: the most tokens that it may have.
    """

    length: int
    capacity: int

    def append(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, window: int | None = None
    ) -> KeysAndValues:
        """Store the keys and values of new tokens, [rows, heads, tokens, size], and return all that these
        tokens see: everything so far, or with a ``window`` the last ones.

        The result is valid until :meth:`let_go`, which must be called before anything else on this sequence.
        A pass that failed and is repeated overwrites the same places.

        Raises:
            OutOfBudgetError, IoError: the tokens have no place, or cannot be fetched.
        """

    def let_go(self) -> None:
        """Declare that the result of :meth:`append` is no longer used."""

    def advance(self, tokens: int) -> None:
        """Add the ``tokens`` of a finished pass to the sequence."""

    def close(self) -> None:
        """Free the memory. Idempotent."""


class Keeper(Protocol):
    """Owns the keys and values of sequences."""

    nbytes: int
    peak_bytes: int

    @property
    def used_bytes(self) -> int:
        """The bytes that sequences hold now."""

    @property
    def first_tokens(self) -> int | None:
        """The most tokens of the next pass while the size of a token is unknown; None: no limit."""

    def check(self, tokens: int) -> None:
        """Raise OutOfBudgetError if it is known that a sequence of ``tokens`` can never fit."""

    def reserve(self, tokens: int) -> Sequence | None:
        """Return a sequence for at most ``tokens`` tokens, or None while other sequences hold the memory.

        Raises:
            OutOfBudgetError: it can never fit.
        """

    def close(self) -> None:
        """Free all memory. Idempotent."""


@dataclass(frozen=True)
class TokenShape:
    """The keys and values that one layer keeps per token: rows of a batch, heads, and sizes."""

    rows: int
    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype

    @classmethod
    def of(cls, key: torch.Tensor, value: torch.Tensor) -> TokenShape:
        """Return the shape for keys and values [rows, heads, tokens, size]. Raises ConfigError if their
        dtypes differ.
        """
        if key.dtype != value.dtype:
            raise ConfigError(f"keys are {key.dtype} and values {value.dtype}; they have to be of one type")
        return cls(key.shape[0], key.shape[1], key.shape[-1], value.shape[-1], key.dtype)

    def key_bytes(self, tokens: int) -> int:
        """Return the bytes of the keys of ``tokens``, rounded up to the alignment."""
        return aligned(self.rows * self.heads * self.key_size * tokens * self.dtype.itemsize)

    def nbytes(self, tokens: int) -> int:
        """Return the bytes of the keys and values of ``tokens``."""
        values = self.rows * self.heads * self.value_size * tokens * self.dtype.itemsize
        return self.key_bytes(tokens) + aligned(values)


class Pieces:
    """A first-fit allocator over the integers from 0 to ``size``."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._free = [(0, size)] if size else []  # (first, end), sorted, never adjacent

    @property
    def used(self) -> int:
        """The number of integers taken."""
        return self._size - sum(end - first for first, end in self._free)

    def take(self, count: int) -> int | None:
        """Return the first of ``count`` consecutive integers; None if so many are not free."""
        for index, (first, end) in enumerate(self._free):
            if end - first >= count:
                self._free[index : index + 1] = [(first + count, end)] if end - first > count else []
                return first
        return None

    def give_back(self, first: int, end: int) -> None:
        """Free a piece, or a part of one."""
        if first == end:
            return
        pieces = sorted([*self._free, (first, end)])
        self._free = pieces[:1]
        for piece in pieces[1:]:
            if piece[0] == self._free[-1][1]:
                self._free[-1] = (self._free[-1][0], piece[1])
            else:
                self._free.append(piece)


class KVMemory:
    """``nbytes`` bytes on ``device`` for keys and values; implements :class:`Keeper`. On the CPU the system
    allocates pages when they are first written.
    """

    first_tokens = None

    def __init__(self, nbytes: int, device: torch.device | str = "cpu") -> None:
        self.nbytes = nbytes
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._shapes: dict[int, TokenShape] = {}
        self._is_measured = False
        self._pieces = Pieces(nbytes)
        self.peak_bytes = 0

    @property
    def used_bytes(self) -> int:
        return self._pieces.used

    def needed_bytes(self, tokens: int) -> int | None:
        """Return the bytes of a sequence of ``tokens``; None before the first pass."""
        if not self._is_measured:
            return None
        return sum(shape.nbytes(tokens) for shape in self._shapes.values())

    def check(self, tokens: int) -> None:
        needed = self.needed_bytes(tokens)
        if needed is not None and needed > self.nbytes:
            raise too_long(tokens, needed, self.nbytes)

    def reserve(self, tokens: int) -> PlainSequence | None:
        self.check(tokens)
        needed = self.needed_bytes(tokens)
        if needed is None:
            if self.used_bytes:
                return None  # the first sequence is still in its first pass
            needed = self.nbytes
        first = self._pieces.take(needed)
        if first is None:
            return None
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return PlainSequence(self, first, first + needed, tokens)

    def close(self) -> None:
        """Do nothing: the memory is freed with its tensors."""

    def shape_of(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> TokenShape:
        """Return the shape of ``layer``, recorded at the first call."""
        return self._shapes.setdefault(layer, TokenShape.of(key, value))

    def bytes_of(self, first: int, nbytes: int) -> torch.Tensor:
        """Return a view of ``nbytes`` bytes of the memory from ``first`` on."""
        return self._memory[first : first + nbytes]

    def measured(self, sequence: PlainSequence) -> None:
        """Record, after the first pass with ``sequence``, the size of a token, and free the sequence's unused
        bytes.
        """
        if not self._is_measured:
            self._is_measured = True
            needed = self.needed_bytes(sequence.capacity) or 0
            self._pieces.give_back(sequence.first + needed, sequence.end)
            sequence.end = sequence.first + needed
            self.peak_bytes = self.used_bytes

    def release(self, first: int, end: int) -> None:
        """Free a piece."""
        self._pieces.give_back(first, end)


class PlainSequence:
    """A sequence in one piece of a :class:`KVMemory`: per layer [rows, heads, capacity, size] for keys and
    for values.
    """

    def __init__(self, memory: KVMemory, first: int, end: int, capacity: int) -> None:
        self.first, self.end, self.capacity = first, end, capacity
        self.length = 0
        self._memory = memory
        self._next_byte = first
        self._layers: dict[int, KeysAndValues] = {}

    def append(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, window: int | None = None
    ) -> KeysAndValues:
        if layer not in self._layers:
            self._layers[layer] = self._place(self._memory.shape_of(layer, key, value))
        keys, values = self._layers[layer]
        end = self.length + key.shape[2]
        keys[:, :, self.length : end] = key
        values[:, :, self.length : end] = value
        first = first_seen(self.length, window)
        return keys[:, :, first:end], values[:, :, first:end]

    def let_go(self) -> None:
        """Do nothing: the memory does not move."""

    def advance(self, tokens: int) -> None:
        self._memory.measured(self)
        self.length += tokens

    def close(self) -> None:
        self._layers.clear()
        self._memory.release(self.first, self.end)
        self.end = self.first

    def _place(self, shape: TokenShape) -> KeysAndValues:
        first, middle = self._next_byte, self._next_byte + shape.key_bytes(self.capacity)
        self._next_byte = first + shape.nbytes(self.capacity)
        if self._next_byte > self.end:
            raise too_long(self.capacity, self._next_byte - self.first, self._memory.nbytes, at_least=True)
        return self._tensor(first, shape, shape.key_size), self._tensor(middle, shape, shape.value_size)

    def _tensor(self, first: int, shape: TokenShape, size: int) -> torch.Tensor:
        count = shape.rows * shape.heads * self.capacity * size
        raw = self._memory.bytes_of(first, count * shape.dtype.itemsize)
        return raw.view(shape.dtype).view(shape.rows, shape.heads, self.capacity, size)


def first_seen(length: int, window: int | None) -> int:
    """Return the index of the first token that the token behind ``length`` others sees, with a ``window``
    that includes itself.
    """
    return 0 if window is None else max(0, length - window + 1)


def aligned(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to the alignment of keys and values."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def too_long(tokens: int, needed: int, budget: int, *, at_least: bool = False) -> OutOfBudgetError:
    """Return the error for a sequence that can never fit."""
    return OutOfBudgetError(
        f"keys and values of {tokens:,} tokens take {'over ' if at_least else ''}{format_bytes(needed)}, "
        f"and kv_bytes is {format_bytes(budget)}; ask for fewer tokens, or raise kv_bytes"
    )
