"""Load a model, make sure that it answers, and serve it."""

from __future__ import annotations

from collections.abc import Callable

from gemini.errors import ConfigError
from gemini.inference.engine import Engine
from gemini.inference.request import Request
from gemini.integrations.model_directory import tokenizer_of
from gemini.jobs.run.managed import make_disk_directory
from gemini.jobs.serve.config import ServeConfig


def serve(config: ServeConfig, say: Callable[[str], None]) -> None:
    """Serve until a signal. ``say`` gets a line when something begins.

    Raises:
        ConfigError: the model cannot be loaded, or packages are not installed.
        OutOfBudgetError: the model cannot fit the budgets.
        OSError: nobody may listen at the address.
    """
    try:
        from gemini.jobs.serve.app import Server
        from gemini.jobs.serve.service import Service
    except ImportError as error:
        raise ConfigError(
            "gemini serve needs the packages fastapi and uvicorn: pip install 'gemini-runtime[serve]' "
            f"({error})"
        ) from error
    tokenizer = tokenizer_of(config.model, config.adapter)
    if config.disk_dir is not None:
        make_disk_directory(config.disk_dir)
    say(f"loading {config.model}")
    with Engine.from_pretrained(
        config.model,
        device=config.device,
        device_bytes=config.device_bytes,
        host_bytes=config.host_bytes,
        disk_dir=config.disk_dir,
        kv_bytes=config.kv_bytes,
        kv_device_bytes=config.kv_device_bytes,
        adapter=config.adapter,
        max_batch=config.max_batch,
        max_pass_tokens=config.max_pass_tokens,
        queue_size=config.queue_size,
        batching=config.batching,
    ) as engine:
        # The first pass measures what a token takes, and finds what is wrong with the model.
        engine.submit(Request((0,), max_tokens=1)).result()
        service = Service(engine, tokenizer, config)
        Server(
            service, lambda url: say(f"{service.name} answers at {url}; the endpoints are at {url}/docs")
        ).run()
