"""Case ``loss``: a head and its loss by tiles of rows, against torch's linear layer and cross entropy.

Each contender runs once in a process of its own, on one thread: processor time of forward and backward, and
the most memory that they take beside their operands, by the kernel's high-water mark.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import gemini
from gemini.memstats.monitor import ProcessMonitor
from gemini_bench.paired import Spread, spread_row
from gemini_bench.record import Row
from gemini_bench.session import TIMING_SAMPLE_SECONDS, CaseResult, Session

LARGEST_ERROR = 1e-6  # of gradients, relative
LARGEST_PEAK = 1 / 20  # of the plain loss
LONGEST_TIME = 1.05
_Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
_PAGE_BYTES = 4096
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Settings:
    """``shapes`` by name: rows, entries, features, dtype; the first has the targets."""

    shapes: Mapping[str, tuple[int, int, int, str]]
    runs: int = 3


FULL = Settings(
    {
        "4k x 50k": (4096, 50_000, 256, "fp32"),
        "2k x 50k, wide": (2048, 50_000, 768, "fp32"),
        "1k x 32k, bf16": (1024, 32_000, 512, "bf16"),
    }
)
QUICK = Settings({"tiny": (64, 500, 16, "fp32")}, runs=1)


def run(session: Session) -> CaseResult:
    """Measure every shape; then compare gradients."""
    settings = QUICK if session.quick else FULL
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    errors: dict[str, dict[str, float]] = {}
    for name, shape in settings.shapes.items():
        found[name] = {contender: [] for contender in contenders()}
        for number in range(settings.runs):
            for contender, runs in found[name].items():
                session.progress(f"loss: {name}, {contender}, run {number + 1} of {settings.runs}")
                request = {"contender": contender, "shape": shape}
                done = session.run("loss.measure", request, sample_seconds=TIMING_SAMPLE_SECONDS)
                runs.append(done.data())
        errors[name] = session.run("loss.compare", {"shape": shape}).data()
    return CaseResult(rows(found, errors), dataclasses.asdict(settings), {"runs": found, "errors": errors})


def rows(
    found: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]], errors: Mapping[str, Mapping[str, float]]
) -> list[Row]:
    """Return what each took, and what the tiles take of the plain loss; targets are of the first shape."""
    table: list[Row] = []
    for place, (name, runs) in enumerate(found.items()):
        for contender, each in runs.items():
            seconds = Spread.of([one["cpu_seconds"] for one in each])
            table.append(spread_row(f"{name}: processor time, {contender}", seconds, "s"))
            peak = statistics.median(one["peak_bytes"] for one in each)
            table.append(Row(f"{name}: peak memory, {contender}", peak / 2**20, "MiB"))
        for what, key, target in (
            ("peak memory", "peak_bytes", LARGEST_PEAK),
            ("processor time", "cpu_seconds", LONGEST_TIME),
        ):
            ratios = [one[key] / other[key] for one, other in zip(runs["tiled"], runs["plain"], strict=True)]
            goal = target if place == 0 else None
            table.append(spread_row(f"{name}: {what}, tiled / plain", Spread.of(ratios), "x", goal))
        worst = max(value for what, value in errors[name].items() if what != "loss")
        goal = LARGEST_ERROR if place == 0 else None
        table.append(Row(f"{name}: gradients, difference from the plain ones", worst, "relative", goal))
    return table


# -- in the worker -------------------------------------------------------------------------------


def contenders() -> dict[str, _Loss]:
    """Return what computes the loss, by name; torch's own tiles where this torch has them."""
    found: dict[str, _Loss] = {"plain": _plain, "tiled": gemini.tiled_cross_entropy}
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if options is not None:

        def of_torch(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            found: Tensor = functional.linear_cross_entropy(hidden, weight, labels, options=options())
            return found

        found["torch's own tiles"] = of_torch
    return found


def _plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(hidden, weight).float(), labels)


def _operands(shape: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, entries, features, dtype = shape
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_rows, features, generator=draw).to(_DTYPES[dtype])
    weight = torch.randn(entries, features, generator=draw).mul_(0.02).to(_DTYPES[dtype])
    labels = torch.randint(entries, (num_rows,), generator=draw)
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def measure(options: dict[str, Any]) -> dict[str, float]:
    """Return the processor time and the peak of one contender, its gradients included."""
    torch.set_num_threads(1)
    loss = contenders()[options["contender"]]
    num_rows, entries, features, dtype = options["shape"]
    loss(*_operands((8, 64, features, dtype))).backward()  # what is loaded at the first use
    operands = _operands((num_rows, entries, features, dtype))
    monitor = ProcessMonitor()
    before = monitor.resident_bytes()
    monitor.start_period()
    begin = time.process_time()
    value = loss(*operands)
    value.backward()
    seconds = time.process_time() - begin
    peak = max(monitor.end_period() - before, _PAGE_BYTES)  # small arrays lie in pages that were there
    monitor.close()
    return {"cpu_seconds": seconds, "peak_bytes": peak, "loss": value.item()}


def compare(options: dict[str, Any]) -> dict[str, float]:
    """Return how far the tiled loss and its gradients are from the plain ones."""
    torch.set_num_threads(1)
    hidden, weight, labels = _operands(options["shape"])
    results = []
    for loss in (_plain, gemini.tiled_cross_entropy):
        value = loss(hidden, weight, labels)
        results.append((value.detach(), *torch.autograd.grad(value, (hidden, weight))))
    names = ("loss", "hidden", "weight")
    return {
        name: ((got.float() - want.float()).norm() / want.float().norm()).item()
        for name, want, got in zip(names, *results, strict=True)
    }


TASKS = {"measure": measure, "compare": compare}
