"""Requests to an engine, and their answers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from gemini.errors import ConfigError, GeminiError, StateError

logger = logging.getLogger(__name__)

FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]


class QueueFullError(GeminiError):
    """The queue of waiting requests is full; the request was not accepted."""


@dataclass(frozen=True)
class Request:
    """A prompt and how to continue it.

    Attributes:
        tokens: the prompt.
        max_tokens: the most tokens of the answer.
        temperature: 0 takes the likeliest token; above, a token is drawn.
        top_k, top_p: draw from the ``top_k`` likeliest tokens (0: all) that together have the probability
            ``top_p``.
        seed: makes draws repeatable and independent of other requests; None: random.
        stop_tokens: end the answer and are not part of it; None: those of the model's generation_config.
        timeout_s: seconds after submission when the answer ends as it is; None: no limit.

    Raises:
        ConfigError: a value is invalid.
    """

    tokens: tuple[int, ...]
    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_tokens: frozenset[int] | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ConfigError("the prompt has no tokens; give a text")
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature is {self.temperature}; it must be at least 0")
        if self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}; it must be at least 0 (0: all tokens)")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed is {self.seed}; it must be from 0 to 2**63 - 1")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ConfigError(f"timeout_s is {self.timeout_s}; it must be above 0")


@dataclass(frozen=True)
class Answer:
    """The tokens after a prompt, and why they end: at a stop token ("stop"), at ``max_tokens`` ("length"),
    "cancelled", or by "timeout".
    """

    tokens: tuple[int, ...]
    finish_reason: FinishReason


class Generation:
    """A growing answer. Any thread may read it; the engine's thread writes it.

    ``notify``, if given, is called on the engine's thread after each token and at the end, so it must be
    quick. If it raises, the answer fails with that error.
    """

    def __init__(self, request: Request, notify: Callable[[], object] | None = None) -> None:
        self.request = request
        self.submitted_at = time.monotonic()
        self.first_token_at: float | None = None
        self.ended_at: float | None = None
        self._notify = notify
        self._tokens: list[int] = []
        self._finish_reason: FinishReason | None = None
        self._error: BaseException | None = None
        self._is_cancelled = False
        self._changed = threading.Condition()

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens so far."""
        return tuple(self._tokens)

    @property
    def num_tokens(self) -> int:
        """The number of tokens so far."""
        return len(self._tokens)

    @property
    def last_token(self) -> int:
        """The newest token."""
        return self._tokens[-1]

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer ended; None before the end."""
        return self._finish_reason

    @property
    def error(self) -> BaseException | None:
        """The error that made it fail; None if there is none."""
        return self._error

    @property
    def is_cancelled(self) -> bool:
        """Whether :meth:`cancel` was called."""
        return self._is_cancelled

    def cancel(self) -> None:
        """End the answer after the current pass. No effect if it has ended."""
        self._is_cancelled = True

    def result(self, timeout: float | None = None) -> Answer:
        """Wait for the end, at most ``timeout`` seconds, and return the answer.

        Raises:
            StateError: it has not ended in time.
            GeminiError, OSError, MemoryError, RuntimeError: the error of the pass that failed.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._finish_reason is not None, timeout):
                raise StateError(f"the answer has not ended after {timeout} s; wait longer, or cancel() it")
        assert self._finish_reason is not None
        if self._error is not None:
            raise self._error
        return Answer(self.tokens, self._finish_reason)

    def __iter__(self) -> Iterator[int]:
        """Yield the tokens as they arrive."""
        given = 0
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda seen=given: len(self._tokens) > seen or self._finish_reason is not None  # type: ignore[misc]
                )
                new, ended = self._tokens[given:], self._finish_reason is not None
            yield from new
            given += len(new)
            if ended and given == len(self._tokens):
                if self._error is not None:
                    raise self._error
                return

    def add(self, token: int) -> None:
        """Append a token. For the engine."""
        if self.first_token_at is None:
            self.first_token_at = time.monotonic()
        with self._changed:
            self._tokens.append(token)
            self._changed.notify_all()
        if self._notify is not None:
            self._notify()

    def end(self, reason: FinishReason, error: BaseException | None = None) -> None:
        """End the answer. Only the first call has an effect. For the engine."""
        with self._changed:
            if self._finish_reason is not None:
                return
            self.ended_at = time.monotonic()
            self._error, self._finish_reason = error, reason
            self._changed.notify_all()
        if self._notify is not None:
            try:
                self._notify()
            except Exception:  # the answer has already ended
                logger.exception("notify of a request raised at the end of its answer")
