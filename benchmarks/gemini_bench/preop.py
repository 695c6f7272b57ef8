"""Case ``preop``: the cost of one PreOp, in the core and around a real operator, all on DEVICE."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gemini import _C
from gemini.chunk.cpu_memory import CPU
from gemini.errors import StateError
from gemini.model.ddp import GeminiDDP
from gemini.optim import GeminiOptimizer, HybridAdam
from gemini_bench.record import Row
from gemini_bench.session import TIMING_SAMPLE_SECONDS, CaseResult, Session

CORE_TARGET_US = 2.0
INTERCEPTED_TARGET_US = 10.0
ROOM: Mapping[str, Any] = MappingProxyType({"device_bytes": "64MiB", "non_model_bytes": 0})  # for all of it
_SIDE = 8
_PAGE_BYTES = 4096
_KINDS = ("plain", "managed")
_PARTS = ("forward", "both")
OPERATORS = "F.linear on 8x8 tensors with weight and bias, every layer its own"


@dataclass(frozen=True)
class Settings:
    """How much is measured: the best of ``repeats`` counts; ``chunks``, ``moments``: the core's loop."""

    layers: int = 64
    repeats: int = 60
    warmup_steps: int = 4
    chunks: int = 64
    moments: int = 2000


QUICK = Settings(layers=16, repeats=10, moments=200)


def run(session: Session) -> CaseResult:
    """Measure the core's calls, then operators of a resident and of a traced model, in own processes."""
    settings = dataclasses.asdict(QUICK if session.quick else Settings())
    session.progress("preop: calls of the chunk table")
    core = session.run("preop.core", settings, sample_seconds=TIMING_SAMPLE_SECONDS).data()
    rows = [
        Row("access + ready + release, called from Python", core["called_us"], "us", CORE_TARGET_US),
        Row("of which three calls that do nothing", core["empty_calls_us"], "us"),
        Row("with prefetch and usages, as on the traced path", core["traced_us"], "us"),
    ]
    measured: dict[str, Any] = {"core": core, "operators": OPERATORS}
    for path in ("resident", "traced"):
        session.progress(f"preop: operators, {path}")
        options = {**settings, "path": path}
        found = session.run("preop.operators", options, sample_seconds=TIMING_SAMPLE_SECONDS).data()
        measured[path] = found
        rows.extend(_rows(path, found))
    return CaseResult(rows, settings, measured)


def _rows(path: str, found: dict[str, Any]) -> list[Row]:
    plain, managed, layers = found["plain"], found["managed"], found["layers"]
    forward = (managed["forward"] - plain["forward"]) / layers * 1e6
    both = (managed["both"] - plain["both"]) / layers * 1e6
    return [
        Row(f"{path}: plain forward, per operator", plain["forward"] / layers * 1e6, "us"),
        # On the traced path an operator also hooks its backward nodes: the cost of more than one PreOp.
        Row(
            f"{path}: forward, managed less plain, per operator",
            forward,
            "us",
            INTERCEPTED_TARGET_US if path == "resident" else None,
        ),
        Row(f"{path}: forward and backward, managed less plain, per operator", both, "us"),
        Row(f"{path}: PreOps per operator, gradients included", found["preops_per_operator"], "PreOps"),
        Row(
            f"{path}: forward and backward, managed less plain, per PreOp",
            both / found["preops_per_operator"],
            "us",
            INTERCEPTED_TARGET_US,
        ),
    ]


# -- the core ------------------------------------------------------------------------------------


def core(options: dict[str, Any]) -> dict[str, Any]:
    """Time the chunk table's calls of one PreOp from Python, everything resident, the step on its schedule.

    An upper bound of the cost in C++: it contains the crossing from Python, see ``empty_calls_us``.
    """
    settings = Settings(**options)
    table = _C.ChunkTable(settings.chunks * _PAGE_BYTES, 0, 0)
    tensors = [(table.add_tensor(table.add_chunk(_PAGE_BYTES)),) for _ in range(settings.chunks)]
    moments = [tensors[index % settings.chunks] for index in range(settings.moments)]
    accesses = [[table.chunk_of(ids[0])] for ids in moments]
    with _step(table):
        for ids in moments:
            table.access(ids)
            table.release(ids, True)
    table.set_schedule(_C.Schedule(accesses, [0] * len(accesses), settings.chunks))

    def called() -> None:
        for ids in moments:
            table.access(ids)
            table.release(ids, False)

    def traced() -> None:
        for ids in moments:
            table.access(ids)
            table.prefetch(2)
            table.usages()
            table.release(ids, False)

    def empty() -> None:
        for _ids in moments:
            table.moment()
            table.moment()
            table.moment()

    loops = {"called_us": called, "traced_us": traced, "empty_calls_us": empty}
    return {name: _best(table, loop, settings) * 1e6 for name, loop in loops.items()}


