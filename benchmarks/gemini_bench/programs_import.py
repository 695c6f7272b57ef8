"""Case ``import``: the time of ``import gemini`` after torch, and the modules that it must not load."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gemini_bench.paired import Spread, in_turn, spread_row
from gemini_bench.record import Row
from gemini_bench.session import CaseResult, Session, WorkerFailed
from gemini_bench.watch import Ending, run_watched

IMPORT_SECONDS = 0.3
_KINDS = ("without", "with")

# Each takes a noticeable part of a second or of a small machine's memory, and only some programs need it.
HEAVY = (
    *("transformers", "accelerate", "peft", "trl", "lightning", "timm", "datasets", "tokenizers"),
    *("safetensors", "huggingface_hub", "deepspeed", "rich", "scipy", "matplotlib", "pandas", "tensorboard"),
    *("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.pipelining"),
    *("torch._inductor", "torch.utils.tensorboard", "torchvision", "triton"),
    *("gemini.integrations", "gemini.parallel", "gemini.cli"),
)

# Bytecode is written whatever the environment says: the cache is a directory of this case's own.
_PROGRAM = """\
import sys
sys.dont_write_bytecode = False
import importlib, json, time
first, then = sys.argv[1], sys.argv[2]
begin = time.perf_counter()
importlib.import_module(first)
middle, before = time.perf_counter(), set(sys.modules)
if then:
    importlib.import_module(then)
end = time.perf_counter()
added = sorted(set(sys.modules) - before)
json.dump({"first": middle - begin, "then": end - middle, "added": added}, sys.stdout)
"""


@dataclass(frozen=True)
class Settings:
    """``package`` is imported after ``first``; ``pairs`` of processes count, with it and without."""

    first: str = "torch"
    package: str = "gemini"
    pairs: int = 15
    heavy: tuple[str, ...] = HEAVY


QUICK = Settings(pairs=1)


def run(session: Session) -> CaseResult:
    """Import in fresh processes, in turns with and without the package; compare neighbours."""
    return measure(session, QUICK if session.quick else Settings())


def measure(session: Session, settings: Settings) -> CaseResult:
    """Measure with these ``settings``. Raises WorkerFailed if an import fails."""
    environ = {**os.environ, "PYTHONPYCACHEPREFIX": os.fspath(session.disk_dir / "bytecode")}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    readings: dict[str, list[dict[str, Any]]] = {kind: [] for kind in _KINDS}
    for number in range(1 + settings.pairs):  # the first fills the caches, of bytecode and of files
        session.progress(f"import: pair {number} of {settings.pairs}" if number else "import: filling caches")
        for kind in in_turn(_KINDS, number):
            found = _import(settings, kind, environ)
            if number:
                readings[kind].append(found)
    installed = [name for name in settings.heavy if _is_installed(name)]
    loaded = loaded_of(installed, [name for one in readings["with"] for name in one["added"]])
    measured = {"readings": _without_names(readings), "installed": installed, "loaded": loaded}
    measured["added"] = readings["with"][0]["added"]
    return CaseResult(_rows(settings, readings, installed, loaded), dataclasses.asdict(settings), measured)


def _rows(
    settings: Settings,
    readings: Mapping[str, Sequence[Mapping[str, Any]]],
    installed: Sequence[str],
    loaded: Sequence[str],
) -> list[Row]:
    alone, both = readings["without"], readings["with"]
    pairs = [mine["seconds"] - other["seconds"] for mine, other in zip(both, alone, strict=True)]
    what = f"import {settings.package}"
    named = f": {', '.join(loaded)}" if loaded else ""
    return [
        spread_row(f"import {settings.first}", Spread.of([one["first"] for one in alone]), "s"),
        spread_row(
            f"{what} after it, in the process", Spread.of([one["then"] for one in both]), "s", IMPORT_SECONDS
        ),
        spread_row(f"{what}: a whole process with it less its neighbour without", Spread.of(pairs), "s"),
        Row(f"{what}: modules that it adds", len(both[0]["added"]), "modules"),
        Row(f"{what}: loaded of {len(installed)} large packages{named}", len(loaded), "packages", 0),
    ]


def _import(settings: Settings, kind: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Import in a fresh process; return its seconds by its own clock and from outside, and the modules it
    added.
    """
    then = settings.package if kind == "with" else ""
    command = [sys.executable, "-c", _PROGRAM, settings.first, then]
    done = run_watched(command, sample_seconds=0.01, environ=environ)
    if done.ending is not Ending.FINISHED:
        raise WorkerFailed(f"cannot import {settings.first} {then} in a fresh process:\n{done.error_tail}")
    return {**json.loads(done.output), "seconds": done.seconds}


def loaded_of(heavy: Sequence[str], modules: Sequence[str]) -> list[str]:
    """Return which of ``heavy`` are among ``modules``, or have a part there."""
    return [name for name in heavy if any(one == name or one.startswith(f"{name}.") for one in modules)]


def _is_installed(name: str) -> bool:
    """Say whether a package could be loaded at all; nothing but its parent is imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


def _without_names(readings: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    return {
        kind: [{key: value for key, value in one.items() if key != "added"} for one in found]
        for kind, found in readings.items()
    }
