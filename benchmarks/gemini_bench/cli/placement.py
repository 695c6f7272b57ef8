"""``gemini bench placement``: the command."""

from __future__ import annotations

import argparse
from typing import Any

from gemini_bench.cli.output import EXIT_CODES, add_session_options, run_session

HELP = f"""\
cases:
  traces     the recorded iterations of benchmarks/traces, 15 to 60 % of the model data on DEVICE, on a
             GPU-CPU and a DRAM-NVMe machine: simulated steps against OPT with prefetch, and the bound
  exact      60 tiny random iterations: plans against the shortest step that any decisions lead to
  plan-time  planning 1,000 chunks and 1,000 moments
  predicted  GPT-2 124M with three budgets and two other GPTs, the rest on DISK: blocks of steps against the
             promise in force before each, and peaks
  overlap    GPT-2 124M, a part of its states on DISK: updates that wait until their chunks are needed against
             updates inside the step, in turns

examples:
  gemini bench placement --out benchmarks/results/placement.json
  gemini bench placement --only exact plan-time
  gemini bench placement --quick --json

{EXIT_CODES.format(tiny="with --quick")}
'plan-time', 'predicted' and 'overlap' need a machine that does nothing else. A full run takes 20 to 30
minutes, most of it for bounds, and for a while 4 GB of disk.
"""


def add_placement(kinds: Any) -> None:
    """Add ``gemini bench placement`` to ``kinds``."""
    parser = kinds.add_parser(
        "placement",
        help="the planner: against OPT, a lower bound and exhaustive search",
        description="Measure the planner on recorded and random iterations and on real steps.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_session_options(parser, quick="few points")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the cases of ``gemini bench placement``, print the record, and return the exit code."""
    from gemini_bench import placement

    return run_session(placement, options)
