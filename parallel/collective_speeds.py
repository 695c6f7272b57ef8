"""Measure the latency and the rate of collectives inside short steps in which ranks compute and then
exchange.

A real step lasts as long as its collectives together, so the mean is measured. It includes the few slow calls
and the time that ranks wait for a rank that comes late by chance.
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
from gemini.parallel.launch.local_ranks import as_rank, directory_of_job, run_local_ranks
from gemini.parallel.layout import Layout
from gemini.parallel.mesh import Axis, Mesh
from gemini.parallel.pipeline.stage_messages import StageMessages
from gemini.system.durable import write_text

FEWEST_RANKS, MOST_RANKS = 2, 16
_SIZES = (4 * 1024, 64 * 1024, 512 * 1024, 4 * 2**20)  # bytes, approximately
_STEPS = 24  # the first is a warmup and does not count
_CUT = 0.05  # fraction cut from each end: steps that other work on the machine disturbed
_LONGER = 1.5  # the computation beside a collective takes this multiple of its time
_LIMIT_SECONDS = 32.0  # for all steps together
_TIMEOUT = timedelta(seconds=90)
_SHORTEST_SECONDS = 1e-6  # no message between processes is faster
_FASTEST = 1e13  # bytes per second; keeps a fit of noisy times finite
_SPEEDS = "speeds"


def parse_ranks(text: str) -> int:
    """Return the number of ranks to measure, read from a command line. Raises ConfigError."""
    is_number = text.isascii() and text.isdecimal() and len(text) < 4
    if not (is_number and FEWEST_RANKS <= int(text) <= MOST_RANKS):
        raise ConfigError(f"--measure-ranks is {text[:20]!r}; give {FEWEST_RANKS} to {MOST_RANKS} processes")
    return int(text)


def measure_collectives(ranks: int) -> CollectiveSpeeds:
    """Start ``ranks`` processes on this machine and return the speeds that they measure, for every group size
    that divides ``ranks``. Call it in the main thread; a signal ends the processes and is then raised here.

    Raises:
        StateError: a rank has failed.
    """
    with directory_of_job() as directory:
        try:
            run_local_ranks(__name__, directory, ranks)
        except (ConfigError, StateError) as error:
            raise StateError(f"the collectives were not measured: {error}") from error
        return CollectiveSpeeds.from_json(json.loads((directory / _SPEEDS).read_text()))


def measure_among(everyone: Axis) -> CollectiveSpeeds:
    """Measure every group size that divides the number of these ranks. Collective: all ranks call it; keep
    the result of rank 0.
    """
    sizes = [size for size in range(2, everyone.size + 1) if everyone.size % size == 0]
    limit = _LIMIT_SECONDS / (2 * len(sizes))  # half for exchanges alone, half for exchanges beside computing
    found = [speed for size in sizes for speed in _over(everyone, size, limit)]
    return CollectiveSpeeds(tuple(found))


def fitted(times: list[tuple[int, float]]) -> tuple[float, float]:
    """Fit (bytes, seconds) pairs by least squares of the relative errors.

    Returns:
        The latency, at least 0, and the bytes per second. If the fit gives a negative latency or slope, the
        latency is 0 and the rate is that of the largest message.
    """
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
    """Return the number of fp32 elements that a rank passes to a call of about ``nbytes``: equal parts for
    all ranks, or for ``all_gather`` the rank's own part.
    """
    part = nbytes // 4 // ranks
    return part if kind == "all_gather" else part * ranks


def _over(everyone: Axis, size: int, limit: float) -> list[CollectiveSpeed]:
    """Measure all groups of ``size`` consecutive ranks at the same time; stop after ``limit`` seconds."""
    axis = everyone if size == everyone.size else everyone.neighbours(size)
    messages, matrix = StageMessages(axis), torch.full((512, 512), 0.002, dtype=torch.float32, device="cpu")
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
            row.append(_exchange(axis, messages, kind, base * 0.5, step))
        taken.append(row)
        if _is_late(everyone, began, limit) and step:
            break
    every = torch.stack(everyone.all_gather(torch.tensor(taken[1:], dtype=torch.float64, device="cpu")))
    # Dimensions: group, rank within it, step, call, (begin, end).
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
    """Return the mean seconds of a call; ``times``: (group, rank, step, begin and end)."""
    begins, ends = times.unbind(-1)
    # Count from the mean begin of the ranks: waiting for the last rank is part of every collective. A
    # receiver may wait long before the message is sent, so a message counts from its sender's begin.
    begin = begins.amax(1) if kind == "send" else begins.mean(1)
    return max(_trimmed_mean((ends.amax(1) - begin).flatten().tolist()), _SHORTEST_SECONDS)


def _is_late(everyone: Axis, began: float, limit: float) -> bool:
    """Return True on all ranks if any rank has measured for longer than ``limit`` seconds."""
    late = torch.tensor([float(time.perf_counter() - began > limit)], dtype=torch.float32, device="cpu")
    everyone.all_reduce(late, largest=True)
    return bool(late.item())


def _trimmed_mean(values: Sequence[float]) -> float:
    """Return the mean without the largest and smallest ``_CUT`` of the values. With fewer than twenty values
    nothing is cut.
    """
    cut = int(len(values) * _CUT)
    return fmean(sorted(values)[cut : len(values) - cut])


def _computing_shares(everyone: Axis, axis: Axis, limit: float) -> dict[str, float]:
    """Return for each kind the share of a collective's time that a rank loses if it computes meanwhile: 0 if
    the collective is free, 1 if nothing overlaps. All kinds together take at most ``limit`` seconds.
    """
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
# The collectives that ranks of dp run while they compute: exchanging gradients and gathering weights.
_BESIDE: Mapping[str, _Begin] = {"all_gather": _begin_all_gather, "all_to_all": _begin_all_to_all}


def _exchange(
    axis: Axis, messages: StageMessages, kind: str, tensor: torch.Tensor, step: int
) -> tuple[float, float]:
    """Run one collective and return when it began and ended on this rank. For a message, the sender returns
    its begin twice: the receiver has the end.
    """
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
        messages.settle(messages.receive(torch.empty_like(tensor), axis.rank - 1, step), "measures a message")
    elif axis.rank + 1 < axis.size:
        messages.send(tensor, axis.rank + 1, step)
        messages.finish()
        return begin, begin
    else:  # the last of an odd number of ranks has no partner
        return 0.0, 0.0
    return begin, time.perf_counter()


def _main(directory: Path) -> None:
    """Run one rank of :func:`measure_collectives`."""
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
