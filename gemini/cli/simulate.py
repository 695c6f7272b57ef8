"""``gemini simulate``: estimates the time of a recorded iteration on a described machine."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemini.cli.console import Console, print_json
from gemini.errors import ConfigError
from gemini.memstats import Trace
from gemini.memstats.trace import LINKS, LinkSpeed
from gemini.system.config import format_bytes, parse_bytes

if TYPE_CHECKING:
    from gemini.placement.policies import Hints
    from gemini.placement.problem import Iteration, Machine

POLICIES = ("plan", "opt", "density", "static", "lru")

HELP = """\
policies:
  plan     the best plan that the planner finds
  opt      evict the furthest next use first, with prefetch
  density  keep the chunks that save the most transfer time per byte and second
  static   keep the most used chunks for the whole step
  lru      evict the least recently used first, no prefetch

Sizes are bytes (65536, 512MiB, 4GiB), or with % a share of the model data; for DEVICE, that share plus the
peak of other memory in the recorded step. A tier without a size is absent.

examples:
  gemini simulate benchmarks/traces/gpt2.json --device-bytes 30% --disk-bytes 200%
  gemini simulate step.json --device-bytes 8GiB --host-bytes 64GiB --link h2d=25GB/s --link d2h=25GB/s \\
      --compute-scale 0.05 --policy opt --bound
"""

_SPEED = re.compile(r"(?P<link>\w+)=(?P<size>[^/]+)/s", re.ASCII)


def add_parser(subparsers: Any) -> None:
    """Add the ``simulate`` command to ``subparsers``."""
    parser = subparsers.add_parser(
        "simulate",
        help="predict the time of a recorded step under other budgets",
        description="Simulate a recorded iteration: make the runtime's decisions and predict their time.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "trace",
        type=Path,
        metavar="TRACE",
        help="trace-step.json of gemini trace, or a file of model.memstats().save(path)",
    )
    for tier, text in (("device", "where operators compute"), ("host", "absent"), ("disk", "absent")):
        default = "100%" if tier == "device" else "0"
        parser.add_argument(
            f"--{tier}-bytes",
            default=default,
            metavar="SIZE",
            help=f"budget of {tier.upper()} (default: {default.replace('%', '%%')}, {text})",
        )
    parser.add_argument(
        "--link",
        action="append",
        default=[],
        metavar="NAME=SPEED",
        help=f"speed of a link, such as h2d=25GB/s; one of {', '.join(LINKS)} (default: as recorded)",
    )
    parser.add_argument(
        "--compute-scale",
        type=float,
        default=1.0,
        metavar="X",
        help="computing takes X times as long as recorded (default: 1)",
    )
    parser.add_argument("--policy", choices=POLICIES, default="plan", help="(default: plan)")
    parser.add_argument(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run each update right before the next use of its parameters (default: yes)",
    )
    parser.add_argument("--bound", action="store_true", help="also compute a lower bound; takes seconds")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Simulate and print; return 0."""
    found = simulated(options)
    if options.json:
        print_json(found)
    else:
        _render(found)
    return 0


def simulated(options: argparse.Namespace) -> dict[str, Any]:
    """Return the simulated steady step as plain data. Raises OutOfBudgetError if it does not fit."""
    from gemini.placement.bound import lower_bound
    from gemini.placement.problem import Iteration, order_of
    from gemini.placement.simulator import Simulator

    trace = Trace.load(options.trace)
    if not 0 < options.compute_scale < math.inf:
        raise ConfigError(
            f"--compute-scale is {options.compute_scale}; it must be a number > 0, such as 0.5 or 2"
        )
    order = order_of(trace, overlap=options.overlap)
    iteration = Iteration.of_order(trace, order, trace.reserve_bytes())
    scaled = tuple(options.compute_scale * seconds for seconds in iteration.seconds)
    iteration = dataclasses.replace(iteration, seconds=scaled)
    machine = _machine(options, iteration, trace)
    name, hints = _hints(options.policy, iteration, machine)
    step = Simulator(iteration, machine).run(hints, told=options.policy != "lru")
    stall = dict.fromkeys(trace.phases, 0.0)
    for (moment, _), seconds in zip(order, step.stall_seconds, strict=True):
        stall[trace.phases[moment]] += seconds
    return {
        "trace": str(options.trace),
        "policy": options.policy,
        "plan": name,
        "step_seconds": step.step_seconds,
        "compute_seconds": step.compute_seconds,
        "stall_seconds": stall,
        "bound_seconds": lower_bound(iteration, machine) if options.bound else None,
        "model_data_bytes": iteration.total_bytes,
        "budget_bytes": dict(zip(step.peak_bytes, machine.budgets, strict=True)),
        "peak_bytes": step.peak_bytes,
        "link_bytes": step.link_bytes,
        "link_seconds": step.link_seconds,
    }


