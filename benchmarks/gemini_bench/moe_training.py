"""Case ``training`` of ``gemini bench moe``: what a step moves and takes when experts that train move by the
expert, beside arrays that move as a whole."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from gemini_bench.moe_floor import measure_floor
from gemini_bench.moe_mixture import (
    KINDS,
    STATES_OF_ADAM,
    Mixture,
    Trainee,
    same_weights,
    sizes,
)
from gemini_bench.paired import Spread, in_turn, spread_row
from gemini_bench.record import Row
from gemini_bench.session import TIMING_SAMPLE_SECONDS, CaseResult, Session

MOVED = 0.4  # bytes over DISK, of those that whole arrays move
TIME = 1.05  # of a step that uses all experts, of that with whole arrays
FLOOR = 1.2  # least budget over what one expert and one dense operator take
_TURN = 2  # steps of a turn; the last counts: the one before it ends what others have left behind


@dataclass(frozen=True)
class Settings:
    """``share``: of parameters and states on DEVICE. ``few`` and ``many``: sequences of a step and tokens of
    each. ``left_out`` rounds until order and times are known and the step is planned, then ``rounds`` that
    count. ``small``: the mixture whose least budget is looked for with ``steps`` steps."""

    mixture: Mixture = field(default=Mixture())
    share: float = 0.4
    few: tuple[int, int] = (1, 4)
    many: tuple[int, int] = (4, 256)
    left_out: int = 3
    rounds: int = 7
    threads: int = 1
    small: Mixture = field(default=Mixture(width=256, expert_width=128, experts=16, head=16, vocabulary=64))
    steps: int = 8


_TINY = Mixture(width=64, expert_width=64, experts=8, head=16, vocabulary=64)
QUICK = Settings(mixture=_TINY, many=(2, 64), left_out=1, rounds=1, small=_TINY, steps=2)


def training(session: Session) -> CaseResult:
    """Train with few tokens and with many; then look for the least budget of a smaller mixture."""
    settings = QUICK if session.quick else Settings()
    session.progress("training: by the expert, with whole arrays, and plain, in turns; the least budget")
    options = {**dataclasses.asdict(settings), "disk_dir": str(session.disk_dir)}
    found = session.run("moe.training", options, sample_seconds=TIMING_SAMPLE_SECONDS).data()
    return CaseResult(rows_of(found), dataclasses.asdict(settings), found)


def rows_of(found: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Return bytes and times by the expert over those with whole arrays, the least budget, and bits."""
    few, many, floor = found["few"], found["many"], found["floor"]
    rows: list[Row] = []
    for run, used, moved, seconds in ((few, None, MOVED, None), (many, 1.0, None, TIME)):
        tokens = f"{run['tokens']} tokens"
        what = f"{tokens}: experts used by a step"
        rows.append(Row(what, run["used_share"], "share", used, at_least=True))
        for kind in KINDS[:2]:
            nbytes = statistics.median(run["moved_bytes"][kind])
            rows.append(Row(f"{tokens}: bytes over DISK by a step, {kind}", nbytes, "bytes"))
        what = f"{tokens}: bytes over DISK, by the expert / whole arrays"
        rows.append(spread_row(what, _ratio(run["moved_bytes"]), "x", moved))
        what = f"{tokens}: time of a step, by the expert / whole arrays"
        rows.append(spread_row(what, _ratio(run["seconds"]), "x", seconds))
        what = f"{tokens}: processor time of a step, by the expert / whole arrays"
        rows.append(spread_row(what, _ratio(run["cpu_seconds"]), "x"))
        peak = max(run["peak_bytes"][kind] for kind in KINDS[:2]) / run["device_bytes"]
        rows.append(Row(f"{tokens}: most on DEVICE / budget", peak, "x", 1.0))
    budget = floor["least_bytes"] / (floor["expert_bytes"] + floor["dense_bytes"])
    what = "least budget / (an expert's matrix, its gradient and states + largest dense parameter)"
    rows.append(Row(what, budget, "x", FLOOR))
    matrix = floor["expert_bytes"] * 2 / (2 + STATES_OF_ADAM)
    stateless = floor["least_bytes"] / (matrix + floor["dense_bytes"])
    rows.append(Row("the same without the states, which move in pieces", stateless, "x"))
    equal = statistics.fmean(float(run["equal"]) for run in found.values())
    what = "runs with the losses and weights of plain torch, bit for bit"
    rows.append(Row(what, equal, "share", 1.0, at_least=True))
    return rows


def _ratio(readings: Mapping[str, list[float]]) -> Spread:
    mine, others = (readings[kind] for kind in KINDS[:2])
    return Spread.of([one / other for one, other in zip(mine, others, strict=True)])


# -- in the worker -------------------------------------------------------------------------------


def measure(options: dict[str, Any]) -> dict[str, Any]:
    """Return what steps of few and of many tokens took and moved, and the least budget."""
    torch.set_num_threads(options["threads"])
    steps = {name: measure_steps(options, *options[name]) for name in ("few", "many")}
    small = Mixture(**options["small"])
    return {**steps, "floor": measure_floor(small, options["few"], options["steps"], options["disk_dir"])}


def measure_steps(options: Mapping[str, Any], batch: int, length: int) -> dict[str, Any]:
    """Return what steps took and moved: by the expert, with whole arrays, and plain, in turns; and whether
    losses and final weights were the same."""
    mixture = Mixture(**options["mixture"])
    nbytes = (1 + STATES_OF_ADAM) * sizes(mixture)["parameters"]
    budget = int(options["share"] * nbytes)
    readings: dict[str, dict[str, list[float]]] = {
        what: {kind: [] for kind in KINDS} for what in ("seconds", "cpu_seconds", "moved_bytes", "losses")
    }
    where = {"device_bytes": budget, "disk_dir": options["disk_dir"]}
    with ExitStack() as open_ones:
        trainees = {kind: open_ones.enter_context(Trainee(mixture, kind, **where)) for kind in KINDS}
        for number in range(options["left_out"] + options["rounds"]):
            seeds = range(_TURN * number, _TURN * (number + 1))
            batches = [mixture.tokens(batch, length, seed=seed) for seed in seeds]
            for kind in in_turn(KINDS, number):
                trainee = trainees[kind]
                for tokens in batches:
                    begin = time.perf_counter(), time.process_time(), trainee.moved_bytes()
                    readings["losses"][kind].append(trainee.step(tokens))
                    took = time.perf_counter() - begin[0], time.process_time() - begin[1]
                    moved = trainee.moved_bytes() - begin[2]
                if number >= options["left_out"]:
                    readings["seconds"][kind].append(took[0])
                    readings["cpu_seconds"][kind].append(took[1])
                    readings["moved_bytes"][kind].append(moved)
        peaks = {kind: trainee.peak_bytes() for kind, trainee in trainees.items()}
        used = trainees["plain"].used_experts()
        want = trainees["plain"].weights()
        equal = [same_weights(trainees[kind].weights(), want) for kind in KINDS]
    losses = readings["losses"]
    return {
        **readings,
        "tokens": batch * length,
        "device_bytes": budget,
        "peak_bytes": peaks,
        "used_share": used / mixture.experts,
        "equal": all(equal) and all(losses[kind] == losses["plain"] for kind in KINDS),
    }
