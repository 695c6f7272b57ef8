"""Case ``kv`` of ``gemini bench inference``: keys and values that do not fit beside the weights."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gemini.errors import StateError
from gemini.inference import Engine, Request
from gemini_bench.inference_models import cpu_seconds, opt, weight_bytes
from gemini_bench.record import Row
from gemini_bench.session import TIMING_SAMPLE_SECONDS, CaseResult, Session


@dataclass(frozen=True)
class Settings:
    """An OPT of ``layers`` of ``width`` writes ``tokens`` behind ``texts`` prompts of ``prompt`` tokens;
    ``share``: of its weights on DEVICE, and of the keys and values."""

    layers: int = 12
    width: int = 512
    vocabulary: int = 2048
    positions: int = 768
    share: float = 1 / 3
    texts: int = 8
    prompt: int = 640
    tokens: int = 40


QUICK = Settings(layers=2, width=64, vocabulary=128, texts=2, prompt=100, tokens=14)
_LEFT_OUT = 10  # tokens until the order is known and planned


def kv(session: Session) -> CaseResult:
    """Write the texts with keys and values on DEVICE, and with most of them on DISK."""
    settings = QUICK if session.quick else Settings()
    options = {**dataclasses.asdict(settings), "disk_dir": str(session.disk_dir)}
    found: dict[str, dict[str, Any]] = {}
    for kind in ("resident", "tiers"):
        session.progress(f"kv: {kind}")
        run = session.run("inference.kv", {**options, "kind": kind}, sample_seconds=TIMING_SAMPLE_SECONDS)
        found[kind] = run.data()
    if found["tiers"]["tokens"] != found["resident"]["tokens"]:
        raise StateError("the tokens differ, so nothing is compared")
    return CaseResult(rows_of(found), dataclasses.asdict(settings), found)


def rows_of(found: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Return what keys and values below DEVICE cost."""
    tiers, resident = found["tiers"], found["resident"]
    below = tiers["weight_bytes"] + tiers["kv_bytes"] - tiers["budget"]
    return [
        Row("weights", tiers["weight_bytes"], "bytes"),
        Row("keys and values, on average", tiers["kv_bytes"], "bytes"),
        Row("most on DEVICE / budget", tiers["peak"] / tiers["budget"], "x", 1.0),
        Row("bytes read by a pass / (weights + keys and values - budget)", tiers["read"] / below, "x"),
        Row("bytes written by a pass / new keys and values", tiers["written"] / tiers["new_bytes"], "x"),
        Row(
            "processor time of a pass, keys and values in tiers / on DEVICE, weights alike",
            tiers["cpu_seconds"] / resident["cpu_seconds"],
            "x",
        ),
    ]


# -- in the worker -------------------------------------------------------------------------------


def measure(options: dict[str, Any]) -> dict[str, Any]:
    """Return what one contender took by pass, once it is planned."""
    torch.set_num_threads(1)
    model = opt(options)
    directory = Path(options["disk_dir"]) / "model"
    model.save_pretrained(directory)
    weights = weight_bytes(model)
    del model
    token = 2 * options["layers"] * options["width"] * 4
    most = token * (options["texts"] + 1) * (options["prompt"] + options["tokens"])
    on_device = int(options["share"] * most) if options["kind"] == "tiers" else most
    budget = int(options["share"] * weights) + on_device
    seen: list[tuple[float, dict[str, Any]]] = []
    with Engine.from_pretrained(
        directory,
        device_bytes=budget,
        kv_bytes=most,
        kv_device_bytes=on_device,
        disk_dir=options["disk_dir"],
        max_batch=options["texts"],
    ) as engine:
        engine.submit(Request((1,), max_tokens=1)).result()

        def note() -> None:
            seen.append((cpu_seconds(), engine.stats()))

        answers = [
            engine.submit(_request(text, options), note if text == options["texts"] - 1 else None)
            for text in range(options["texts"])
        ]
        tokens = [list(answer.result().tokens) for answer in answers]
    (cpu, before), (cpu_end, after) = seen[_LEFT_OUT], seen[options["tokens"] - 2]
    passes = after["passes"] - before["passes"]
    runs = before["runtime"], after["runtime"]
    length = options["prompt"] + (_LEFT_OUT + options["tokens"]) // 2
    return {
        "tokens": tokens,
        "weight_bytes": weights,
        "budget": budget,
        "peak": after["runtime"]["device"]["peak_bytes"]
        + (after["kv"]["peak_bytes"] if options["kind"] == "resident" else 0),
        "kv_bytes": token * options["texts"] * length,
        "new_bytes": token * options["texts"],
        "read": (runs[1]["disk_read"]["bytes"] - runs[0]["disk_read"]["bytes"]) / passes,
        "written": (runs[1]["disk_write"]["bytes"] - runs[0]["disk_write"]["bytes"]) / passes,
        "cpu_seconds": (cpu_end - cpu) / passes,
    }


def _request(text: int, options: Mapping[str, Any]) -> Request:
    chosen = random.Random(text)
    prompt = tuple(chosen.randrange(3, options["vocabulary"]) for _ in range(options["prompt"]))
    return Request(prompt, max_tokens=options["tokens"], stop_tokens=frozenset())
