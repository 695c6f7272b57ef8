"""The HTTP application of a service, and the server that runs it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from gemini.jobs.serve import documents_api, openai_api
from gemini.jobs.serve.limits import BodyLimit, add_error_answers
from gemini.jobs.serve.prometheus import metrics_text
from gemini.jobs.serve.service import Service


def app_of(service: Service) -> FastAPI:
    """Return the application of a service. ``/docs`` describes it."""
    app = FastAPI(title="gemini serve", description=f"Answers of {service.name}.")
    add_error_answers(app)
    app.include_router(openai_api.routes(service))
    app.include_router(documents_api.routes(service))

    @app.get("/health", response_model=None)
    async def health() -> Response:
        """Return 200 if requests can be answered, otherwise 503."""
        status = "ok" if service.is_alive else "draining" if service.is_draining else "the engine has stopped"
        return JSONResponse({"status": status}, 200 if service.is_alive else 503)

    app.add_api_route("/ready", health, methods=["GET"], response_model=None)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> str:
        """Return counts in Prometheus' text format."""
        return metrics_text(service)

    app.add_middleware(BodyLimit, most=service.config.body_bytes)
    return app


class Server(uvicorn.Server):
    """Serves until a signal. Then no new requests begin, and running ones may finish within ``drain_s``
    seconds. ``on_start`` is called with the address when connections are accepted."""

    def __init__(self, service: Service, on_start: Callable[[str], object]) -> None:
        self._service, self._on_start = service, on_start
        config = service.config
        super().__init__(
            uvicorn.Config(
                app_of(service),
                host=config.host,
                port=config.port,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=config.drain_s,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Begin the shutdown at a signal. uvicorn's own method raises the signal again afterwards, so code
        after it would not close anything."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {
            number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: Any = None) -> None:
        """Accept connections, and report the address."""
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._on_start(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    async def on_tick(self, counter: int) -> bool:
        """Return whether to end. Over ranks, also end if the engine has stopped: all ranks must be restarted
        together."""
        ends = self._service.config.tp > 1 and not self._service.engine.is_alive
        return ends or await super().on_tick(counter)

    async def shutdown(self, sockets: Any = None) -> None:
        """Refuse new requests, and let running ones finish."""
        self._service.drain()
        await super().shutdown(sockets)
