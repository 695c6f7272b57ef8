"""``gemini bench zero``: the command."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gemini.errors import ConfigError
from gemini_bench.cli.output import EXIT_CODES, add_common, check_paths, command, progress, publish

HELP = f"""\
cases:
  fsdp2      GPT-2 124M cut among 2 ranks of one thread, fp32: step time and peak memory against torch's
             FSDP2 and DDP. Every contender runs once per round, in processes of its own; ratios are taken
             within the rounds
  volume     2 and 4 ranks with as few whole chunks as possible: bytes sent per step against two gathers and
             one reduction; peak of model data against an equal part of the total and what has to be whole

examples:
  gemini bench zero --out benchmarks/results/zero.json
  gemini bench zero --only fsdp2 --rounds 5
  gemini bench zero --quick --json

{EXIT_CODES.format(tiny="with --quick")}
Measure on a machine that does nothing else, with a core for every rank. A full run takes about 10 minutes and
8 GB of memory.
"""


def add_zero(kinds: Any) -> None:
    """Add ``gemini bench zero`` to ``kinds``."""
    parser = kinds.add_parser(
        "zero",
        help="models cut among ranks: against FSDP2, DDP and the volume of ZeRO-3",
        description="Measure training over several processes of this machine.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny settings: see that every case runs, no figures"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds per case (default: 3)")
    add_common(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the cases of ``gemini bench zero``, print the record, and return the exit code."""
    from gemini_bench import zero
    from gemini_bench.session import Session

    names = zero.chosen(options.only)
    if options.rounds < 1:
        raise ConfigError(f"--rounds is {options.rounds}; it must be at least 1")
    check_paths(Path(), options.out)
    session = Session(disk_dir=Path().resolve(), quick=options.quick, progress=progress(), record=options.out)
    return publish(zero.run(session, options.rounds, names, command()), options)
