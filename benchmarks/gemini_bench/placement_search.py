"""Cases ``exact`` and ``plan-time``: the planner against exhaustive search, and against the clock."""

from __future__ import annotations

import time
from typing import Any

from gemini.memstats.trace import LinkSpeed
from gemini.placement.planner import choose_plan
from gemini.placement.problem import Iteration, Machine
from gemini.placement.simulator import Simulator
from gemini_bench.paired import Spread, spread_row
from gemini_bench.placement_exact import random_tiny, shortest_step
from gemini_bench.record import Row
from gemini_bench.session import CaseResult, Session

INSTANCES = 60
MAX_MEAN_RATIO = 1.03
MAX_PLAN_SECONDS = 1.0

_STEPS = 60  # a multiple of every period up to 6
_LAYERS = 200
_LAYER_BYTES = 8 << 20
_REPEATS = 3


def exact(session: Session) -> CaseResult:
    """Plan tiny random iterations and compare with the shortest step that any decisions lead to."""
    count = 6 if session.quick else INSTANCES
    session.progress(f"exact: {count} instances")
    rows = [_instance(seed) for seed in range(count)]
    plans = [row["plan"] / row["exact"] for row in rows]
    opts = [row["opt"] / row["exact"] for row in rows]
    mean = sum(plans) / count
    results = [
        Row("instances of 5 chunks and 16 moments", count, "instances"),
        Row("plan against the shortest step, mean", mean, "x", MAX_MEAN_RATIO),
        Row("plan against the shortest step, lowest", min(plans), "x", 1.0, at_least=True),
        Row("plan against the shortest step, highest", max(plans), "x"),
        Row("plans that are the shortest step", sum(ratio == 1.0 for ratio in plans) / count, "share"),
        Row("OPT with prefetch against the shortest step, mean", sum(opts) / count, "x"),
    ]
    return CaseResult(results, {"instances": count, "steps": _STEPS}, {"instances": rows})


def _instance(seed: int) -> dict[str, Any]:
    """Return ticks per step: exact, and of OPT and the chosen plan over many steps."""
    tiny = random_tiny(seed)
    iteration, machine = tiny.iteration(), tiny.machine()
    chosen = choose_plan(iteration, machine)
    simulator = Simulator(iteration, machine)
    return {
        "seed": seed,
        "exact": shortest_step(tiny),
        "opt": round(simulator.seconds(None, after=20, steps=_STEPS), 9),
        "plan": round(simulator.seconds(chosen.hints, after=20, steps=_STEPS), 9),
        "name": chosen.name,
    }


def plan_time(session: Session) -> CaseResult:
    """Plan a transformer of a thousand chunks and a thousand moments."""
    layers = _LAYERS // 10 if session.quick else _LAYERS
    iteration = transformer(layers)
    machine = Machine(
        iteration.total_bytes * 3 // 10,
        2 * iteration.total_bytes,
        0,
        tuple(LinkSpeed(name, 25e9, 10e-6) for name in ("h2d", "d2h")),
    )
    session.progress(f"plan-time: {len(iteration.chunk_bytes)} chunks, {iteration.num_moments} moments")
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        chosen = choose_plan(iteration, machine)
        seconds.append(time.perf_counter() - start)
    rows = [
        Row("chunks", len(iteration.chunk_bytes), "chunks"),
        Row("moments", iteration.num_moments, "moments"),
        spread_row("time to plan", Spread.of(seconds), "s", MAX_PLAN_SECONDS),
        Row("plans tried", len(chosen.candidates), "plans"),
        Row("plan against OPT", chosen.simulation.step_seconds / chosen.candidates[0][1], "x"),
    ]
    return CaseResult(rows, {"layers": layers}, {"seconds": seconds, "plan": chosen.name})


def transformer(layers: int) -> Iteration:
    """Return a step of ``layers`` layers, each a parameter, a gradient and three state chunks, with updates
    before the layer's next use; forward and backward take two moments a layer. Data crosses a PCIe 4 link in
    the time that computing takes."""
    transfer = _LAYER_BYTES / 25e9
    moments: list[tuple[tuple[int, ...], str, tuple[int, ...], float]] = []
    for layer in range(layers):
        param, grad, *states = range(5 * layer, 5 * layer + 5)
        moments.append(((param, grad, *states), "mrmmm", (grad,), 0.2 * transfer))
        moments += [((param,), "r", (), 0.8 * transfer)] * 2
    for layer in reversed(range(layers)):
        param, grad = 5 * layer, 5 * layer + 1
        moments.append(((param, grad), "rw", (), 1.6 * transfer))
        moments.append(((param, grad), "rm", (), 1.6 * transfer))
    accesses, modes, frees, seconds = zip(*moments, strict=True)
    return Iteration((_LAYER_BYTES,) * (5 * layers), accesses, modes, frees, seconds, (0,) * len(moments))
