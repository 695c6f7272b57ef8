"""Service: connects an engine to an event loop; encodes prompts, and decodes tokens to pieces of text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any

from gemini.errors import ConfigError
from gemini.inference.engine import Engine
from gemini.inference.request import FinishReason, Request
from gemini.inference.text import TextStream
from gemini.jobs.serve.config import ServeConfig
from gemini.jobs.serve.query_cache import QueryCache
from gemini.system.input_files import errors_of


@dataclass(frozen=True)
class Query:
    """A prompt and all options of its answer. ``stops``: texts that end the answer."""

    prompt: str | tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stops: tuple[str, ...] = ()


@dataclass(frozen=True)
class Piece:
    """A part of an answer. The last one has the finish reason and the numbers of tokens."""

    text: str
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    tokens: int = 0


class Service:
    """The shared state of the endpoints: the engine, the tokenizer and the cached answers. For one event
    loop."""

    def __init__(self, engine: Engine, tokenizer: Any, config: ServeConfig) -> None:
        self.engine, self.tokenizer, self.config = engine, tokenizer, config
        self.name = config.name or config.model.absolute().name
        self.cache: QueryCache[Piece] = QueryCache(config.cache_size, config.cache_list_size)
        self.is_draining = False
        self.first_tokens, self.first_token_seconds = 0, 0.0  # begun answers, and their total waiting time
        self._encoding = asyncio.Lock()

    @property
    def is_alive(self) -> bool:
        """Whether requests can be answered."""
        return self.engine.is_alive and not self.is_draining

    def drain(self) -> None:
        """Stop accepting new requests."""
        self.is_draining = True

    def most_tokens_after(self, prompt_tokens: int) -> int:
        """Return how many tokens may follow a prompt of this length."""
        longest = self.engine.longest
        most = self.config.max_tokens
        return most if longest is None else max(1, min(most, longest - prompt_tokens))

    async def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Return the tokens of a conversation, encoded with the tokenizer's template.

        Raises:
            ConfigError: there is no template, or it cannot be applied.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise ConfigError(
                f"{self.name} has no chat template; use /v1/completions, or put a "
                "chat_template.jinja beside the tokenizer"
            )
        async with self._encoding:
            return await asyncio.to_thread(self._encode_chat, list(messages))

    async def answer(self, query: Query) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of an answer as they are generated. If the generator is closed, the request is
        cancelled.

        Raises:
            ConfigError, OutOfBudgetError, QueueFullError, StateError: as for :meth:`Engine.submit`.
        """
        kept = None if query.seed is not None else self.cache.get(query)
        if kept is not None:
            yield kept
            return
        tokens = query.prompt if isinstance(query.prompt, tuple) else await self._encoded(query.prompt)
        if query.max_tokens > self.config.max_tokens:
            raise ConfigError(
                f"max_tokens is {query.max_tokens}; this server allows at most {self.config.max_tokens}"
            )
        request = Request(
            tokens=tokens,
            max_tokens=query.max_tokens,
            temperature=query.temperature,
            top_k=query.top_k,
            top_p=query.top_p,
            seed=query.seed,
            timeout_s=self.config.timeout_s,
        )
        whole = ""
        async with aclosing(self._generated(request, query.stops)) as pieces:
            async for piece in pieces:
                whole += piece.text
                if piece.finish_reason in ("stop", "length") and query.seed is None:
                    self.cache.add(query, replace(piece, text=whole))
                yield piece

    async def _generated(self, request: Request, stops: Sequence[str]) -> AsyncGenerator[Piece, None]:
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def notify() -> None:
            with suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(changed.set)

        generation = self.engine.submit(request, notify)
        text, taken = TextStream(self.tokenizer, stops, request.tokens), 0
        try:
            reason: FinishReason | None = None
            while reason is None:
                await changed.wait()
                changed.clear()
                reason = generation.finish_reason
                tokens, piece = generation.tokens, ""
                while taken < len(tokens) and not text.is_stopped:
                    piece += text.push(tokens[taken])
                    taken += 1
                if generation.error is not None:
                    raise generation.error
                if text.is_stopped:
                    reason = "stop"
                elif reason is not None:
                    piece += text.end()
                    reason = "stop" if text.is_stopped else reason
                if piece and reason is None:
                    yield Piece(piece)
            yield Piece(piece, reason, len(request.tokens), taken)
        finally:
            generation.cancel()
            if generation.first_token_at is not None:
                self.first_tokens += 1
                self.first_token_seconds += generation.first_token_at - generation.submitted_at

    async def _encoded(self, prompt: str) -> tuple[int, ...]:
        async with self._encoding:  # tokenizers are not thread-safe
            return await asyncio.to_thread(self._encode, prompt)

    def _encode(self, prompt: str) -> tuple[int, ...]:
        with errors_of("the prompt cannot be tokenized"):
            return tuple(self.tokenizer(prompt)["input_ids"])

    def _encode_chat(self, messages: list[Mapping[str, str]]) -> tuple[int, ...]:
        with errors_of("the chat template cannot be applied"):
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])


async def whole_of(pieces: AsyncGenerator[Piece, None]) -> tuple[str, Piece]:
    """Return the text of all pieces, and the last piece."""
    text = ""
    async with aclosing(pieces):
        async for piece in pieces:
            text += piece.text
    return text, piece
