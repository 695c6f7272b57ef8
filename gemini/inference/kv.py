"""Keys and values of sequences: a fixed number of bytes, from which each sequence gets one piece for all of
its tokens before its first pass.

So a sequence that has begun never lacks memory, and nothing is copied when it grows. How many bytes a token
takes is known after the first pass; until then one sequence has all bytes.
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
    """The keys and values of one sequence (or of a batch of rows of equal length). ``length`` tokens are
    there; ``capacity`` is the most that there may be."""

    length: int
    capacity: int

    def append(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, window: int | None = None
    ) -> KeysAndValues:
        """Store what a pass adds, [rows, heads, tokens, size], and return all that its tokens see: everything
        so far, or with a ``window`` the last ones. The result may be used until :meth:`let_go`, which comes
        before anything else of this sequence. A pass that fails and comes again writes the same places.

        Raises:
            OutOfBudgetError, IoError: the tokens have no place, or cannot be fetched.
        """

    def let_go(self) -> None:
        """Say that nobody uses what :meth:`append` has returned any more."""

    def advance(self, tokens: int) -> None:
        """After a pass: its tokens are part of the sequence."""

    def close(self) -> None:
        """Give the memory back. Idempotent."""


class Keeper(Protocol):
    """Has the keys and values of sequences."""

    nbytes: int
    peak_bytes: int

    @property
    def used_bytes(self) -> int:
        """What sequences hold now."""

    @property
    def first_tokens(self) -> int | None:
        """The most tokens of the next pass, while it is not known what a token takes; None: any number."""

    def check(self, tokens: int) -> None:
        """Raise OutOfBudgetError if a sequence of ``tokens`` is known to fit never."""

    def reserve(self, tokens: int) -> Sequence | None:
        """Return a sequence that will have at most ``tokens`` tokens, or None while others hold the memory.

        Raises:
            OutOfBudgetError: it never fits.
        """

    def close(self) -> None:
        """Give all memory back. Idempotent."""


@dataclass(frozen=True)
class TokenShape:
    """Of what one layer keeps of a token: rows of a batch, heads and their sizes, for keys and values."""

    rows: int
    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype

    @classmethod
    def of(cls, key: torch.Tensor, value: torch.Tensor) -> TokenShape:
        """Return that of keys and values [rows, heads, tokens, size]. Raises ConfigError where they differ in
        type."""
        if key.dtype != value.dtype:
            raise ConfigError(f"keys are {key.dtype} and values {value.dtype}; they have to be of one type")
        return cls(key.shape[0], key.shape[1], key.shape[-1], value.shape[-1], key.dtype)

    def key_bytes(self, tokens: int) -> int:
        """Return what the keys of ``tokens`` take, to the next place where others may begin."""
        return aligned(self.rows * self.heads * self.key_size * tokens * self.dtype.itemsize)

    def nbytes(self, tokens: int) -> int:
        """Return what the keys and the values of ``tokens`` take."""
        values = self.rows * self.heads * self.value_size * tokens * self.dtype.itemsize
        return self.key_bytes(tokens) + aligned(values)


class Pieces:
    """Numbers from 0 to ``size``: pieces are taken, the first that is large enough, and given back."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._free = [(0, size)] if size else []  # (first, end), in order, never touching

    @property
    def used(self) -> int:
        """How many are taken."""
        return self._size - sum(end - first for first, end in self._free)

    def take(self, count: int) -> int | None:
        """Return the first of ``count`` that follow each other, or None where so many are not free."""
        for index, (first, end) in enumerate(self._free):
            if end - first >= count:
                self._free[index : index + 1] = [(first + count, end)] if end - first > count else []
                return first
        return None

    def give_back(self, first: int, end: int) -> None:
        """Take a piece back, or a part of one."""
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
    """``nbytes`` bytes of ``device`` for keys and values. Pages are taken from the system when they are first
    written. See :class:`Keeper`."""

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
        """Return what a sequence of ``tokens`` takes, or None before the first pass."""
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
                return None  # the first one is still in its first pass
            needed = self.nbytes
        first = self._pieces.take(needed)
        if first is None:
            return None
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return PlainSequence(self, first, first + needed, tokens)

    def close(self) -> None:
        """Do nothing: the memory goes with its tensors."""

    def shape_of(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> TokenShape:
        """Return what ``layer`` keeps of a token."""
        return self._shapes.setdefault(layer, TokenShape.of(key, value))

    def bytes_of(self, first: int, nbytes: int) -> torch.Tensor:
        """Return a piece of the memory."""
        return self._memory[first : first + nbytes]

    def measured(self, sequence: PlainSequence) -> None:
        """After a pass with ``sequence``, which used each layer: a token's bytes are known from now on."""
        if not self._is_measured:
            self._is_measured = True
            needed = self.needed_bytes(sequence.capacity) or 0
            self._pieces.give_back(sequence.first + needed, sequence.end)
            sequence.end = sequence.first + needed
            self.peak_bytes = self.used_bytes

    def release(self, first: int, end: int) -> None:
        """Take a piece back."""
        self._pieces.give_back(first, end)


class PlainSequence:
    """A sequence in one piece of a :class:`KVMemory`, [rows, heads, capacity, size] for keys and for values
    of each layer."""

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
        """Do nothing: the memory stays where it is."""

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
    """Return the first token that the one behind ``length`` others sees, of ``window`` with itself."""
    return 0 if window is None else max(0, length - window + 1)


def aligned(nbytes: int) -> int:
    """Return the next place, at or behind ``nbytes``, where keys or values may begin."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def too_long(tokens: int, needed: int, budget: int, *, at_least: bool = False) -> OutOfBudgetError:
    """Return the error of a sequence that never fits."""
    return OutOfBudgetError(
        f"keys and values of {tokens:,} tokens take {'over ' if at_least else ''}{format_bytes(needed)}, "
        f"and kv_bytes is {format_bytes(budget)}; ask for fewer tokens, or raise kv_bytes"
    )
