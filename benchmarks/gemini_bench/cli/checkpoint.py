"""``gemini bench checkpoint``: the command."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gemini.errors import ConfigError
from gemini_bench.cli.output import EXIT_CODES, add_common, check_paths, command, progress, publish

HELP = f"""\
cases:
  kills  a training with a checkpoint every 2 steps, killed with SIGKILL at random moments: every resume
         works, and all losses are those of a run that nobody killed
  speed  1 GB saved and loaded, against a plain file written, synced and read in the same directory
  async  10 steps with no save, with one and with an asynchronous one: what training pays

examples:
  gemini bench checkpoint --only kills --kills 300
  gemini bench checkpoint --only speed async --disk-dir /mnt/nvme --out benchmarks/results/checkpoint.json
  gemini bench checkpoint --quick --json

{EXIT_CODES.format(tiny="with --quick")}
'speed' and 'async' need a machine that does nothing else, 5 GB of memory and for a while as much disk.
"""


def add_checkpoint(kinds: Any) -> None:
    """Add ``gemini bench checkpoint`` to ``kinds``."""
    parser = kinds.add_parser(
        "checkpoint",
        help="checkpoints: kill -9 at random moments, speed against the disk, asynchronous saves",
        description="Measure what checkpoints survive and what they cost.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny settings: see that every case runs, no figures"
    )
    parser.add_argument(
        "--kills", type=int, metavar="N", help="kills of the case of that name (default: 300; --quick: 3)"
    )
    parser.add_argument(
        "--disk-dir",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="where the checkpoints get a directory, removed at the end (default: .)",
    )
    add_common(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the cases of ``gemini bench checkpoint``, print the record, and return the exit code."""
    from gemini_bench import checkpoint
    from gemini_bench.session import Session

    names = checkpoint.chosen(options.only)
    check_paths(options.disk_dir, options.out)
    if options.kills is not None and options.kills < 1:
        raise ConfigError(f"--kills is {options.kills}; it must be 1 or more")
    session = Session(
        disk_dir=options.disk_dir.resolve(), quick=options.quick, progress=progress(), record=options.out
    )
    return publish(checkpoint.run(session, names, command(), kills=options.kills), options)
