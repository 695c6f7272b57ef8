"""Middleware and helpers for every endpoint: size limits of requests, disconnected clients, and errors as one
sentence."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gemini.errors import ConfigError, GeminiError, OutOfBudgetError, StateError, in_words
from gemini.inference.request import QueueFullError
from gemini.system.config import format_bytes

T = TypeVar("T")
_RETRY_AFTER_S = 1
_CLIENT_GONE = 499  # the client has closed the connection


class ClientGoneError(Exception):
    """The client has disconnected."""


class BodyLimit:
    """Middleware that refuses requests of more than ``most`` bytes with 413, before they are read completely.

    Requests that the server's shutdown cancels get a 503 or end silently; otherwise the server would log a
    traceback for each.
    """

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app, self._most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request with a limited body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        said = dict(scope["headers"]).get(b"content-length", b"0")
        if said.isdigit() and int(said) > self._most:
            await self._refuse(scope, receive, send)
            return
        taken, is_refused, is_begun = 0, False, False

        async def limited() -> Message:
            nonlocal taken, is_refused
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._most and not is_refused:
                is_refused = True
                await self._refuse(scope, receive, send)
            return {"type": "http.disconnect"} if is_refused else message

        async def unless_refused(message: Message) -> None:
            nonlocal is_begun
            is_begun = True
            if not is_refused:
                await send(message)

        with suppress(asyncio.CancelledError):
            await self._app(scope, limited, unless_refused)
            return
        if not is_begun and not is_refused:
            await error_answer(503, "the server is shutting down; try again later")(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = error_answer(413, f"the request has more than {format_bytes(self._most)}; send less")
        await answer(scope, receive, send)


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """Return an error in the format of OpenAI's API."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


def error_answer(
    status: int, message: str, param: str | None = None, headers: dict[str, str] | None = None
) -> JSONResponse:
    """Return an error response."""
    return JSONResponse(error_body(status, message, param), status, headers)


def answer_of(error: BaseException) -> JSONResponse:
    """Return the response for ``error``."""
    if isinstance(error, QueueFullError):
        return error_answer(429, str(error), headers={"Retry-After": str(_RETRY_AFTER_S)})
    if isinstance(error, (ConfigError, OutOfBudgetError)):
        return error_answer(400, str(error))
    if isinstance(error, StateError):
        return error_answer(503, str(error))
    return error_answer(500, in_words(error))


def add_error_answers(app: FastAPI) -> None:
    """Register handlers that answer an exception of an endpoint with one sentence."""

    async def failed(request: Request, error: Exception) -> JSONResponse:
        return answer_of(error)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"] if part != "body")
        return error_answer(400, f"{name or 'the body'}: {first['msg']}", name or None)

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=_CLIENT_GONE)

    app.add_exception_handler(ClientGoneError, gone)
    for kind in (GeminiError, OSError, MemoryError, RuntimeError):
        app.add_exception_handler(kind, failed)
    app.add_exception_handler(RequestValidationError, invalid)


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Await ``work`` and return its result; cancel it if the client disconnects.

    Raises:
        ClientGoneError: the client has disconnected.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await one


async def _disconnected(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