def _best(table: _C.ChunkTable, loop: Callable[[], None], settings: Settings) -> float:
    """Return the seconds per moment of the fastest repeat."""
    seconds = []
    for _ in range(settings.repeats):
        with _step(table):
            start = time.perf_counter()
            loop()
            seconds.append(time.perf_counter() - start)
    return min(seconds) / settings.moments


@contextmanager
def _step(table: _C.ChunkTable) -> Iterator[None]:
    table.begin_step()
    yield
    table.end_step()


# -- operators -----------------------------------------------------------------------------------


class _Probe(nn.Module):
    """A chain of tiny linear maps that times its own operators."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_SIDE, _SIDE) for _ in range(layers))
        parameters = list(self.parameters())
        self.operands = list(zip(parameters[::2], parameters[1::2], strict=True))
        self.seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        operands = self.operands
        start = time.perf_counter()
        for weight, bias in operands:
            x = F.linear(x, weight, bias)
        self.seconds = time.perf_counter() - start
        return x


def operators(options: dict[str, Any]) -> dict[str, Any]:
    """Time operators as :func:`time_operators` on the CPU; the shortest times count.

    ``options["path"]``: ``"resident"``, where operators skip their PreOp because nothing can be evicted, or
    ``"traced"``, where everything is on DEVICE too but every operator goes through its PreOp.
    """
    options = dict(options)
    path = options.pop("path")
    found = time_operators(Settings(**options), path, _manage, CPU.torch_device)
    return {**found, **{kind: {part: min(found[kind][part]) for part in _PARTS} for kind in _KINDS}}


def time_operators(
    settings: Settings,
    path: str,
    manage: Callable[[nn.Module], GeminiDDP],
    where: torch.device,
    synchronize: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Time forward, and forward and backward, of a plain and a managed chain, in turns, on one thread; only
    what this thread does: the device may go on behind it.

    ``path`` as of :func:`operators`; ``manage`` wraps a chain, ``where`` has its tensors.

    Raises:
        StateError: not everything was on DEVICE.
    """
    torch.set_num_threads(1)
    plain, managed = _Probe(settings.layers).to(where), _Probe(settings.layers)
    model = manage(managed)
    optimizer = GeminiOptimizer(HybridAdam(model.parameters()), model)
    x = torch.randn(_SIDE, _SIDE, device=where)
    seconds: dict[str, dict[str, list[float]]] = {kind: {part: [] for part in _PARTS} for kind in _KINDS}
    timeline, traced_steps = model.manager.order.timeline, 0
    for index in range(settings.warmup_steps + settings.repeats):
        times = {}
        for kind, called, probe in (("plain", plain, plain), ("managed", model, managed)):
            synchronize()  # with room in the device's queue this thread waits for nothing
            times[kind] = _pass(called, probe, x)
        plain.zero_grad()
        optimizer.step()
        traced_steps += model.manager.order.timeline is not timeline  # a traced step leaves a new one
        timeline = model.manager.order.timeline
        if not model.manager.resident:
            raise StateError(f"not everything is on DEVICE after step {index}")
        # Without this the next step would skip its PreOps.
        model.manager.resident = path == "resident"
        if index >= settings.warmup_steps:
            for kind, parts in times.items():
                for part, elapsed in zip(_PARTS, parts, strict=True):
                    seconds[kind][part].append(elapsed)
    trace = model.memstats()
    assert trace is not None
    preops = sum(phase != "optimizer" for phase in trace.phases)
    stats = model.stats()
    return {
        **seconds,
        "layers": settings.layers,
        "preops_per_operator": preops / settings.layers,
        "device_bytes": stats["device"]["budget_bytes"],
        "model_data_bytes": stats["model_data_bytes"],
        "traced_steps": traced_steps,
    }


def _pass(model: nn.Module, probe: _Probe, x: Tensor) -> tuple[float, float]:
    """Return the seconds of forward, and of forward and backward."""
    loss = model(x).sum()
    forward = probe.seconds
    start = time.perf_counter()
    loss.backward()
    return forward, forward + time.perf_counter() - start


def _manage(probe: nn.Module) -> GeminiDDP:
    return GeminiDDP(probe, CPU.torch_device, **ROOM)


TASKS = {"core": core, "operators": operators}
