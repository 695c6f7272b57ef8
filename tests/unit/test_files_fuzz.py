"""Traces and descriptions of machines, changed at random: whatever is not refused can be worked with."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from mutants import MUTANTS, SEED, mutate

from gemini.cli.main import main
from gemini.errors import CheckpointError, ConfigError
from gemini.forecast.machine import MachineSpeeds
from gemini.memstats import Trace
from gemini.memstats.collectives import CollectiveSpeed, CollectiveSpeeds, Figure
from gemini.memstats.trace import LinkSpeed, digest

TRACE = Trace(
    kind="train",
    accesses=((0,), (0, 1), (1,)),
    modes=("r", "rw", "m"),
    frees=((), (), (1,)),
    seconds=(0.1, 0.2, 0.3),
    non_model_bytes=(10, 20, 30),
    phases=("forward", "backward", "optimizer"),
    chunk_bytes=(4096, 8192),
    chunk_kinds=("param", "grad"),
    links=tuple(LinkSpeed(name, 1e9, 1e-5) for name in ("h2d", "d2h", "disk_read", "disk_write")),
    param_order=("a", "b"),
    chunk_signature="x",
)
COLLECTIVES = CollectiveSpeeds((CollectiveSpeed("all_reduce", 2, Figure(1e-4, "measured"), Figure(1e9)),))
MACHINE = MachineSpeeds(
    "m", {"fp32": 1e12}, 1e10, 1e10, 1e-5, TRACE.links, device_bytes=2**30, collectives=COLLECTIVES
)


def _sealed(fields: dict[str, object]) -> dict[str, object]:
    """Return a document of a trace that has the right checksum and hash."""
    same = {name: value for name, value in fields.items() if name not in ("seconds", "links")}
    return {"format": "gemini-trace-2", "hash": digest(same), "checksum": digest(fields), "trace": fields}


@pytest.mark.parametrize("sealed", [True, False])
def test_a_changed_trace_is_refused_or_simulated(
    tmp_path: Path, sealed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    TRACE.save(path)
    whole, loaded = path.read_text(), 0
    for number in range(MUTANTS // 16):
        chance = random.Random(f"{SEED} trace {number}")
        document = json.loads(whole)
        mutate(document["trace"] if sealed else document, chance)
        path.write_text(json.dumps(_sealed(document["trace"]) if sealed else document))
        try:
            Trace.load(path)
        except CheckpointError:
            continue
        loaded += 1
        assert main(["simulate", str(path), "--device-bytes", "16KiB", "--disk-bytes", "1MiB"]) in (0, 2)
        assert "Traceback" not in capsys.readouterr().err, number
    assert loaded or not sealed


def test_a_changed_machine_is_refused_or_one(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    MACHINE.save(path)
    whole = path.read_text()
    for number in range(MUTANTS // 8):
        document = json.loads(whole)
        mutate(document, random.Random(f"{SEED} machine {number}"))
        path.write_text(json.dumps(document))
        try:
            machine = MachineSpeeds.load(path)
        except ConfigError:
            continue
        machine.save(path)
        assert MachineSpeeds.load(path) == machine
