"""Endpoints compatible with OpenAI's API: ``/v1/models``, ``/v1/completions`` and ``/v1/chat/completions``.

Unknown options that would change an answer are refused by name, never ignored.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict

from gemini.errors import ConfigError, GeminiError, in_words
from gemini.jobs.serve.limits import error_answer, error_body, while_connected
from gemini.jobs.serve.service import Piece, Query, Service, whole_of

# Unsupported options, and the values that are accepted because they have no effect.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "store": (False,),
}
_MOST_STOPS, _MOST_STOP_CHARACTERS = 16, 4096  # each token's text is compared with all of them
_OF_CLIENTS = {
    "user",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "parallel_tool_calls",
}


class StreamOptions(BaseModel):
    """``include_usage``: the last part of a stream has the numbers of tokens."""

    include_usage: bool = False


class _Options(BaseModel):
    model_config = ConfigDict(extra="allow")

    model: str | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    def refuse_unknown(self) -> None:
        """Raise ConfigError for an unsupported option."""
        for name, value in (self.model_extra or {}).items():
            if name in _OF_CLIENTS or value is None or value in _NEUTRAL.get(name, ()):
                continue
            raise ConfigError(f"the option {name!r} is not supported; leave it out")

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end an answer. Raises ConfigError if there are too many."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stops) > _MOST_STOPS or sum(map(len, stops)) > _MOST_STOP_CHARACTERS:
            raise ConfigError(
                f"stop has {len(stops):,} strings with {sum(map(len, stops)):,} characters; give at "
                f"most {_MOST_STOPS} strings with {_MOST_STOP_CHARACTERS:,} characters in total"
            )
        return stops


class Completion(_Options):
    """The body of ``/v1/completions``: one prompt, as text or as tokens."""

    prompt: str | list[int] | list[str]
    max_tokens: int = 16

    def one_prompt(self) -> str | tuple[int, ...]:
        """Return the prompt. Raises ConfigError if there are several."""
        if isinstance(self.prompt, str):
            return self.prompt
        if all(isinstance(token, int) for token in self.prompt):
            return tuple(token for token in self.prompt if isinstance(token, int))
        if len(self.prompt) > 1:
            raise ConfigError(
                "prompt has several texts; send one request for each at the same time: they share "
                "forward passes"
            )
        return str(self.prompt[0])


class Message(BaseModel):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str


class ChatCompletion(_Options):
    """The body of ``/v1/chat/completions``."""

    messages: list[Message]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


class _Form:
    """The format of an answer: a text completion, or a message of a chat."""

    def __init__(self, model: str, *, chat: bool) -> None:
        self._model, self._chat = model, chat
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())

    def whole(self, text: str, last: Piece) -> dict[str, Any]:
        """Return the whole answer."""
        content = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        answer = self._around(
            content, last.finish_reason, "chat.completion" if self._chat else "text_completion"
        )
        return {**answer, "usage": _usage(last)}

    def part(self, piece: Piece, *, is_first: bool) -> dict[str, Any]:
        """Return a part of a stream."""
        if self._chat:
            role = {"role": "assistant"} if is_first else {}
            return self._around(
                {"delta": {**role, "content": piece.text}}, piece.finish_reason, "chat.completion.chunk"
            )
        return self._around({"text": piece.text}, piece.finish_reason, "text_completion")

    def usage(self, last: Piece) -> dict[str, Any]:
        """Return the part of a stream with the numbers of tokens."""
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._around({}, None, kind), "choices": [], "usage": _usage(last)}

    def _around(self, content: dict[str, Any], reason: str | None, kind: str) -> dict[str, Any]:
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": reason}
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": [choice],
        }


def routes(service: Service) -> APIRouter:
    """Return the endpoints."""
    router = APIRouter(prefix="/v1")

    @router.get("/models")
    async def models() -> dict[str, Any]:
        """List the model that is served."""
        entry = {"id": service.name, "object": "model", "created": 0, "owned_by": "gemini"}
        return {"object": "list", "data": [entry]}

    @router.post("/completions", response_model=None)
    async def completions(body: Completion, request: Request) -> Response:
        """Continue a text."""
        return await _answered(service, request, body, body.one_prompt(), body.max_tokens, chat=False)

    @router.post("/chat/completions", response_model=None)
    async def chat(body: ChatCompletion, request: Request) -> Response:
        """Answer the last message of a conversation."""
        tokens = await service.chat_prompt([message.model_dump() for message in body.messages])
        said = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        most = service.most_tokens_after(len(tokens)) if said is None else said
        return await _answered(service, request, body, tokens, most, chat=True)

    return router


async def _answered(
    service: Service,
    request: Request,
    body: _Options,
    prompt: str | tuple[int, ...],
    max_tokens: int,
    *,
    chat: bool,
) -> Response:
    body.refuse_unknown()
    if body.model not in (None, service.name):
        return error_answer(
            404, f"the model {body.model!r:.100} does not exist; this server has {service.name!r}", "model"
        )
    query = Query(
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        seed=body.seed,
        stops=body.stops,
    )
    form, pieces = _Form(service.name, chat=chat), service.answer(query)
    if not body.stream:
        text, last = await while_connected(request, whole_of(pieces))
        return JSONResponse(form.whole(text, last))
    first = await while_connected(request, anext(pieces))
    with_usage = body.stream_options is not None and body.stream_options.include_usage
    return StreamingResponse(_events(form, first, pieces, with_usage), media_type="text/event-stream")


async def _events(
    form: _Form, first: Piece, rest: AsyncGenerator[Piece, None], with_usage: bool
) -> AsyncIterator[str]:
    """Yield server-sent events: one for each part, and the end."""
    yield _event(form.part(first, is_first=True))
    last = first
    async with aclosing(rest):
        try:
            async for last in rest:
                yield _event(form.part(last, is_first=False))
        except (GeminiError, OSError, MemoryError, RuntimeError) as error:
            yield _event(error_body(500, in_words(error)))  # too late for a status code
            return
    if with_usage:
        yield _event(form.usage(last))
    yield "data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _usage(last: Piece) -> dict[str, int]:
    return {
        "prompt_tokens": last.prompt_tokens,
        "completion_tokens": last.tokens,
        "total_tokens": last.prompt_tokens + last.tokens,
    }
