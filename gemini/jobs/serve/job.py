"""Loads a model, checks that it can answer, and serves it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gemini.comm.ranks import Rank
from gemini.errors import ConfigError
from gemini.inference.engine import Engine
from gemini.inference.ranks import follow
from gemini.inference.request import Request
from gemini.inference.tensor_ranks import TensorRanks
from gemini.integrations.model_directory import tokenizer_of
from gemini.jobs.run.managed import make_disk_directory
from gemini.jobs.serve.config import ServeConfig


def serve(config: ServeConfig, say: Callable[[str], None], rank: Rank | None = None) -> None:
    """Serve until a signal. ``say`` is called with a line at each phase.

    ``rank``: this process among those that have the parts of the model. The first rank serves; the others
    compute with it.

    Raises:
        ConfigError: the model cannot be loaded, or packages are not installed.
        OutOfBudgetError: the model cannot fit the budgets.
        OSError: the address cannot be used.
        StateError: another rank is gone.
    """
    try:
        from gemini.jobs.serve.app import Server
        from gemini.jobs.serve.service import Service
    except ImportError as error:
        raise ConfigError(
            "gemini serve needs the packages fastapi and uvicorn: pip install 'gemini-runtime[serve]' "
            f"({error})"
        ) from error
    if config.disk_dir is not None:
        make_disk_directory(config.disk_dir)
    ranks = TensorRanks(rank) if rank is not None and rank.count > 1 else None
    if ranks is not None and not ranks.is_lead:
        with _ignored_signals():
            follow(ranks, str(config.model), **_loading_options(config))
        return
    tokenizer = tokenizer_of(config.model, config.adapter)
    say(f"loading {config.model}{f', a part of it on each of {ranks.count} ranks' if ranks else ''}")
    with Engine.from_pretrained(
        config.model,
        **_loading_options(config),
        max_pass_tokens=config.max_pass_tokens,
        queue_size=config.queue_size,
        batching=config.batching,
        ranks=ranks,
    ) as engine:
        # The first pass measures the memory of a token, and fails early if the model does not work.
        engine.submit(Request((0,), max_tokens=1)).result()
        service = Service(engine, tokenizer, config)
        Server(
            service, lambda url: say(f"{service.name} answers at {url}; the endpoints are at {url}/docs")
        ).run()
        if ranks is not None:
            engine.refuse_dead()


def _loading_options(config: ServeConfig) -> dict[str, Any]:
    names = ("device", "device_bytes", "host_bytes", "disk_dir", "kv_bytes", "kv_device_bytes", "adapter")
    return {name: getattr(config, name) for name in (*names, "max_batch")}


@contextmanager
def _ignored_signals() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM on this rank. The first rank gets the signal too, and needs this rank until
    its last answer."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
