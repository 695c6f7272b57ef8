"""Case ``engine`` of ``gemini bench inference``: many answers in a pass, and what many requests leave.

Clients are threads in a closed loop: each asks again when it has an answer. Answers are greedy, so their
tokens are those of ``generate()``, and all contenders must give them.
"""

from __future__ import annotations

import dataclasses
import gc
import random
import statistics
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gemini.errors import StateError
from gemini.inference import Engine, Request
from gemini_bench.inference_models import cpu_seconds, opt, resident_bytes, weight_bytes
from gemini_bench.record import Row
from gemini_bench.session import TIMING_SAMPLE_SECONDS, CaseResult, Session

PER_TOKEN = 1 / 8  # time per token of 16 clients, of one client's, where the weights are streamed
OVERHEAD = 0.05  # time outside of passes, of that within
GROWTH_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Settings:
    """An OPT of ``layers`` of ``width``; ``share``: of its weights on DEVICE; ``clients`` ask for ``tokens``,
    ``rounds`` times; ``requests`` in all, a tenth of them cancelled, show what is left."""

    layers: int = 12
    width: int = 512
    vocabulary: int = 2048
    share: float = 1 / 3
    clients: int = 16
    tokens: int = 32
    rounds: int = 3
    requests: int = 1000


QUICK = Settings(layers=2, width=64, vocabulary=128, clients=2, tokens=4, rounds=1, requests=20)


def engine(session: Session) -> CaseResult:
    """Answer one client and many, with the weights streamed and resident; then a thousand requests."""
    settings = QUICK if session.quick else Settings()
    options = {**dataclasses.asdict(settings), "disk_dir": str(session.disk_dir)}
    found: dict[str, dict[str, Any]] = {}
    for kind in ("streamed", "resident", "generate", "left"):
        session.progress(f"engine: {kind}")
        run = session.run("inference.engine", {**options, "kind": kind}, sample_seconds=TIMING_SAMPLE_SECONDS)
        found[kind] = run.data()
    if len({tuple(run["sample"]) for run in found.values() if "sample" in run}) != 1:
        raise StateError("the tokens differ, so nothing is compared")
    return CaseResult(rows_of(found, settings.clients), dataclasses.asdict(settings), found)


def rows_of(found: Mapping[str, Mapping[str, Any]], clients: int) -> list[Row]:
    """Return what many clients have of sharing passes, what that costs, and what is left."""
    streamed, resident, left = found["streamed"], found["resident"], found["left"]
    rows = [
        Row(
            f"streamed: {name} per token, {clients} clients / 1",
            streamed["many"][key] / streamed["one"][key],
            "x",
            goal,
        )
        for name, key, goal in (
            ("seconds", "seconds", PER_TOKEN),
            ("processor time", "cpu_seconds", None),
            ("bytes read", "read_bytes", None),
        )
    ]
    rows += [
        Row(
            f"{kind}: time outside of passes / within, {clients} clients",
            run["many"]["outside"],
            "x",
            OVERHEAD,
        )
        for kind, run in (("streamed", streamed), ("resident", resident))
    ]
    ours, plain = resident["many"]["cpu_seconds"], found["generate"]["cpu_seconds"]
    rows.append(
        Row(f"resident: processor time per token of {clients}, engine / generate()", ours / plain, "x")
    )
    rows.append(Row("streamed: most of weights, keys and values / budget", streamed["peak"], "x", 1.0))
    rows.append(
        Row(f"{left['requests']:,} requests: growth of memory", left["growth_bytes"], "bytes", GROWTH_BYTES)
    )
    rows.append(Row("the same: files opened", left["files"], "", 0))
    rows.append(Row("the same: bytes of keys and values in use", left["kv_bytes"], "bytes", 0))
    return rows


# -- in the worker -------------------------------------------------------------------------------


