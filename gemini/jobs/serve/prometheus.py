"""Formats the counters of the service for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gemini.jobs.serve.service import Service


def metrics_text(service: Service) -> str:
    """Return all metrics as text."""
    return "".join(_lines(service))


def _lines(service: Service) -> Iterator[str]:
    stats = service.engine.stats()
    outcomes = {f'{{outcome="{name}"}}': count for name, count in sorted(stats["requests"].items())}
    yield from _metric("requests_total", "counter", "requests by outcome", outcomes)
    yield from _one("requests_waiting", "gauge", "requests that wait to start", stats["waiting"])
    yield from _one("requests_running", "gauge", "requests that share the next pass", stats["running"])
    yield from _one("passes_total", "counter", "forward passes", stats["passes"])
    yield from _one("pass_seconds_total", "counter", "seconds in forward passes", stats["pass_seconds"])
    yield from _one("prompt_tokens_total", "counter", "prompt tokens computed", stats["prompt_tokens"])
    yield from _one("tokens_total", "counter", "tokens generated", stats["tokens"])
    yield from _one("first_tokens_total", "counter", "answers started", service.first_tokens)
    yield from _one(
        "first_token_seconds_total", "counter", "seconds until an answer started", service.first_token_seconds
    )
    yield from _one("cache_hits_total", "counter", "queries answered from the cache", service.cache.hits)
    yield from _one("cache_misses_total", "counter", "queries not found in the cache", service.cache.misses)
    for name, value in stats["kv"].items():
        yield from _one(f"kv_{name}", "gauge", "keys and values", value)
    runtime: dict[str, Any] | None = stats["runtime"]
    if runtime is not None:
        yield from _one("device_bytes", "gauge", "weights on DEVICE", runtime["device"]["bytes"])
        yield from _one(
            "device_peak_bytes", "gauge", "peak of weights on DEVICE", runtime["device"]["peak_bytes"]
        )
        yield from _one(
            "device_budget_bytes", "gauge", "DEVICE budget of weights", runtime["device"]["budget_bytes"]
        )
        yield from _one("disk_read_bytes_total", "counter", "read from disk", runtime["disk_read"]["bytes"])
        yield from _one(
            "stall_seconds_total", "counter", "seconds of waiting for weights", runtime["stall_seconds"]
        )


def _one(name: str, kind: str, text: str, value: float) -> Iterator[str]:
    yield from _metric(name, kind, text, {"": value})


def _metric(name: str, kind: str, text: str, values: dict[str, float]) -> Iterator[str]:
    yield f"# HELP gemini_{name} {text}\n# TYPE gemini_{name} {kind}\n"
    for labels, value in values.items():
        yield f"gemini_{name}{labels} {value}\n"