def _hints(policy: str, iteration: Iteration, machine: Machine) -> tuple[str, Hints | None]:
    """Return the name of a policy's plan, and its hints."""
    from gemini.placement.planner import by_density, choose_plan, static
    from gemini.placement.policies import make_hints
    from gemini.placement.problem import PlanProblem

    if policy == "plan":
        chosen = choose_plan(iteration, machine)
        return chosen.name, chosen.hints
    if policy in ("opt", "lru"):
        return policy, None
    problem = PlanProblem.of(iteration, machine)
    keep = by_density(problem) if policy == "density" else static(problem)
    return policy, make_hints(problem.intervals, keep, problem.flushed_at(0.0))


def _machine(options: argparse.Namespace, iteration: Iteration, trace: Trace) -> Machine:
    """Return the machine that the options describe."""
    from gemini.placement.problem import Machine

    reserve = max(iteration.reserve_bytes, default=0)
    host_bytes = _budget(options.host_bytes, "--host-bytes", iteration.total_bytes)
    disk_bytes = _budget(options.disk_bytes, "--disk-bytes", iteration.total_bytes)
    links = tuple(_links(options.link, trace.links))
    _require_links(links, "--host-bytes", host_bytes, LINKS[:2])
    _require_links(links, "--disk-bytes", disk_bytes, LINKS[2:])
    return Machine(
        device_bytes=_budget(options.device_bytes, "--device-bytes", iteration.total_bytes, reserve),
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
        links=links,
    )


def _require_links(links: Sequence[LinkSpeed], option: str, nbytes: int, needed: Sequence[str]) -> None:
    missing = [name for name in needed if name not in {link.name for link in links}]
    if nbytes and missing:
        wanted = " ".join(f"--link {name}=2GB/s" for name in missing)
        raise ConfigError(
            f"{option} is {format_bytes(nbytes)}, but the speed of {' and '.join(missing)} is unknown: the "
            f"step was recorded without that tier; give {wanted} with the speeds to assume, or leave out "
            f"{option}"
        )


def _budget(text: str, name: str, model_data: int, reserve: int = 0) -> int:
    """Return a budget in bytes. A percentage is a share of ``model_data``, plus ``reserve``."""
    if not text.endswith("%"):
        return parse_bytes(text, name=name) or 0
    try:
        share = float(text[:-1]) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share < math.inf:
        raise ConfigError(f"{name} is {text!r}; write a share as 20% or 150%")
    return (parse_bytes(int(share * model_data), name=name) or 0) + reserve


def _links(given: Sequence[str], recorded: Sequence[LinkSpeed]) -> Iterator[LinkSpeed]:
    """Yield the recorded links; given ones replace them."""
    speeds = {}
    for text in given:
        match = _SPEED.fullmatch(text)
        if match is None:
            raise ConfigError(f"--link is {text!r}; write it as h2d=25GB/s")
        name, bandwidth = match["link"], parse_bytes(match["size"], name="--link") or 0
        latency = next((link.latency_seconds for link in recorded if link.name == name), 0.0)
        speeds[name] = LinkSpeed(name, float(bandwidth), latency)
    yield from speeds.values()
    yield from (link for link in recorded if link.name not in speeds)


def _render(found: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(title=f"{found['trace']}, {found['policy']}", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    step = found["step_seconds"]
    table.add_row("step", f"{step:.4g} s")
    table.add_row("  computing", f"{found['compute_seconds']:.4g} s")
    for phase, seconds in found["stall_seconds"].items():
        table.add_row(f"  waiting, {phase}", f"{seconds:.4g} s")
    if found["bound_seconds"] is not None:
        over = step / found["bound_seconds"] - 1 if found["bound_seconds"] else 0.0
        table.add_row("lower bound of any plan", f"{found['bound_seconds']:.4g} s (this is {over:.1%} above)")
    if found["plan"] != found["policy"]:
        table.add_row("plan", found["plan"])
    table.add_row("model data", format_bytes(found["model_data_bytes"]))
    for tier, budget in found["budget_bytes"].items():
        if budget:
            peak = format_bytes(found["peak_bytes"][tier])
            table.add_row(f"{tier.upper()}, peak of budget", f"{peak} of {format_bytes(budget)}")
    for link, nbytes in found["link_bytes"].items():
        if nbytes:
            table.add_row(link, f"{format_bytes(nbytes)}, busy {found['link_seconds'][link]:.4g} s")
    Console().print(table)
