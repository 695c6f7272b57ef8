"""Passes over ranks: the first rank leads, the others follow with their parts of the model and their own keys
and values.

Only the lead's engine makes decisions. With each pass it sends which sequences have begun and ended since the
last one, and the new tokens of each, so all ranks reserve and free memory in the same order.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Items
from contextlib import suppress
from itertools import count
from typing import Any

import torch

from gemini.errors import GeminiError, OutOfBudgetError, in_words
from gemini.inference.engine_model import load
from gemini.inference.kv import Keeper, KeysAndValues, Sequence
from gemini.inference.kv_chunks import keeper_of
from gemini.inference.packed_attention import attending
from gemini.inference.passes import PackedModel, RanksLostError
from gemini.inference.tensor_ranks import TensorRanks

logger = logging.getLogger(__name__)

_IDLE_SECONDS = 2.0
_BEGIN, _END = "begin", "end"


class LeadingModel(PackedModel):
    """This rank's part of a model; every pass is also run by the other ranks."""

    idle_seconds = _IDLE_SECONDS

    def __init__(self, model: Any, ranks: TensorRanks) -> None:
        super().__init__(model)
        self._ranks = ranks
        self._passes = _RankPasses(ranks, self)
        self._events: list[tuple[str, int, int]] = []  # of sequences, not sent to the other ranks yet
        self._numbers = count()
        self._is_over = False

    def keeping(self, keeper: Keeper) -> Keeper:
        """Return a wrapper of ``keeper`` that reports its sequences to the other ranks."""
        return _LeadingKeeper(keeper, self)

    def begun(self, sequence: Sequence) -> Sequence:
        """Return a new sequence with a number by which the other ranks know it."""
        number = next(self._numbers)
        self._events.append((_BEGIN, number, sequence.capacity))
        return _Numbered(sequence, number, self)

    def ended(self, number: int) -> None:
        """Record that a sequence has ended."""
        self._events.append((_END, number, 0))

    def logits(self, parts: Items[tuple[Sequence, Items[int]]], ended: Items[bool]) -> list[torch.Tensor]:
        own: list[tuple[Sequence, Items[int]]] = []
        told: list[tuple[int, Items[int]]] = []
        for sequence, tokens in parts:
            assert isinstance(sequence, _Numbered)
            own.append((sequence.own, tokens))
            told.append((sequence.number, tokens))
        self._tell({"parts": told, "ended": list(ended)})
        return self._passes.run(own, ended)

    def idle(self) -> None:
        """Send an empty order, which shows both sides that the ranks are alive."""
        self._tell({})

    def close(self) -> None:
        if not self._is_over:
            self._is_over = True
            with suppress(RanksLostError):
                self._ranks.tell({"stop": True})

    def _tell(self, order: dict[str, Any]) -> None:
        events, self._events = self._events, []
        try:
            self._ranks.tell({**order, "events": events})
        except RanksLostError:
            self._is_over = True
            raise


def follow(ranks: TensorRanks, directory: str, **options: Any) -> None:
    """As a rank that does not lead, load this rank's part of a model and run the lead's passes until it
    closes its engine.

    ``options``: the lead's options of :meth:`Engine.from_pretrained`; they apply to each rank separately.

    Raises:
        RanksLostError: the lead or another rank is gone.
        ConfigError, OutOfBudgetError: as in :meth:`Engine.from_pretrained`.
    """
    loaded = load(directory, ranks=ranks, **options)
    handle = loaded.handle
    try:
        packed = PackedModel(loaded.model)
        keeper = keeper_of(packed.model, handle, packed.device, loaded.kv_bytes, loaded.kv_device_bytes)
        try:
            with attending(packed.model):
                _Follower(ranks, packed, keeper).run()
        finally:
            keeper.close()
    finally:
        handle.close()


