"""Case ``load``: a checkpoint of 2 GB in four files is loaded under 300 MiB of memory.

Weights stay in the files until they are used. So the time of a load that is judged includes the first use of
every weight, which reads it; beside it stands what that cannot do without, reading the files.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import gemini
from gemini.system.config import parse_bytes
from gemini_bench.cases import require_space
from gemini_bench.nvme_bare import leave_page_cache
from gemini_bench.paired import Spread, in_turn, spread_row
from gemini_bench.peaks import PhasePeaks, memory_of
from gemini_bench.programs_model import LlamaSizes, require_packages
from gemini_bench.record import Row
from gemini_bench.session import CaseResult, Session

OF_READING = 1.3
EXTRA_MB = 60.0
READ, LOAD, USE = "reading", "loading", "loading and the first use of every weight"
_MIB = 2**20
_PIECE = 16 * _MIB


@dataclass(frozen=True)
class Settings(LlamaSizes):
    """A LLaMA-like model in bf16, in files of at most ``shard``, loaded ``turns`` times."""

    hidden: int = 2048
    intermediate: int = 5632
    layers: int = 17
    heads: int = 16
    vocab: int = 32_000
    shard: str = "520MB"
    device_bytes: str = "300MiB"
    turns: int = 4


QUICK = Settings(
    hidden=64, intermediate=128, layers=4, heads=4, vocab=96, shard="100KB", device_bytes="256KiB", turns=1
)


def run(session: Session) -> CaseResult:
    """Write the checkpoint in one process and load it in another.

    Raises:
        ConfigError: transformers is missing, or the disk is too small.
    """
    settings = QUICK if session.quick else Settings()
    require_packages("load", "transformers")
    # The files, and the DISK tier.
    require_space("load", 4 * settings.num_parameters, session.disk_dir, "name another --disk-dir")
    options = {**dataclasses.asdict(settings), "place": os.fspath(session.disk_dir)}
    session.progress(f"load: writing a model of {settings.num_parameters:,} parameters")
    session.run("programs_load.make", options, sample_seconds=0.1).data()
    session.progress("load: reading and loading, in turns")
    # The case has a watch of its own, phase by phase.
    found = session.run("programs_load.measure", options, sample_seconds=0.1).data()
    return CaseResult(rows(settings, found), dataclasses.asdict(settings), found)


def rows(settings: Settings, found: Mapping[str, Any]) -> list[Row]:
    """Return the times, their ratios turn by turn, and the memory beyond the budget."""
    seconds: Mapping[str, list[float]] = found["seconds"]
    budget = parse_bytes(settings.device_bytes, name="device_bytes") or 0
    beyond = (found["grown_bytes"] - budget - found["largest_tensor_bytes"]) / 1e6

    def ratio(what: str, other: str) -> Spread:
        return Spread.of([a / b for a, b in zip(seconds[what], seconds[other], strict=True)])

    return [
        Row("parameters", settings.num_parameters, ""),
        Row("files", found["files"], ""),
        Row("bytes of the files", found["file_bytes"], "bytes"),
        Row("written to DISK by a load", found["spilled_bytes"], "bytes"),
        *(spread_row(what, Spread.of(each), "s") for what, each in seconds.items()),
        spread_row(f"{LOAD} / {READ}", ratio(LOAD, READ), "x"),
        spread_row(f"{USE} / {READ}", ratio(USE, READ), "x", OF_READING),
        Row("memory beyond the budget and the largest tensor", beyond, "MB", EXTRA_MB),
    ]


# -- in the worker -------------------------------------------------------------------------------


def make(options: dict[str, Any]) -> dict[str, Any]:
    """Save a model of random weights below ``options["place"]``."""
    import transformers

    settings = _settings(options)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(settings.config(), dtype=torch.bfloat16)
    model.save_pretrained(_source(options), max_shard_size=settings.shard)
    for path in _files(options):  # on the disk, or leaving the page cache would be writing
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return {"parameters": sum(param.numel() for param in model.parameters())}


def measure(options: dict[str, Any]) -> dict[str, Any]:
    """Read, and load, in turns that rotate, the files dropped from the page cache before each."""
    import transformers

    importlib.import_module("transformers.models.llama.modeling_llama")  # else the first load's
    settings, files = _settings(options), _files(options)
    torch.set_num_threads(1)
    place = Path(options["place"])
    seconds: dict[str, list[float]] = {READ: [], LOAD: [], USE: []}
    spilled, largest, before = 0, 0, memory_of()[1]
    peaks = PhasePeaks()

    def read() -> None:
        begin = time.perf_counter()
        _read(files)
        seconds[READ].append(time.perf_counter() - begin)

    def load() -> None:
        nonlocal spilled, largest
        begin = time.perf_counter()
        model = gemini.from_pretrained(
            _source(options),
            transformers.AutoModelForCausalLM,
            device_bytes=settings.device_bytes,
            disk_dir=place,
            non_model_bytes=0,
        )
        handle = gemini.handle_of(model)
        handle.manager.chunks.drain()
        seconds[LOAD].append(time.perf_counter() - begin)
        for slot in handle.storage.slots.values():
            with handle.manager.operator(slot.param_ref.tensors):
                pass  # the weight is in memory
        seconds[USE].append(time.perf_counter() - begin)
        spilled = int(handle.stats()["disk_write"]["bytes"])
        largest = max(param.numel() * param.element_size() for param in model.parameters())
        handle.close()

    with peaks:
        load()  # its time does not count
        peaks.end("first")
        for each in (LOAD, USE):
            seconds[each].clear()
        runs: Mapping[str, Callable[[], None]] = {READ: read, LOAD: load}
        for turn in range(settings.turns):
            for what in in_turn(list(runs), turn):
                for path in files:
                    leave_page_cache(path)
                runs[what]()
                peaks.end(what)
    return {
        "seconds": seconds,
        "files": len(files),
        "file_bytes": sum(path.stat().st_size for path in files),
        "spilled_bytes": spilled,
        "largest_tensor_bytes": largest,
        "grown_bytes": peaks.unmapped["first"] - before,
        "grown_later_bytes": peaks.unmapped[LOAD] - before,
    }


def _settings(options: Mapping[str, Any]) -> Settings:
    return Settings(**{each.name: options[each.name] for each in dataclasses.fields(Settings)})


def _source(options: Mapping[str, Any]) -> Path:
    return Path(options["place"]) / "model"


def _files(options: Mapping[str, Any]) -> list[Path]:
    return sorted(_source(options).glob("*.safetensors"))


def _read(files: list[Path]) -> None:
    piece = memoryview(bytearray(_PIECE))
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(piece):
                pass


TASKS = {"make": make, "measure": measure}
