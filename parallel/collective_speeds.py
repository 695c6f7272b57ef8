"""Measuring collectives within short steps: ranks compute, exchange what they have computed, and go on.

A step is as long as its collectives together, so what counts is their mean, with the few that take long, and
with the waiting for ranks that come later by chance.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from math import ceil
from pathlib import Path
from statistics import fmean, median

import torch
import torch.distributed as dist

from gemini.comm.ranks import join_ranks
from gemini.errors import ConfigError, StateError
from gemini.memstats.collectives import KINDS, MEASURED, CollectiveSpeed, CollectiveSpeeds, Figure
from gemini.parallel.launch.here import as_rank, directory_of_job, run_here
from gemini.parallel.layout import Layout
from gemini.parallel.mesh import Axis, Mesh
from gemini.parallel.pipeline.passing import Passing
from gemini.system.durable import write_text

FEWEST_RANKS, MOST_RANKS = 2, 16
_SIZES = (4 * 1024, 64 * 1024, 512 * 1024, 4 * 2**20)  # bytes, about
_STEPS = 24  # the first does not count
_CUT = 0.05  # of the slowest and fastest: what the machine did for others meanwhile
_LONGER = 1.5  # computing beside a collective, as a multiple of its time
_LIMIT_SECONDS = 32.0  # of all steps
_TIMEOUT = timedelta(seconds=90)
_SHORTEST_SECONDS = 1e-6  # no message between processes takes less
_FASTEST = 1e13  # bytes per second; keeps a fit through noise finite
_SPEEDS = "speeds"


def parse_ranks(text: str) -> int:
    """Return how many ranks are measured. Raises ConfigError."""
    is_number = text.isascii() and text.isdecimal() and len(text) < 4
    if not (is_number and FEWEST_RANKS <= int(text) <= MOST_RANKS):
        raise ConfigError(
            f"--measure-ranks is {text[:20]!r}; {FEWEST_RANKS} to {MOST_RANKS} processes are measured"
        )
    return int(text)


def measure_collectives(ranks: int) -> CollectiveSpeeds:
    """Start so many ranks here and return what they found, for every group size that divides their number.

    Called in the main thread; a signal ends the ranks and is then raised here.

    Raises:
        StateError: a rank has failed.
    """
    with directory_of_job() as directory:
        try:
            run_here(__name__, directory, ranks)
        except (ConfigError, StateError) as error:
            raise StateError(f"the collectives were not measured: {error}") from error
        return CollectiveSpeeds.from_json(json.loads((directory / _SPEEDS).read_text()))


def measure_among(everyone: Axis) -> CollectiveSpeeds:
    """Return what these ranks, which all call this, find for every group size that divides their number.
    Those of rank 0 are the ones to keep."""
    sizes = [size for size in range(2, everyone.size + 1) if everyone.size % size == 0]
    limit = _LIMIT_SECONDS / (2 * len(sizes))  # one for exchanges alone, one for those beside computing
    found = [speed for size in sizes for speed in _over(everyone, size, limit)]
    return CollectiveSpeeds(tuple(found))


def fitted(times: list[tuple[int, float]]) -> tuple[float, float]:
    """Return the latency, at least 0, and the bytes per second that fit pairs of bytes and seconds: those of
    the least squares of relative errors. Where these have no sense, the rate of the largest message."""
    weights = [1 / seconds**2 for _, seconds in times]
    total = sum(weights)
    x = sum(w * n for w, (n, _) in zip(weights, times, strict=True)) / total
    y = sum(w * t for w, (_, t) in zip(weights, times, strict=True)) / total
    spread = sum(w * (n - x) ** 2 for w, (n, _) in zip(weights, times, strict=True))
    slope = sum(w * (n - x) * (t - y) for w, (n, t) in zip(weights, times, strict=True)) / spread
    largest, seconds = max(times)
    if slope <= 0 or y - slope * x < 0:
        return 0.0, min(largest / seconds, _FASTEST)
    return y - slope * x, min(1 / slope, _FASTEST)


def passed_numel(kind: str, nbytes: int, ranks: int) -> int:
    """Return how many fp32 numbers a rank passes to a call of about ``nbytes``: parts of equal lengths for
    all ranks, or of what is gathered its own."""
    part = nbytes // 4 // ranks
    return part if kind == "all_gather" else part * ranks


def _over(everyone: Axis, size: int, limit: float) -> list[CollectiveSpeed]:
    """Measure within stretches of ``size`` ranks, all at the same time."""
    axis = everyone if size == everyone.size else everyone.neighbours(size)
    passing, matrix = Passing(axis), torch.full((512, 512), 0.002, dtype=torch.float32, device="cpu")
    calls = [
        (kind, torch.ones(passed_numel(kind, nbytes, size), dtype=torch.float32, device="cpu"))
        for kind in KINDS
        for nbytes in _SIZES
    ]
    taken: list[list[tuple[float, float]]] = []
    began = time.perf_counter()
    for step in range(_STEPS):
        row = []
        for kind, base in calls:
            matrix = (matrix @ matrix).tanh()
            row.append(_exchange(axis, passing, kind, base * 0.5, step))
        taken.append(row)
        if _is_late(everyone, began, limit) and step:
            break
    every = torch.stack(everyone.all_gather(torch.tensor(taken[1:], dtype=torch.float64, device="cpu")))
    # By stretch, rank within it, step, call: when the rank began and ended.
    groups = every.unflatten(0, (-1, size))
    points = [
        (base.nbytes, mean_seconds(kind, groups[:, :, :, number]))
        for number, (kind, base) in enumerate(calls)
    ]
    shares = _computing_shares(everyone, axis, limit)
    found = []
    for number, kind in enumerate(KINDS):
        latency, rate = fitted(points[number * len(_SIZES) : (number + 1) * len(_SIZES)])
        speed = CollectiveSpeed(kind, size, Figure(latency, MEASURED), Figure(rate, MEASURED))
        if kind in shares:
            speed = replace(speed, computing_share=Figure(shares[kind], MEASURED))
        found.append(speed)
    return found


def mean_seconds(kind: str, times: torch.Tensor) -> float:
    """Return the mean seconds of a call; ``times`` (stretch, rank, step, 2): when ranks began and ended."""
    begins, ends = times.unbind(-1)
    # From when ranks begin on average: that some wait for the last is part of every collective. A receiver
    # may wait for long: a message counts from when it is sent.
    begin = begins.amax(1) if kind == "send" else begins.mean(1)
    return max(_trimmed_mean((ends.amax(1) - begin).flatten().tolist()), _SHORTEST_SECONDS)


def _is_late(everyone: Axis, began: float, limit: float) -> bool:
    """Say whether any rank has measured for longer than ``limit`` seconds; all ranks say the same."""
    late = torch.tensor([float(time.perf_counter() - began > limit)], dtype=torch.float32, device="cpu")
    everyone.all_reduce(late, largest=True)
    return bool(late.item())


def _trimmed_mean(values: Sequence[float]) -> float:
    """Return the mean without a ``_CUT`` of the largest and of the smallest values, none of fewer than
    twenty."""
    cut = int(len(values) * _CUT)
    return fmean(sorted(values)[cut : len(values) - cut])


def _computing_shares(everyone: Axis, axis: Axis, limit: float) -> dict[str, float]:
    """Return by kind how much of a collective's time is missing to a rank that computes meanwhile: 1 where it
    might as well wait first. Each kind gets its part of ``limit`` seconds."""
    matrix = torch.full((256, 256), 0.01, dtype=torch.float32, device="cpu")
    found = {}
    for kind, begin in _BESIDE.items():
        sent = torch.ones(passed_numel(kind, _SIZES[-1], axis.size), dtype=torch.float32, device="cpu")

        def exchange(begin: _Begin = begin, sent: torch.Tensor = sent) -> None:
            begin(axis, sent).wait()

        rounds = _timed(everyone, exchange) / _timed(everyone, partial(_compute, matrix, 1))
        longer = torch.tensor([rounds], dtype=torch.float64, device="cpu")
        everyone.all_reduce(longer, largest=True)
        compute = partial(_compute, matrix, ceil(_LONGER * longer.item()))

        def both(begin: _Begin = begin, sent: torch.Tensor = sent, compute: _Call = compute) -> None:
            work = begin(axis, sent)
            compute()
            work.wait()

        rows: list[list[float]] = []
        began = time.perf_counter()
        while len(rows) < _STEPS and not (rows and _is_late(everyone, began, limit / len(_BESIDE))):
            rows.append([_timed(everyone, call) for call in (exchange, compute, both)])
        alone, computing, together = (median(column) for column in zip(*rows, strict=True))
        found[kind] = min(max((together - computing) / alone, 0.0), 1.0)
    return found


def _compute(matrix: torch.Tensor, rounds: int) -> None:
    for _ in range(rounds):
        matrix = (matrix @ matrix).tanh()


def _timed(everyone: Axis, call: _Call) -> float:
    """Return the seconds of a call that all ranks begin together."""
    everyone.all_reduce(torch.zeros(1, dtype=torch.float32, device="cpu"))
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _begin_all_to_all(axis: Axis, sent: torch.Tensor) -> dist.Work:
    work: dist.Work = dist.all_to_all_single(torch.empty_like(sent), sent, group=axis.group, async_op=True)
    return work


def _begin_all_gather(axis: Axis, sent: torch.Tensor) -> dist.Work:
    parts = [torch.empty_like(sent) for _ in range(axis.size)]
    work: dist.Work = dist.all_gather(parts, sent, group=axis.group, async_op=True)
    return work


_Call = Callable[[], None]
_Begin = Callable[[Axis, torch.Tensor], dist.Work]
# What ranks of dp do while they compute: they exchange gradients, and gather weights.
_BESIDE: Mapping[str, _Begin] = {"all_gather": _begin_all_gather, "all_to_all": _begin_all_to_all}


def _exchange(
    axis: Axis, passing: Passing, kind: str, tensor: torch.Tensor, step: int
) -> tuple[float, float]:
    """Return when this rank begins and ends; of a message, the end is that of the receiver."""
    begin = time.perf_counter()
    if kind == "all_reduce":
        axis.all_reduce(tensor)
    elif kind == "all_gather":
        axis.all_gather(tensor)
    elif kind == "reduce_scatter":
        axis.reduce_scatter(list(tensor.view(axis.size, -1)))
    elif kind == "all_to_all":
        axis.all_to_all(list(tensor.view(axis.size, -1)), [(tensor.numel() // axis.size,)] * axis.size)
    elif axis.rank % 2:
        passing.settle(passing.receive(torch.empty_like(tensor), axis.rank - 1, step), "measures a message")
    elif axis.rank + 1 < axis.size:
        passing.send(tensor, axis.rank + 1, step)
        passing.finish()
        return begin, begin
    else:  # the last of an odd number
        return 0.0, 0.0
    return begin, time.perf_counter()


def _main(directory: Path) -> None:
    """What each rank runs."""
    with as_rank(directory):
        join_ranks("gloo", _TIMEOUT)
        with Mesh(Layout(tp=dist.get_world_size())) as mesh:
            everyone = mesh.axis("tp")
            assert everyone is not None
            found = measure_among(everyone)
            if everyone.rank == 0:
                write_text(
                    directory / _SPEEDS, json.dumps(found.to_json()), "write the speeds of collectives"
                )
            everyone.say("measured")


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
