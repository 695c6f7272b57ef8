"""Contenders that train the same job over ranks, taking turns step by step in the same processes."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.distributed as dist

from gemini.errors import StateError
from gemini_bench import parallel_ours as ours
from gemini_bench import parallel_peers as peers
from gemini_bench.paired import Spread, in_turn, spread_row
from gemini_bench.parallel_job import Contender, Job
from gemini_bench.parallel_ranks import RankRun, fork_ranks
from gemini_bench.record import Row
from gemini_bench.session import TIMING_SAMPLE_SECONDS, CaseResult, Session

# Those who do the same differ by the order of additions, which Adam lets grow with the steps.
_TOLERANCE = 1e-4

CONTENDERS: Mapping[str, Callable[[Job], Contender]] = {
    "ours": ours.hybrid,
    "ours, 60 % in memory": partial(ours.hybrid, share=0.6),
    "our layers, torch's AdamW": ours.layers_alone,
    "parallelize_module": peers.parallelized,
    "ours, 1F1B": partial(ours.pipeline, style="1f1b"),
    "ours, 1F1B, 60 % in memory": partial(ours.pipeline, style="1f1b", share=0.6),
    "ours, interleaved": partial(ours.pipeline, style="interleaved"),
    "torch, 1F1B": partial(peers.scheduled, style="1f1b"),
    "torch, interleaved": partial(peers.scheduled, style="interleaved"),
    "FSDP2 x TP": peers.fsdp2_and_tensor,
    "GeminiDDP": ours.gemini_ddp,
    "plugin": ours.hybrid,
    "plugin, execute_pipeline": ours.single,
}


@dataclass(frozen=True)
class Pair:
    """Two contenders, and what the first one may take of the second one's ``time`` and ``memory``; None is
    not judged."""

    mine: str
    theirs: str
    time: float | None = None
    memory: float | None = None


def compare(
    session: Session, case: str, job: Job, pairs: Sequence[Pair], *, memory: bool = True, what: str = ""
) -> CaseResult:
    """Measure the contenders of ``pairs``: steps in turns, then, with ``memory``, the peak of each in
    processes of its own. Rows begin with ``what``.

    Raises:
        StateError: their losses differ: then the figures compare nothing.
    """
    names = list(dict.fromkeys(name for pair in pairs for name in (pair.mine, pair.theirs)))
    session.progress(f"{case}: {what}{', '.join(names)}; {job.world} ranks")
    placed = replace(job, place=os.fspath(session.disk_dir))  # of this machine: not for the record
    options = {"job": dataclasses.asdict(placed), "names": names, "memory": memory}
    found = session.run("parallel_turns.measure", options, sample_seconds=TIMING_SAMPLE_SECONDS).data()
    for losses in (found["losses"], found["memory_losses"]):
        require_same_losses(losses)
    return CaseResult(_rows(found, pairs, what), dataclasses.asdict(job), found)


def require_same_losses(losses: Mapping[str, Sequence[float]]) -> None:
    """Raise StateError unless all contenders have the same loss in every step."""
    everyone = list(losses.items())
    for name, mine in everyone[1:]:
        first, wanted = everyone[0]
        apart = max(abs(a - b) / abs(b) for a, b in zip(mine, wanted, strict=True))
        if not apart <= _TOLERANCE:
            raise StateError(
                f"the losses of {name!r} differ from those of {first!r} by up to {apart:.2g} of their value "
                f"(allowed: {_TOLERANCE:g}): {mine} against {wanted}"
            )


def _rows(found: Mapping[str, Any], pairs: Sequence[Pair], what: str) -> list[Row]:
    seconds, peaks = found["seconds"], found["peak_rss_bytes"]
    rows: list[Row] = [
        spread_row(f"{what}{name}: step", Spread.of(steps), "s") for name, steps in seconds.items()
    ]
    rows += [Row(f"{what}{name}: peak memory of a rank", peak, "bytes") for name, peak in peaks.items()]
    for pair in pairs:
        mine, theirs = seconds[pair.mine], seconds[pair.theirs]
        ratios = Spread.of([a / b for a, b in zip(mine, theirs, strict=True)])
        both = f"{what}{pair.mine} / {pair.theirs}"
        rows.append(spread_row(f"{both}: step, paired", ratios, "x", pair.time))
        medians = statistics.median(mine) / statistics.median(theirs)
        rows.append(Row(f"{both}: step, ratio of medians", medians, "x"))
        if peaks:
            rows.append(Row(f"{both}: peak memory", peaks[pair.mine] / peaks[pair.theirs], "x", pair.memory))
    return rows


# -- in the worker -------------------------------------------------------------------------------


def measure(options: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of each measured step (of the slowest rank), all losses (the mean over the ranks
    that have one) and the peaks (of the rank that needs most), by contender."""
    job, names = Job.of(options["job"]), options["names"]
    turns = fork_ranks(partial(_alternate, job, names), job.world)
    alone: dict[str, list[RankRun]] = {}
    for name in names if options["memory"] else ():
        alone[name] = fork_ranks(partial(_train_alone, replace(job, model=job.large), name), job.world)
    return {
        "seconds": {name: _by_step(max, turns, "seconds", name) for name in names},
        "losses": {name: _by_step(statistics.fmean, turns, "losses", name) for name in names},
        "memory_losses": {
            name: _by_step(statistics.fmean, runs, "losses", name) for name, runs in alone.items()
        },
        "peak_rss_bytes": {name: max(run.peak_rss_bytes for run in runs) for name, runs in alone.items()},
    }


def _by_step(join: Callable[[list[float]], float], runs: list[RankRun], key: str, name: str) -> list[float]:
    steps = zip(*(run.result[key][name] for run in runs), strict=True)
    return [join([value for value in step if value is not None]) for step in steps]


def _alternate(job: Job, names: Sequence[str], rank: int) -> dict[str, Any]:
    """Train all contenders as one rank; who goes first changes from step to step."""
    contenders = {name: CONTENDERS[name](job) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, list[float | None]] = {name: [] for name in names}
    for number in range(job.warmup_steps + job.measured_steps):
        batch = job.batch_of(number, rank)
        for name in in_turn(names, number):
            _meet(job)
            start = time.perf_counter()
            loss = contenders[name].step(batch)
            elapsed = time.perf_counter() - start
            losses[name].append(loss)
            if number >= job.warmup_steps:
                seconds[name].append(elapsed)
    _meet(job)
    for contender in contenders.values():
        contender.close()
    return {"seconds": seconds, "losses": losses}


def _train_alone(job: Job, name: str, rank: int) -> dict[str, Any]:
    """Train one contender, for its peak to be seen."""
    contender = CONTENDERS[name](job)
    losses = [contender.step(job.batch_of(number, rank)) for number in range(job.memory_steps)]
    _meet(job)
    contender.close()
    return {"losses": {name: losses}}


def _meet(job: Job) -> None:
    if job.world > 1:
        dist.barrier()


TASKS = {"measure": measure}