class _RankPasses:
    """Runs this rank's share of passes that all ranks run at the same time."""

    def __init__(self, ranks: TensorRanks, packed: PackedModel) -> None:
        self._ranks, self._packed = ranks, packed
        self._is_first = True

    def run(self, parts: Items[tuple[Sequence, Items[int]]], ended: Items[bool]) -> list[torch.Tensor]:
        """Compute :meth:`PackedModel.logits`. Raises like :meth:`TensorRanks.together`."""
        logits = self._ranks.together(lambda: self._packed.run(parts, ended))
        if self._is_first:  # it measures the size of a token: all ranks must succeed, or none
            self._ranks.together(lambda: _grow(parts))
            self._is_first = False
        else:
            _grow(parts)
        return logits


def _grow(parts: Items[tuple[Sequence, Items[int]]]) -> None:
    for sequence, tokens in parts:
        sequence.advance(len(tokens))


class _Follower:
    """Runs the lead's passes with this rank's part."""

    def __init__(self, ranks: TensorRanks, packed: PackedModel, keeper: Keeper) -> None:
        self._ranks, self._keeper = ranks, keeper
        self._passes = _RankPasses(ranks, packed)
        self._sequences: dict[int, Sequence] = {}

    def run(self) -> None:
        """Run passes until the lead sends the end. Raises RanksLostError."""
        while True:
            order = self._ranks.hear()
            if order.get("stop"):
                return
            for event in order["events"]:
                self._note(*event)
            if "parts" not in order:
                continue
            try:
                self._pass(order["parts"], order["ended"])
            except RanksLostError:
                raise
            except Exception as error:  # the model's code may raise anything; the lead reports it to the user
                logger.info("a pass has failed: %s", in_words(error))

    def _note(self, kind: str, number: int, capacity: int) -> None:
        if kind == _END:
            ended = self._sequences.pop(number, None)
            if ended is not None:
                ended.close()
            return
        with suppress(GeminiError):  # the first pass of the sequence will fail instead
            found = self._keeper.reserve(capacity)
            if found is not None:
                self._sequences[number] = found

    def _pass(self, told: Items[tuple[int, Items[int]]], ended: Items[bool]) -> None:
        missing = [number for number, _ in told if number not in self._sequences]
        if missing:
            self._ranks.together(_refuse)
        self._passes.run([(self._sequences[number], tokens) for number, tokens in told], ended)


def _refuse() -> None:
    raise OutOfBudgetError(
        "a sequence got no memory for keys and values on this rank; ask again, or raise device_bytes"
    )


class _Numbered(Sequence):
    """A sequence of the lead; closing it reports its end to the other ranks. ``own``: the wrapped
    sequence.
    """

    def __init__(self, own: Sequence, number: int, model: LeadingModel) -> None:
        self.own, self.number, self._model = own, number, model
        self.length, self.capacity = own.length, own.capacity
        self._is_open = True

    def append(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, window: int | None = None
    ) -> KeysAndValues:
        return self.own.append(layer, key, value, window)

    def let_go(self) -> None:
        self.own.let_go()

    def advance(self, tokens: int) -> None:
        self.own.advance(tokens)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self.own.close()
            self._model.ended(self.number)


class _LeadingKeeper(Keeper):
    """A keeper of the lead that reports its sequences to the other ranks."""

    def __init__(self, own: Keeper, model: LeadingModel) -> None:
        self._own, self._model = own, model
        self.nbytes = own.nbytes

    @property
    def peak_bytes(self) -> int:  # type: ignore[override]
        return self._own.peak_bytes

    @property
    def used_bytes(self) -> int:
        return self._own.used_bytes

    @property
    def first_tokens(self) -> int | None:
        return self._own.first_tokens

    def check(self, tokens: int) -> None:
        self._own.check(tokens)

    def reserve(self, tokens: int) -> Sequence | None:
        found = self._own.reserve(tokens)
        return None if found is None else self._model.begun(found)

    def close(self) -> None:
        self._own.close()