def measure(options: dict[str, Any]) -> dict[str, Any]:
    """Return what one contender took."""
    torch.set_num_threads(1)
    model = opt(options)
    if options["kind"] == "generate":
        return _generated(model, options)
    directory = Path(options["disk_dir"]) / "model"
    model.save_pretrained(directory)
    weights = weight_bytes(model)
    del model
    kv = 2 * options["layers"] * options["width"] * 4 * 2 * options["clients"] * (options["tokens"] + 16)
    share = options["share"] if options["kind"] == "streamed" else 2.0
    budget = int(share * weights) + kv
    with Engine.from_pretrained(
        directory, device_bytes=budget, kv_bytes=kv, max_batch=options["clients"]
    ) as answering:
        if options["kind"] == "left":
            return _left(answering, options)
        sample = answering.submit(_request(0, options)).result().tokens
        one = _loop(answering, 1, options)
        many = _loop(answering, options["clients"], options)
        stats = answering.stats()
    peak = stats["kv"]["peak_bytes"] + stats["runtime"]["device"]["peak_bytes"]
    return {"sample": list(sample), "one": one, "many": many, "peak": peak / budget}


def _request(client: int, options: Mapping[str, Any], tokens: int | None = None) -> Request:
    chosen = random.Random(client)
    prompt = tuple(chosen.randrange(3, options["vocabulary"]) for _ in range(8))
    return Request(prompt, max_tokens=tokens or options["tokens"], stop_tokens=frozenset())


def _loop(answering: Engine, clients: int, options: Mapping[str, Any]) -> dict[str, float]:
    """Return seconds, processor time and bytes read per token while ``clients`` ask, the medians of rounds,
    and the time outside of passes."""

    def ask(client: int) -> None:
        answering.submit(_request(client, options)).result()

    taken: list[tuple[float, float, float, float]] = []
    for _ in range(options["rounds"] + 1):
        threads = [threading.Thread(target=ask, args=(client,)) for client in range(clients)]
        before = answering.stats()
        seconds, cpu = time.perf_counter(), cpu_seconds()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds, cpu = time.perf_counter() - seconds, cpu_seconds() - cpu
        after = answering.stats()
        tokens = after["tokens"] - before["tokens"]
        read = after["runtime"]["disk_read"]["bytes"] - before["runtime"]["disk_read"]["bytes"]
        within = after["pass_seconds"] - before["pass_seconds"]
        taken.append((seconds / tokens, cpu / tokens, read / tokens, (seconds - within) / within))
    columns = list(zip(*taken[1:], strict=True))  # the first round is planned in
    names = ("seconds", "cpu_seconds", "read_bytes", "outside")
    return {name: statistics.median(column) for name, column in zip(names, columns, strict=True)}


def _generated(model: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return processor time per token of ``generate()`` with the same batch."""
    prompts = torch.tensor([_request(client, options).tokens for client in range(options["clients"])])
    count = {"max_new_tokens": options["tokens"], "min_new_tokens": options["tokens"], "do_sample": False}
    taken: list[float] = []
    for _ in range(options["rounds"] + 1):
        begin = cpu_seconds()
        out = model.generate(prompts, **count)
        taken.append((cpu_seconds() - begin) / (options["tokens"] * options["clients"]))
    return {"sample": out[0, 8:].tolist(), "cpu_seconds": statistics.median(taken[1:])}


def _left(answering: Engine, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is left after many requests, a tenth of them cancelled, of what was there after a tenth."""
    chosen = random.Random(0)
    total, warm = options["requests"], options["requests"] // 10
    begin = (0, 0)
    for first in range(0, total, options["clients"]):
        if begin == (0, 0) and first >= warm:
            begin = _held()
        answers = [
            answering.submit(_request(client, options, tokens=chosen.randint(1, options["tokens"])))
            for client in range(first, min(total, first + options["clients"]))
        ]
        for answer in answers:
            if chosen.random() < 0.1:
                answer.cancel()
        for answer in answers:
            answer.result()
    end = _held()
    return {
        "requests": total,
        "growth_bytes": end[0] - begin[0],
        "files": end[1] - begin[1],
        "kv_bytes": answering.stats()["kv"]["used_bytes"],
    }


def _held() -> tuple[int, int]:
    gc.collect()
    return resident_bytes(), sum(1 for _ in Path("/proc/self/fd").iterdir())
