"""Keys and values in chunks of a managed model: the part that DEVICE cannot hold is on HOST or DISK.

A token's keys and values of one layer are adjacent, one token after the other, so a full chunk never changes
again: it is written below DEVICE once, and dropping it later writes nothing. Attention fetches one sequence
of one layer at a time, so nothing larger must fit at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gemini.errors import ConfigError, OutOfBudgetError
from gemini.inference.kv import (
    Keeper,
    KeysAndValues,
    KVMemory,
    Pieces,
    TokenShape,
    aligned,
    first_seen,
    too_long,
)
from gemini.model.handle import ManagedModel
from gemini.runtime.kv_room import KVArray, KVRoom
from gemini.system.config import format_bytes

_CHUNK_BYTES = 256 * 2**10  # large enough for nearly full disk speed
_CHUNKS_PER_ARRAY = 64  # at least: a sequence wastes part of its last chunk
_CHUNKS_ON_DEVICE = 32  # at least
_LINE = 64
# Rows at distances of a multiple of this compete for few lines of the L1 cache.
_CACHE_WAY_BYTES = 2**10
_FIRST_TOKENS = 64


@dataclass(frozen=True)
class Rows:
    """The layout of keys and values of one layer; ``nbytes``: the distance from token to token."""

    shape: TokenShape
    nbytes: int

    @classmethod
    def of(cls, shape: TokenShape) -> Rows:
        """Return the layout of a layer, padded to avoid conflicts in the L1 cache."""
        nbytes = shape.nbytes(1)
        return cls(shape, nbytes + _LINE if nbytes % _CACHE_WAY_BYTES == 0 else nbytes)

    def views(self, memory: torch.Tensor, begin: int, tokens: int) -> KeysAndValues:
        """Return keys and values, [rows, heads, tokens, size], that begin at byte ``begin``."""
        shape = self.shape
        itemsize = shape.dtype.itemsize
        typed = memory.view(shape.dtype)

        def view(first: int, size: int) -> torch.Tensor:
            strides = (shape.heads * size, size, self.nbytes // itemsize, 1)
            return typed.as_strided((shape.rows, shape.heads, tokens, size), strides, first // itemsize)

        return view(begin, shape.key_size), view(begin + shape.key_bytes(1), shape.value_size)


@dataclass(frozen=True)
class _Layer:
    """An array of a room, and the pieces of it that sequences have. Layers with equal rows share the
    allocator, so a sequence has the same place in each of them.
    """

    rows: Rows
    array: KVArray
    pieces: Pieces


class _SequencePlace:
    """The keys and values of one sequence in one layer."""

    def __init__(self, layer: _Layer, first_chunk: int, capacity: int) -> None:
        self._rows, self._array = layer.rows, layer.array
        self._begin = first_chunk * layer.array.chunk_bytes
        self.keys, self.values = layer.rows.views(layer.array.tensor, self._begin, capacity)

    def holding(self, first: int, end: int) -> list[int]:
        """Return the chunk tensors that contain the tokens from ``first`` to ``end``."""
        row = self._rows.nbytes
        return self._array.holding(self._begin + first * row, self._begin + end * row)

    def before(self, first: int) -> list[int]:
        """Return the chunk tensors that contain only tokens before ``first``."""
        return self._array.within(self._begin, self._begin + first * self._rows.nbytes)


class ChunkedKV:
    """Keys and values in the chunks of ``room``; implements :class:`gemini.inference.kv.Keeper`.

    A sequence gets its places for all tokens before it begins. The very first pass shows the size of a token;
    its keys and values are in ordinary memory until it is over.
    """

    def __init__(self, room: KVRoom) -> None:
        self.nbytes = room.nbytes
        self.peak_bytes = 0
        self.room = room
        self.layers: dict[int, _Layer] = {}
        self._pieces: dict[Rows, Pieces] = {}
        self._first: ChunkedSequence | None = None

    @property
    def first_tokens(self) -> int | None:
        return None if self.layers else _FIRST_TOKENS

    @property
    def used_bytes(self) -> int:
        return sum(layer.pieces.used * layer.array.chunk_bytes for layer in self.layers.values())

    def check(self, tokens: int) -> None:
        if not self.layers:
            return
        needed = sum(
            _chunks(layer.rows, tokens, layer.array.chunk_bytes) * layer.array.chunk_bytes
            for layer in self.layers.values()
        )
        if needed > self.nbytes:
            raise too_long(tokens, needed, self.nbytes)
        for layer in self.layers.values():
            check_at_once(self.room, tokens, layer.rows.nbytes * tokens, layer.array.chunk_bytes)

    def reserve(self, tokens: int) -> ChunkedSequence | None:
        self.check(tokens)
        if not self.layers:
            if self._first is not None:
                return None
            self._first = ChunkedSequence(self, tokens)
            return self._first
        sequence = ChunkedSequence(self, tokens)
        return sequence if self.place(sequence) else None

    def place(self, sequence: ChunkedSequence) -> bool:
        """Give ``sequence`` its places; return whether there was room."""
        taken: dict[Rows, tuple[int, int]] = {}
        for layer in self.layers.values():
            if layer.rows in taken:
                continue
            count = _chunks(layer.rows, sequence.capacity, layer.array.chunk_bytes)
            first = layer.pieces.take(count)
            if first is None:
                for rows, piece in taken.items():
                    self._pieces[rows].give_back(*piece)
                return False
            taken[layer.rows] = first, first + count
        sequence.pieces = taken
        sequence.places = {
            index: _SequencePlace(layer, taken[layer.rows][0], sequence.capacity)
            for index, layer in self.layers.items()
        }
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return True

    def measured(self, shapes: dict[int, TokenShape]) -> None:
        """Make the arrays of all layers, or none after an error, for as many tokens as fit the bytes."""
        rows = {layer: Rows.of(shape) for layer, shape in sorted(shapes.items())}
        token = sum(each.nbytes for each in rows.values())
        tokens = self.nbytes // token
        if not tokens:
            raise too_long(1, token, self.nbytes)
        arrays: dict[int, KVArray] = {}
        try:
            for layer, each in rows.items():
                arrays[layer] = array_of(self.room, each.nbytes * tokens)
        except BaseException:
            for array in arrays.values():
                self.room.put_back(array)
            raise
        for layer, array in arrays.items():
            pieces = self._pieces.setdefault(rows[layer], Pieces(array.nbytes // array.chunk_bytes))
            self.layers[layer] = _Layer(rows[layer], array, pieces)

    def release(self, sequence: ChunkedSequence) -> None:
        """Free the places of ``sequence``."""
        for place in sequence.places.values():
            self.room.free(place.holding(0, sequence.capacity))
        for rows, piece in sequence.pieces.items():
            self._pieces[rows].give_back(*piece)
        if self._first is sequence:
            self._first = None

    def close(self) -> None:
        self.room.close()


class ChunkedSequence:
    """A sequence in chunks; implements :class:`gemini.inference.kv.Sequence`."""

    def __init__(self, memory: ChunkedKV, capacity: int) -> None:
        self.length, self.capacity = 0, capacity
        self.pieces: dict[Rows, tuple[int, int]] = {}
        self.places: dict[int, _SequencePlace] = {}
        self._memory = memory
        self._windows: dict[int, int | None] = {}
        self._early: dict[int, KeysAndValues] = {}  # of the very first pass
        self._pinned: tuple[list[int], list[int]] | None = None  # tensors in use, and those written

    def append(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, window: int | None = None
    ) -> KeysAndValues:
        self._windows[layer] = window
        if not self.places:
            self._early[layer] = key.clone(), value.clone()
            return self._early[layer]
        place, end = self.places[layer], self.length + key.shape[2]
        first = first_seen(self.length, window)
        self._pin(place.holding(first, end), place.holding(self.length, end))
        place.keys[:, :, self.length : end] = key
        place.values[:, :, self.length : end] = value
        return place.keys[:, :, first:end], place.values[:, :, first:end]

    def let_go(self) -> None:
        if self._pinned is not None:
            tensors, written = self._pinned
            self._pinned = None
            self._memory.room.let_go(tensors, written)

    def advance(self, tokens: int) -> None:
        if self._early:
            self._settle()
        self.length += tokens
        for layer, window in self._windows.items():
            if window is not None:
                self._memory.room.free(self.places[layer].before(first_seen(self.length, window)))

    def close(self) -> None:
        self.let_go()
        self._memory.release(self)
        self.pieces, self.places, self._early = {}, {}, {}

    def _settle(self) -> None:
        """Move the keys and values of the very first pass into their places."""
        memory, early = self._memory, self._early
        if not memory.layers:
            memory.measured({layer: TokenShape.of(*stored) for layer, stored in early.items()})
        memory.check(self.capacity)
        if not memory.place(self):
            raise too_long(self.capacity, memory.nbytes, memory.nbytes, at_least=True)
        self._early = {}
        for layer, (key, value) in early.items():
            self.append(layer, key, value, self._windows[layer])
            self.let_go()

    def _pin(self, tensors: list[int], written: list[int]) -> None:
        self.let_go()
        self._memory.room.fetch(tensors)
        self._pinned = tensors, written


def keeper_of(
    model: Any, handle: ManagedModel | None, device: torch.device, nbytes: int, device_bytes: int | None
) -> Keeper:
    """Return the keeper for the keys and values of ``model``: DEVICE memory or, if ``device_bytes`` is less
    than ``nbytes``, chunks of the managed model with handle ``handle``.

    Raises:
        ConfigError: the second case, and the model is not managed.
    """
    if device_bytes is None or device_bytes >= nbytes:
        return KVMemory(nbytes, device)
    if handle is None:
        raise ConfigError(
            f"kv_device_bytes is less than kv_bytes, and {type(model).__name__} is not managed, so there is "
            "nothing below DEVICE; use gemini.manage() or Engine.from_pretrained()"
        )
    raises_disk = handle.config.disk_bytes is None
    return ChunkedKV(KVRoom(handle.manager, nbytes, device_bytes, raises_disk=raises_disk))


def array_of(room: KVRoom, nbytes: int) -> KVArray:
    """Return an array of at least ``nbytes``, in chunks that are small compared with it and with DEVICE."""
    most = min(_CHUNK_BYTES, nbytes // _CHUNKS_PER_ARRAY, room.usable_device_bytes // _CHUNKS_ON_DEVICE)
    return room.array(nbytes, 1 << max(most, 1).bit_length() - 1)


def check_at_once(room: KVRoom, tokens: int, nbytes: int, chunk_bytes: int) -> None:
    """Raise OutOfBudgetError if ``nbytes`` of one layer, those of ``tokens``, cannot be on DEVICE at once."""
    at_once = (-(-nbytes // chunk_bytes) + 1) * chunk_bytes  # the bytes may begin inside a chunk
    if at_once > room.usable_device_bytes:
        raise OutOfBudgetError(
            f"keys and values of {tokens:,} tokens take {format_bytes(at_once)} in one layer, which "
            f"attention needs on DEVICE at once, and DEVICE has {format_bytes(room.usable_device_bytes)} for "
            "it; ask for fewer tokens, or raise device_bytes"
        )


def _chunks(rows: Rows, tokens: int, chunk_bytes: int) -> int:
    return -(-aligned(rows.nbytes * tokens) // chunk_bytes)
