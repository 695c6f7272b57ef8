"""``gemini bench plan``: the command."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gemini.errors import ConfigError
from gemini_bench.cli.output import EXIT_CODES, add_common, check_paths, command, progress, publish

HELP = f"""\
cases:
  predicted      six models of transformers over --ranks gloo ranks of one thread: data divided with ZeRO 0 to
                 3, layers, sequences and stages cut; a step as it was predicted beside the step as it is, and
                 how good the choice by prediction is
  search         planning a model of 48 layers for 8 ranks, on one core: time and memory
  architectures  every architecture of transformers that training is tested with, small, planned over 2, 4 and
                 8 ranks: none may end with an error that says nothing

This machine is measured right before the layouts of each model, which then take steps in turns, in the same
processes, in a changing order; their losses must agree. 'regret' is how much longer the layout that was
predicted to be the fastest takes than the fastest one, of medians.

examples:
  gemini bench plan --out benchmarks/results/plan.json
  gemini bench plan --only predicted --models 'llama 4x256' 'gpt2 4x256' --rounds 5
  gemini bench plan --only predicted --ranks 4
  gemini bench plan --quick --json

{EXIT_CODES.format(tiny="with --quick")}
Measure 'predicted' on a machine that does nothing else, with a core for every rank; with fewer cores nothing
of it is judged. A full run takes about 10 minutes and 3 GB of memory. All cases need transformers
(pip install "gemini-runtime[hf]"), 'architectures' a checkout.
"""


def add_plan(kinds: Any) -> None:
    """Add ``gemini bench plan`` to ``kinds``."""
    parser = kinds.add_parser(
        "plan",
        help="plans over ranks: predicted steps against measured ones, what planning takes",
        description="Measure how true predictions of gemini plan --search are, and what they cost.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny settings: see that every case runs, no figures"
    )
    parser.add_argument(
        "--ranks", type=int, default=2, choices=(2, 4), help="ranks of predicted (default: 2)"
    )
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="rounds that count (default: 9)")
    parser.add_argument("--models", nargs="+", metavar="MODEL", help="models of predicted (default: all)")
    add_common(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the cases of ``gemini bench plan``, print the record, and return the exit code."""
    from gemini_bench import plan
    from gemini_bench.cases import choose
    from gemini_bench.plan_jobs import MODELS
    from gemini_bench.plan_predicted import Settings
    from gemini_bench.session import Session

    names = plan.chosen(options.only)
    if options.rounds < 1:
        raise ConfigError(f"--rounds is {options.rounds}; it must be at least 1")
    settings = Settings(ranks=options.ranks, rounds=options.rounds)
    if options.models:
        settings = Settings(options.ranks, options.rounds, tuple(choose(MODELS, options.models)))
    check_paths(Path(), options.out)
    session = Session(disk_dir=Path().resolve(), quick=options.quick, progress=progress(), record=options.out)
    return publish(plan.run(session, settings, names, command()), options)
