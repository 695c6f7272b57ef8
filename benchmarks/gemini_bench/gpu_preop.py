"""Case ``preop``: the host's time for one PreOp if DEVICE is a GPU and everything is on it."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from gemini.model.ddp import GeminiDDP
from gemini_bench.gpu_device import open_bench_device
from gemini_bench.paired import Spread, spread_row
from gemini_bench.preop import OPERATORS, QUICK, ROOM, Settings, time_operators
from gemini_bench.record import Row
from gemini_bench.session import TIMING_SAMPLE_SECONDS, CaseResult, Session

TARGET_US = 10.0


def run(session: Session, device: str) -> CaseResult:
    """Time operators of a resident and of a traced model, each in its own process."""
    settings = dataclasses.asdict(QUICK if session.quick else Settings())
    measured: dict[str, Any] = {"operators": OPERATORS}
    table: list[Row] = []
    for path in ("resident", "traced"):
        session.progress(f"preop: operators, {path}")
        options = {**settings, "path": path, "device": device}
        found = session.run("gpu_preop.operators", options, sample_seconds=TIMING_SAMPLE_SECONDS).data()
        measured[path] = found
        table.extend(rows(path, found))
    return CaseResult(table, settings, measured)


def rows(path: str, found: dict[str, Any]) -> list[Row]:
    """Return the time that managed operators add to plain ones, pair by pair."""
    layers, preops = found["layers"], found["preops_per_operator"]
    plain, managed = found["plain"], found["managed"]
    forward = [1e6 * seconds / layers for seconds in plain["forward"]]
    beyond = {
        part: [
            1e6 * (mine - theirs) / layers for mine, theirs in zip(managed[part], plain[part], strict=True)
        ]
        for part in ("forward", "both")
    }
    per_preop = [each / preops for each in beyond["both"]]
    return [
        spread_row(f"{path}: plain forward, per operator", Spread.of(forward), "us"),
        spread_row(
            f"{path}: forward, managed less plain, per operator",
            Spread.of(beyond["forward"]),
            "us",
            TARGET_US if path == "resident" else None,
        ),
        Row(f"{path}: PreOps per operator, gradients included", preops, "PreOps"),
        spread_row(
            f"{path}: forward and backward, managed less plain, per PreOp",
            Spread.of(per_preop),
            "us",
            TARGET_US,
        ),
    ]


def operators(options: dict[str, Any]) -> dict[str, Any]:
    """Time operators as :func:`gemini_bench.preop.time_operators`, on the device that ``options`` name."""
    options = dict(options)
    device, path = open_bench_device(options.pop("device")), options.pop("path")

    def manage(module: nn.Module) -> GeminiDDP:
        return device.wrap(module, **ROOM)

    compute = device.compute
    return time_operators(Settings(**options), path, manage, compute.torch_device, compute.synchronize)


TASKS = {"operators": operators}
