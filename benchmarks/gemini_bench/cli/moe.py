"""``gemini bench moe``: the command."""

from __future__ import annotations

import argparse
from typing import Any

from gemini_bench.cli.output import EXIT_CODES, add_session_options, run_session

HELP = f"""\
cases:
  training  a Qwen3-MoE of 200 MiB trains with 40 % of its parameters and states on DEVICE and the rest on
            DISK, its experts by themselves and its arrays as a whole: bytes that a step moves, its time
            where all experts are used; and the least budget that a smaller one trains with

Both sides and plain torch take steps in turns, in one process, on the same tokens; losses and final weights
must have the same bits. A ratio is the median of the ratios within a round, with the lowest and highest.

examples:
  gemini bench moe --out benchmarks/results/moe.json
  gemini bench moe --quick --json

{EXIT_CODES.format(tiny="with --quick")}
Measure on a machine that does nothing else. A run takes some minutes, 3 GB of memory and 3 GB of disk. It
needs transformers (pip install "gemini-runtime[hf]").
"""


def add_moe(kinds: Any) -> None:
    """Add ``gemini bench moe`` to ``kinds``."""
    parser = kinds.add_parser(
        "moe",
        help="training mixtures of experts below DEVICE: by the expert against whole arrays",
        description="Measure what training a mixture of experts below DEVICE moves and takes.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_session_options(parser, quick="tiny settings")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the cases of ``gemini bench moe``, print the record, and return the exit code."""
    from gemini_bench import moe

    return run_session(moe, options)
