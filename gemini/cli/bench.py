"""``gemini bench``: measure on this machine, against stated targets."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from gemini.config import parse_bytes
from gemini.errors import ConfigError

EXIT_MISSED = 1

CASES_HELP = """\
cases:
  resident   everything fits: step time and peak memory of GPT-2 124M against plain torch, paired
  offload    half and a quarter of its model data on DEVICE, the rest on DISK: time, stalls, traffic, memory
  preop      the cost of one PreOp: in the core, and around a small operator
  largest    the largest model under a real limit on resident memory, against plain torch
  endurance  2,000 steps under a tight budget: growth of memory, open files and disk space

examples:
  gemini bench runtime --out benchmarks/results/runtime.json
  gemini bench runtime --only preop resident
  gemini bench runtime --quick --json

exit codes:
  0 every target met (with --quick: every case ran)
  1 a target missed or a case failed
  2 an error, with its reason

Measure on a machine that does nothing else. A full run takes 10 to 30 minutes and for a while 20 GB of disk.
"""


def add_parser(subparsers: Any) -> None:
    """Add the ``bench`` command to ``subparsers``."""
    parser = subparsers.add_parser(
        "bench",
        help="measure on this machine, against stated targets",
        description="Measure on this machine, against stated targets.",
    )
    kinds = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    runtime = kinds.add_parser(
        "runtime",
        help="the whole runtime: time, memory, model size, endurance",
        description="Measure the whole runtime, every case in processes of its own, watched from outside.",
        epilog=CASES_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    runtime.add_argument("--only", nargs="+", metavar="CASE", help="run these cases (default: all)")
    runtime.add_argument(
        "--quick", action="store_true", help="tiny settings: see that every case runs, no figures"
    )
    runtime.add_argument(
        "--json", action="store_true", help="print the record as one JSON object, not as a table"
    )
    runtime.add_argument("--out", type=Path, metavar="FILE", help="also write the record to this file")
    runtime.add_argument(
        "--disk-dir",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="where the DISK tier gets a directory, removed at the end (default: .)",
    )
    runtime.add_argument(
        "--limit",
        metavar="SIZE",
        help="real memory limit of the case 'largest' (default: 1GiB; --quick: 448MiB)",
    )
    runtime.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the cases, print the record, and return the exit code."""
    from rich.console import Console

    from gemini.bench import runtime
    from gemini.bench.session import Session
    from gemini.bench.table import render

    names = runtime.chosen(options.only)
    _check_paths(options.disk_dir, options.out)
    progress = Console(stderr=True)
    session = Session(
        disk_dir=options.disk_dir.resolve(),
        quick=options.quick,
        limit_bytes=parse_bytes(options.limit, name="--limit"),
        progress=lambda text: progress.print(text, style="dim", markup=False, highlight=False),
    )
    record = runtime.run(session, names, ["gemini", *map(shlex.quote, sys.argv[1:])])
    text = json.dumps(record, indent=2)
    if options.out is not None:
        options.out.write_text(text + "\n")
    if options.json:
        print(text)
    else:
        render(record, Console())
    bad = record["failed"] or (record["missed"] and not options.quick)
    return EXIT_MISSED if bad else 0


def _check_paths(disk_dir: Path, out: Path | None) -> None:
    """Refuse now what would fail after minutes of measuring."""
    if not disk_dir.is_dir():
        raise ConfigError(f"--disk-dir {disk_dir} is not a directory; create it or name another")
    if out is not None and not out.resolve().parent.is_dir():
        raise ConfigError(f"--out {out}: its directory does not exist; create it or name another file")
