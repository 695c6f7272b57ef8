"""``gemini bench inference``: bytes and time of answers with weights below DEVICE, beside other programs."""

from __future__ import annotations

import dataclasses
import importlib
import os
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gemini
from gemini.errors import StateError
from gemini_bench.cases import choose, run_cases
from gemini_bench.inference_engine import engine
from gemini_bench.inference_engine import measure as measure_engine
from gemini_bench.inference_experts import experts
from gemini_bench.inference_experts import measure as measure_experts
from gemini_bench.inference_kv import kv
from gemini_bench.inference_kv import measure as measure_kv
from gemini_bench.inference_llama import llama, make_files, measure_ours, measure_peer
from gemini_bench.inference_models import cpu_seconds, opt, resident_bytes, weight_bytes
from gemini_bench.paired import Spread, spread_row
from gemini_bench.record import Row
from gemini_bench.session import TIMING_SAMPLE_SECONDS, CaseResult, Session

READ = 1.05  # bytes a pass reads, of what is not kept
CPU = {1: 0.15, 32: 0.12}  # processor time beyond the resident step, of accelerate's beyond it, by batch
BESIDE_BYTES = 16 * 2**20
FIRST_TOKEN = 1.2
_LEFT_OUT = 8  # passes until the order is known, its times are final and it is planned


@dataclass(frozen=True)
class Settings:
    """An OPT of ``layers`` of ``width``; ``share``: of its weights on DEVICE; ``passes`` that count."""

    layers: int = 12
    width: int = 512
    vocabulary: int = 2048
    share: float = 1 / 3
    passes: int = 16
    batches: tuple[int, ...] = (1, 32)


QUICK = Settings(layers=2, width=64, vocabulary=128, passes=2, batches=(1,))
_OURS = {"manage": "manage()", "ddp": "GeminiDDP(model).module"}


def decode(session: Session) -> CaseResult:
    """Generate with the weights resident, managed and offloaded by accelerate, each in a process of its
    own."""
    settings = QUICK if session.quick else Settings()
    found: dict[str, dict[str, Any]] = {}
    for batch in settings.batches:
        for kind in ("resident", *_OURS, "accelerate"):
            session.progress(f"decode: {kind}, batch {batch}")
            options = {**_options(settings, session), "kind": kind, "batch": batch}
            run = session.run("inference.decode", options, sample_seconds=TIMING_SAMPLE_SECONDS)
            found[f"{kind} {batch}"] = run.data()
    if len({str(each["tokens"]) for key, each in found.items() if key.endswith(" 1")}) != 1:
        raise StateError("the tokens differ, so nothing is compared")
    return CaseResult(decode_rows(found, settings.batches), dataclasses.asdict(settings), found)


def decode_rows(found: Mapping[str, Mapping[str, Any]], batches: Sequence[int]) -> list[Row]:
    """Return bytes by pass, and processor time by batch."""
    rows: list[Row] = []
    resident_run = found["resident 1"]
    own_bytes = resident_run["beside_bytes"] - resident_run["weight_bytes"]  # of torch, for answering
    for kind, name in _OURS.items():
        run = found[f"{kind} 1"]
        floor = run["weight_bytes"] - run["device_bytes"]
        read = Spread.of([nbytes / floor for nbytes in run["read_bytes"]])
        rows.append(spread_row(f"{name}: bytes read by a pass / (weights - budget)", read, "x", READ))
        rows.append(Row(f"{name}: memory beside the budget", run["beside_bytes"], "bytes"))
        added = f"{name}: of it, more than a resident model takes beside its weights"
        rows.append(Row(added, run["beside_bytes"] - own_bytes, "bytes", BESIDE_BYTES))
    for batch in batches:
        resident = statistics.median(found[f"resident {batch}"]["cpu_seconds"])
        beyond = {
            kind: statistics.median(found[f"{kind} {batch}"]["cpu_seconds"]) - resident
            for kind in (*_OURS, "accelerate")
        }
        rows.append(Row(f"batch {batch}: processor time, resident", resident, "s"))
        rows += [Row(f"batch {batch}: beyond it, {kind}", value, "s") for kind, value in beyond.items()]
        what = f"batch {batch}: beyond the resident pass, manage() / accelerate"
        rows.append(Row(what, beyond["manage"] / beyond["accelerate"], "x", CPU.get(batch)))
    return rows


def checkpoint(session: Session) -> CaseResult:
    """Answer from a checkpoint that is the DISK tier: what is read until the first token, and written."""
    settings = QUICK if session.quick else Settings()
    session.progress("checkpoint: the first token")
    found = session.run("inference.checkpoint", _options(settings, session)).data()
    rows = [
        Row(
            "bytes read until the first token / weights",
            found["first"] / found["weight_bytes"],
            "x",
            FIRST_TOKEN,
        ),
        Row("bytes read while it is loaded", found["loading"], "bytes"),
        Row("bytes written", found["written"], "bytes", 0),
        Row("seconds to load", found["seconds"], "s"),
    ]
    return CaseResult(rows, dataclasses.asdict(settings), found)


CASES: Mapping[str, Callable[[Session], CaseResult]] = {
    "decode": decode,
    "checkpoint": checkpoint,
    "experts": experts,
    "engine": engine,
    "kv": kv,
    "llama": llama,
}


