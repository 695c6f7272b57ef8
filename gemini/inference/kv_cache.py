"""KVCache: the keys and values of ``generate()`` in the tiers of a managed model."""

from __future__ import annotations

from functools import cached_property
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer
from transformers.cache_utils import DynamicSlidingWindowLayer as SlidingLayer

from gemini.errors import ConfigError, StateError
from gemini.inference.kv import KeysAndValues, TokenShape, first_seen, too_long
from gemini.inference.kv_chunks import Rows, array_of, check_at_once
from gemini.model.handle import ManagedModel, handle_around
from gemini.runtime.kv_room import KVArray, KVRoom
from gemini.system.config import format_enough, parse_bytes


class KVCache(Cache):
    """A cache for transformers' ``generate()``. Its keys and values move between DEVICE, HOST and DISK like
    the weights, within the same budgets::

        with KVCache(model, kv_bytes="4GiB", kv_device_bytes="256MiB") as cache:
            model.generate(**inputs, cache=cache, max_new_tokens=20_000)

    Versions of transformers without ``cache=`` call it ``past_key_values=``.

    Logits are bit-identical to those with transformers' own cache. The bytes are divided evenly among the
    layers; the number of tokens that fit depends on the batch. A layer with a sliding window frees the tokens
    behind it.

    Args:
        model: managed by :func:`gemini.manage` or :func:`gemini.from_pretrained`, or a ``GeminiDDP``.
        kv_bytes: for keys and values on all tiers.
        kv_device_bytes: the part of DEVICE that plans leave to them.

    Raises:
        ConfigError: the model is not managed, its layers keep other data than keys and values, or its tiers
            cannot have such chunks; later, if generation uses beams or changes the batch in another way.
        OutOfBudgetError, IoError: the tiers cannot hold so much beside the model.
    """

    def __init__(
        self, model: nn.Module | ManagedModel, *, kv_bytes: int | str, kv_device_bytes: int | str = 0
    ) -> None:
        handle = handle_around(model)
        windows = _windows_of(handle.module)
        nbytes = parse_bytes(kv_bytes, name="kv_bytes") or 0
        least = len(windows) * handle.manager.chunks.device.block_bytes
        if nbytes < least:
            raise ConfigError(
                f"kv_bytes is {kv_bytes}, and {len(windows)} layers take at least {format_enough(least)}"
            )
        on_device = parse_bytes(kv_device_bytes, name="kv_device_bytes") or 0
        raises_disk = handle.config.disk_bytes is None
        room = KVRoom(handle.manager, nbytes, on_device, raises_disk=raises_disk)
        self._memory = _Memory(room, len(windows))
        layers: list[Any] = [_RoomLayer(self._memory, window) for window in windows]
        super().__init__(layers=layers)

    def close(self) -> None:
        """Free the memory. Idempotent."""
        self._memory.close()

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Raise ConfigError: its memory belongs to the model."""
        raise ConfigError("a KVCache cannot be copied; keep the tokens, and make a new cache from them")

    def __reduce__(self) -> NoReturn:
        """Raise ConfigError: its memory belongs to the model."""
        raise ConfigError("a KVCache cannot be pickled; keep the tokens, and make a new cache from them")

    def __enter__(self) -> KVCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Memory:
    """The memory of a cache, divided equally among its layers."""

    def __init__(self, room: KVRoom, num_layers: int) -> None:
        self.num_layers = num_layers
        self._room: KVRoom | None = room

    @property
    def room(self) -> KVRoom:
        """The memory. Raises StateError after :meth:`close`."""
        if self._room is None:
            raise StateError("this cache is closed; make a new one")
        return self._room

    def array(self) -> KVArray:
        """Return the memory of one layer."""
        return array_of(self.room, self.room.nbytes // self.num_layers)

    def close(self) -> None:
        """Free the memory. Idempotent."""
        room, self._room = self._room, None
        if room is not None:
            room.close()


class _RoomLayer(CacheLayerMixin):
    """Keys and values of one layer, [batch, heads, tokens, size], in one array of the room."""

    is_sliding = False
    is_croppable = True

    def __init__(self, memory: _Memory, window: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_sliding = window is not None
        self.is_croppable = window is None
        self._memory, self._window = memory, window
        self._length = 0
        self._rows: Rows | None = None  # unknown before the first token

    @cached_property
    def array(self) -> KVArray:
        """The memory of this layer, made on first use."""
        return self._memory.array()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self._rows = Rows.of(TokenShape.of(key_states, value_states))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> KeysAndValues:
        if torch.is_grad_enabled() and key_states.requires_grad:
            raise ConfigError("KVCache is for passes without gradients; call the model under torch.no_grad()")
        room = self._memory.room
        rows, first = self._rows_of(key_states, value_states), first_seen(self._length, self._window)
        end = self._length + key_states.shape[2]
        if end * rows.nbytes > self.array.nbytes:
            raise too_long(end, end * rows.nbytes * self._memory.num_layers, room.nbytes)
        check_at_once(room, end - first, (end - first) * rows.nbytes, self.array.chunk_bytes)
        room.free(self.array.within(0, first * rows.nbytes))
        self._store(rows, key_states, value_states, end)
        self._length = end
        storage, begin = room.lend(self.array, first * rows.nbytes, end * rows.nbytes)
        memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return rows.views(memory, begin, end - first)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        first = first_seen(self._length, self._window)
        return self._length - first + query_length, first

    def get_seq_length(self) -> int:
        return self._length

    def get_max_length(self) -> int:
        return self._window or -1

    def reset(self) -> None:
        """Forget all tokens; the next ones may be of another batch."""
        self._length, self._rows, self.is_initialized = 0, None, False
        self._memory.room.free(self.array.holding(0, self.array.nbytes))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens."""
        if tokens_to_remove > 0 or self._window is not None:
            raise ConfigError("of this cache only the last tokens of layers without a window can be removed")
        self._length = max(0, self._length + tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> NoReturn:
        raise _other_batch("reorders the batch, as beams do")

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        raise _other_batch("repeats the batch")

    def batch_select_indices(self, indices: torch.Tensor) -> NoReturn:
        raise _other_batch("selects from the batch")

    def offload(self) -> None:
        """Do nothing: the runtime moves the chunks."""

    def prefetch(self) -> None:
        """Do nothing: the runtime moves the chunks."""

    def _store(self, rows: Rows, key: torch.Tensor, value: torch.Tensor, end: int) -> None:
        room, begin = self._memory.room, self._length * rows.nbytes
        written = self.array.holding(begin, end * rows.nbytes)
        room.fetch(written)
        try:
            keys, values = rows.views(self.array.tensor, begin, end - self._length)
            keys.copy_(key)
            values.copy_(value)
        finally:
            room.let_go(written, written)

    def _rows_of(self, key: torch.Tensor, value: torch.Tensor) -> Rows:
        """Return the layout of tokens. Raises ConfigError if the shapes differ from those stored before."""
        if self._rows is None:
            self.lazy_initialization(key, value)
        assert self._rows is not None
        shape = TokenShape.of(key, value)
        if shape != self._rows.shape:
            raise ConfigError(
                f"this cache holds keys and values of {self._rows.shape}, and these are of {shape}; reset() "
                "it for another batch"
            )
        return self._rows


def _windows_of(model: nn.Module) -> list[int | None]:
    """Return the sliding window, or None, of each layer in transformers' own cache for this model."""
    config = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise ConfigError(f"{type(model).__name__} is not a model of transformers: it has no configuration")
    found: list[int | None] = []
    for layer in DynamicCache(config=config).layers:
        if type(layer) is SlidingLayer:
            found.append(layer.sliding_window)
        elif type(layer) is DynamicLayer:
            found.append(None)
        else:
            raise ConfigError(
                f"{type(model).__name__} has layers that keep more than keys and values "
                f"({type(layer).__name__}); generate with transformers' own cache"
            )
    return found


def _other_batch(what: str) -> ConfigError:
    return ConfigError(f"generate() {what}, which KVCache does not; use num_beams=1, or transformers' cache")
