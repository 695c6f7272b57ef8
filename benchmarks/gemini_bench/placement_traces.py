"""Case ``traces``: the recorded iterations on two kinds of machines, planned, against OPT and the bound.

GPU-CPU: HOST behind a PCIe 4 link of 25 GB/s each way, and computing scaled so that carrying the model data
over it once takes 0.5, 1 or 2 times as long. DRAM-NVMe: the disk and the computing that were measured when
the trace was recorded; reads and writes share the disk. DEVICE is a share of the model data; nothing is
reserved besides.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from gemini.errors import ConfigError, OutOfBudgetError
from gemini.memstats import Trace
from gemini.memstats.trace import LinkSpeed
from gemini.placement.bound import lower_bound
from gemini.placement.planner import choose_plan
from gemini.placement.problem import Iteration, Machine
from gemini.placement.simulator import Simulation, Simulator
from gemini_bench.record import Row
from gemini_bench.session import CaseResult, Session

TRACES = Path(__file__).resolve().parents[1] / "traces"
SHARES = (0.15, 0.20, 0.30, 0.40, 0.50, 0.60)
JUDGED = (0.20, 0.50)  # shares of the GPU-CPU points that have targets
TRANSFER_TO_COMPUTE = (0.5, 1.0, 2.0)

MIN_GAIN = 0.10
NEAR_BOUND = 1.08
MIN_SHARE_NEAR_BOUND = 0.80

_PCIE = tuple(LinkSpeed(name, 25e9, 10e-6) for name in ("h2d", "d2h"))
_LONG = 12  # steps: long enough for plans that do not repeat after one


@dataclass(frozen=True)
class Point:
    """One trace on one machine. ``transfer_to_compute`` is 0 for DRAM-NVMe."""

    trace: str
    share: float
    transfer_to_compute: float

    @property
    def judged(self) -> bool:
        """Whether the targets of the GPU-CPU points hold for it."""
        return self.transfer_to_compute > 0 and JUDGED[0] <= self.share <= JUDGED[1]


@dataclass(frozen=True)
class Found:
    """Seconds per step at a point; ``bound_seconds`` only where it is judged. ``moved``: bytes on all links,
    as a share of what OPT moves."""

    point: Point
    compute_seconds: float
    opt_seconds: float
    plan_seconds: float
    plan: str
    moved: float
    bound_seconds: float | None


def run(session: Session) -> CaseResult:
    """Plan every point, on all cores."""
    points = list(_points(quick=session.quick))
    session.progress(f"traces: {len(points)} points")
    found: list[Found | None] = []
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for number, result in enumerate(pool.map(measure, points), start=1):
            found.append(result)
            if number % 20 == 0:
                session.progress(f"traces: {number} of {len(points)} points")
    settings = {"shares": SHARES, "transfer_to_compute": TRANSFER_TO_COMPUTE, "pcie": asdict(_PCIE[0])}
    fitting = [result for result in found if result is not None]
    rows = [Row("points that no plan fits", len(found) - len(fitting), "points"), *_rows(fitting)]
    return CaseResult(rows, settings, {"points": [asdict(result) for result in fitting]})


def shipped() -> list[str]:
    """Return the names of the recorded traces. Raises ConfigError outside a checkout."""
    names = sorted(path.stem for path in TRACES.glob("*.json"))
    if not names:
        raise ConfigError(f"there are no traces in {TRACES}: run this benchmark from a checkout")
    return names


def _points(*, quick: bool) -> Iterator[Point]:
    names = shipped()
    for name in names[:2] if quick else names:
        for share in SHARES[1:3] if quick else SHARES:
            for ratio in (0.0, 1.0) if quick else (0.0, *TRANSFER_TO_COMPUTE):
                yield Point(name, share, ratio)


def gpu_cpu(iteration: Iteration, share: float, transfer_to_compute: float) -> tuple[Iteration, Machine]:
    """Return a step whose model data takes ``transfer_to_compute`` times its computing to carry once."""
    total = iteration.total_bytes
    compute = total / _PCIE[0].bytes_per_second / transfer_to_compute
    scale = compute / sum(iteration.seconds)
    scaled = replace(iteration, seconds=tuple(scale * seconds for seconds in iteration.seconds))
    return scaled, Machine(int(share * total), 2 * total, 0, _PCIE)


def dram_nvme(iteration: Iteration, share: float, links: Sequence[LinkSpeed]) -> Machine:
    """Return a machine with a disk as fast as the recorded one."""
    disk = tuple(link for link in links if link.name.startswith("disk"))
    return Machine(int(share * iteration.total_bytes), 0, 2 * iteration.total_bytes, disk)


def measure(point: Point) -> Found | None:
    """Plan one point, with the optimizer overlapped; times are those of many steps. None: some operator needs
    more than there is on DEVICE."""
    trace = Trace.load(TRACES / f"{point.trace}.json")
    recorded = Iteration.of_trace(trace, overlap=True)
    iteration = replace(recorded, reserve_bytes=(0,) * recorded.num_moments)
    if point.transfer_to_compute:
        iteration, machine = gpu_cpu(iteration, point.share, point.transfer_to_compute)
    else:
        machine = dram_nvme(iteration, point.share, trace.links)
    try:
        chosen = choose_plan(iteration, machine)
    except OutOfBudgetError:
        return None
    simulator = Simulator(iteration, machine)
    opt = simulator.seconds(None, steps=_LONG)
    return Found(
        point=point,
        compute_seconds=sum(iteration.seconds),
        opt_seconds=opt,
        plan_seconds=opt if chosen.hints is None else simulator.seconds(chosen.hints, steps=_LONG),
        plan=chosen.name,
        moved=_bytes(chosen.simulation) / (_bytes(simulator.run(None)) or 1),
        bound_seconds=lower_bound(iteration, machine) if point.judged else None,
    )


def _rows(found: Sequence[Found]) -> list[Row]:
    ratios = [result.plan_seconds / result.opt_seconds for result in found]
    slower = sum(ratio > 1 + 1e-9 for ratio in ratios)
    judged = [result for result in found if result.bound_seconds is not None]
    near = [_over_bound(result) <= NEAR_BOUND for result in judged]
    rows = [
        Row("points", len(found), "points"),
        Row("slower than OPT with prefetch and drop", slower, "points", 0),
        Row("worst step against OPT", max(ratios), "x"),
        Row("GPU-CPU, 20-50 %: less time than OPT, geometric mean", _gain(judged), "share", MIN_GAIN, True),
        Row(
            "GPU-CPU, 20-50 %: within 8 % of the bound",
            sum(near) / len(near),
            "share",
            MIN_SHARE_NEAR_BOUND,
            True,
        ),
        Row("GPU-CPU, 20-50 %: furthest from the bound", max(map(_over_bound, judged)), "x"),
    ]
    for ratio in TRANSFER_TO_COMPUTE:
        of_ratio = [result for result in judged if result.point.transfer_to_compute == ratio]
        if of_ratio:
            rows.append(
                Row(f"GPU-CPU, 20-50 %, transfer {ratio:g} x compute: less time", _gain(of_ratio), "share")
            )
    disk = [result for result in found if not result.point.transfer_to_compute]
    gpu = [result for result in found if result.point.transfer_to_compute]
    return [
        *rows,
        Row("DRAM-NVMe: less time than OPT, geometric mean", _gain(disk), "share"),
        *(
            Row(f"{name}: bytes moved against OPT, mean", statistics.fmean(one.moved for one in some), "x")
            for name, some in (("GPU-CPU", gpu), ("DRAM-NVMe", disk))
            if some
        ),
    ]


def _bytes(simulation: Simulation) -> int:
    return sum(simulation.link_bytes.values())


def _over_bound(result: Found) -> float:
    return result.plan_seconds / (result.bound_seconds or math.nan)


def _gain(found: Sequence[Found]) -> float:
    """Return by how much the plans are shorter than OPT, in the geometric mean."""
    logs = [math.log(result.plan_seconds / result.opt_seconds) for result in found]
    return 1.0 - math.exp(sum(logs) / len(logs))