def chosen(names: Sequence[str] | None) -> list[str]:
    """Return the cases to run, in the table's order; None is all. Raise ConfigError for an unknown name."""
    return choose(CASES, names)


def run(session: Session, names: Sequence[str], command: Sequence[str]) -> dict[str, Any]:
    """Run the named cases and return one plain dict; a case that fails leaves its error, the others go on."""
    return run_cases("inference", session, {name: CASES[name] for name in names}, command)


def _options(settings: Settings, session: Session) -> dict[str, Any]:
    return {**dataclasses.asdict(settings), "disk_dir": str(session.disk_dir)}


# -- in the worker -------------------------------------------------------------------------------


class Passes:
    """What each pass took: processor seconds, bytes read, and what else ``count`` counts, where ``read`` says
    how many bytes there were. ``before`` is called before each pass."""

    def __init__(
        self,
        read: Callable[[], int],
        count: Callable[[], int] = lambda: 0,
        *,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self.cpu_seconds: list[float] = []
        self.read_bytes: list[int] = []
        self.others: list[int] = []
        self._read, self._count, self._prepare = read, count, before
        self._since = (cpu_seconds(), read(), count())

    def __call__(self, _ids: Tensor, scores: Tensor) -> Tensor:
        now = cpu_seconds(), self._read(), self._count()
        self.cpu_seconds.append(now[0] - self._since[0])
        self.read_bytes.append(now[1] - self._since[1])
        self.others.append(now[2] - self._since[2])
        self._prepare()
        self._since = (cpu_seconds(), self._read(), self._count())
        return scores


def _generate(model: Any, batch: int, passes: int, *listeners: Any) -> list[int]:
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(2, model.config.vocab_size, (batch, 8), generator=generator)
    processors = importlib.import_module("transformers").LogitsProcessorList(listeners)
    count = {"max_new_tokens": passes, "min_new_tokens": passes, "do_sample": False}
    out: Tensor = model.generate(prompt, logits_processor=processors, **count)
    return out[0].tolist()


def measure_decode(options: dict[str, Any]) -> dict[str, Any]:
    """Return what passes of ``options["kind"]`` took, and the tokens."""
    torch.set_num_threads(1)
    model = opt(options)
    weights = weight_bytes(model)
    budget = int(options["share"] * weights)
    before = resident_bytes() - weights
    folder = Path(options["disk_dir"]) / "offloaded"
    handle: Any = None
    drop: Callable[[], None] = _nothing
    if options["kind"] == "manage":
        handle = gemini.manage(model, device_bytes=budget, disk_dir=options["disk_dir"])
    elif options["kind"] == "ddp":
        handle = gemini.GeminiDDP(model, device_bytes=budget, disk_dir=options["disk_dir"])
    elif options["kind"] == "accelerate":
        importlib.import_module("accelerate").disk_offload(model, str(folder), execution_device="cpu")
        drop = partial(_drop_from_cache, folder)
    took = Passes(partial(read_bytes, handle), before=drop)
    tokens = _generate(model, options["batch"], _LEFT_OUT + options["passes"], took)
    held = 0 if handle is None else handle.stats()["device"]["bytes"]
    beside = resident_bytes() - before - held
    if handle is not None:
        handle.close()
    shutil.rmtree(folder, ignore_errors=True)
    return {
        "tokens": tokens,
        "weight_bytes": weights,
        "device_bytes": budget,
        "beside_bytes": beside,
        "cpu_seconds": took.cpu_seconds[_LEFT_OUT:],
        "read_bytes": took.read_bytes[_LEFT_OUT:],
    }


def _nothing() -> None:
    """Do nothing."""


def read_bytes(handle: Any) -> int:
    """Return what was read from the disk so far; 0 where nobody manages the model."""
    return 0 if handle is None else int(handle.stats()["disk_read"]["bytes"])


def _drop_from_cache(folder: Path) -> None:
    """Have the next pass read the files from the disk, as ours does."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def measure_checkpoint(options: dict[str, Any]) -> dict[str, Any]:
    """Return what a model with its weights in a checkpoint reads and writes until its first token.

    Raises:
        StateError: its tokens are not those of the model that was saved.
    """
    torch.set_num_threads(1)
    model = opt(options)
    directory = Path(options["disk_dir"]) / "model"
    model.save_pretrained(directory)
    want = _generate(model, 1, 2)
    budget = int(options["share"] * weight_bytes(model))
    begin = cpu_seconds()
    answering = gemini.from_pretrained(directory, trains=False, device_bytes=budget).eval()
    seconds = cpu_seconds() - begin
    handle = gemini.handle_of(answering)
    loading = read_bytes(handle)
    took = Passes(partial(read_bytes, handle))
    if _generate(answering, 1, 2, took) != want:
        raise StateError("the tokens are not those of the model that was saved")
    written = handle.stats()["disk_write"]["bytes"]
    handle.close()
    return {
        "weight_bytes": weight_bytes(model),
        "first": loading + took.read_bytes[0],
        "loading": loading,
        "written": written,
        "seconds": seconds,
    }


TASKS = {
    "decode": measure_decode,
    "checkpoint": measure_checkpoint,
    "experts": measure_experts,
    "engine": measure_engine,
    "kv": measure_kv,
    "llama_files": make_files,
    "llama_ours": measure_ours,
    "llama_peer": measure_peer,
}
