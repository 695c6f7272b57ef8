"""What is asked of an engine, and what it answers."""

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
    """As many requests wait as may wait; the request was not taken."""


@dataclass(frozen=True)
class Request:
    """A prompt and how to continue it.

    ``tokens``: the prompt. At most ``max_tokens`` follow. ``temperature`` 0 takes the likeliest token;
    above, a token is drawn from the ``top_k`` likeliest (0: all) that together have the probability
    ``top_p``. Draws with a ``seed`` are repeatable and do not depend on other requests. ``stop_tokens`` end
    the answer and do not belong to it (None: those of the model's generation_config). ``timeout_s``: seconds
    from the submission on, after which the answer ends where it is.

    Raise ConfigError for what cannot be.
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
    """The tokens that follow a prompt, and why they end: at a stop token ("stop"), at ``max_tokens``
    ("length"), "cancelled" or by "timeout"."""

    tokens: tuple[int, ...]
    finish_reason: FinishReason


class Generation:
    """An answer as it grows. Any thread may read it; the engine's thread writes it.

    ``notify``, if given, is called on the engine's thread after each token and at the end: it must be quick.
    An answer whose ``notify`` raises fails with that error.
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
        """Return the tokens so far."""
        return tuple(self._tokens)

    @property
    def num_tokens(self) -> int:
        """Return how many there are."""
        return len(self._tokens)

    @property
    def last_token(self) -> int:
        """Return the newest one."""
        return self._tokens[-1]

    @property
    def finish_reason(self) -> FinishReason | None:
        """Return why it ended, or None before."""
        return self._finish_reason

    @property
    def error(self) -> BaseException | None:
        """Return what made it fail."""
        return self._error

    @property
    def is_cancelled(self) -> bool:
        """Return whether nobody wants more of it."""
        return self._is_cancelled

    def cancel(self) -> None:
        """End the answer after the pass that runs now. What ended before stays as it is."""
        self._is_cancelled = True

    def result(self, timeout: float | None = None) -> Answer:
        """Wait for the end, at most ``timeout`` seconds, and return the answer.

        Raises:
            StateError: it has not ended in time.
            GeminiError, OSError, MemoryError, RuntimeError: the pass failed, for the reason that it has.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._finish_reason is not None, timeout):
                raise StateError(f"the answer has not ended after {timeout} s; wait longer, or cancel() it")
        assert self._finish_reason is not None
        if self._error is not None:
            raise self._error
        return Answer(self.tokens, self._finish_reason)

    def __iter__(self) -> Iterator[int]:
        """Yield the tokens as they come."""
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
        """Take a token; for the engine."""
        if self.first_token_at is None:
            self.first_token_at = time.monotonic()
        with self._changed:
            self._tokens.append(token)
            self._changed.notify_all()
        if self._notify is not None:
            self._notify()

    def end(self, reason: FinishReason, error: BaseException | None = None) -> None:
        """End it; for the engine. The first end counts."""
        with self._changed:
            if self._finish_reason is not None:
                return
            self.ended_at = time.monotonic()
            self._error, self._finish_reason = error, reason
            self._changed.notify_all()
        if self._notify is not None:
            try:
                self._notify()
            except Exception:  # nothing is left that could fail
                logger.exception("notify of a request raised at the end of its answer")
