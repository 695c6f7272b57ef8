"""``gemini bench exact``: the command."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gemini_bench.cli.output import EXIT_CODES, add_common, check_paths, command, progress, publish

HELP = f"""\
cases:
  plain           fp32, everything in memory
  weights         weights offloaded to CPU memory
  states          optimizer states offloaded to CPU memory
  disk            optimizer states on a disk
  accumulation    4 micro-batches
  clipping        norm clipped at 1
  combined        4 micro-batches, norm clipped, weights and states offloaded
  bf16            bf16 with fp32 masters
  fp16            fp16 with fp32 masters and a loss scale
  resume          saved after half of the steps; other processes load and continue
  ranks           2 ranks
  ranks-combined  2 ranks, 4 micro-batches, norm clipped

Each contender trains a small LLaMA for 20 steps, configured as its documentation says, in processes of its
own, of one thread. The reference is one process of plain torch (torch.optim.AdamW) with the same global
batches in the same precision. A figure is the largest difference: of the loss of a step, and of the final
weights. Where a contender has an Adam, a norm or an order of sums of its own, a second line compares it with
plain torch that has these, too. Targets, for this runtime and for plain torch run again: the same bits, from
the reference or from that second loop. DeepSpeed and accelerate are optional; who is missing, or does not
offer a setting, has a line with the reason.

examples:
  gemini bench exact --out benchmarks/results/exact.json
  gemini bench exact --only disk ranks --contenders gemini-runtime FSDP2
  gemini bench exact --quick --json

{EXIT_CODES.format(tiny="with --quick")}
Nothing is timed, so other programs may run. A full run takes about 4 minutes; the first one with DeepSpeed
compiles its kernels, which takes minutes more.
"""


def add_exact(kinds: Any) -> None:
    """Add ``gemini bench exact`` to ``kinds``."""
    parser = kinds.add_parser(
        "exact",
        help="how far training ends from plain torch: this runtime, DeepSpeed, FSDP2, accelerate",
        description="Compare losses and weights of training with plain torch's, in twelve settings.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny settings: see that every case runs, no figures"
    )
    parser.add_argument(
        "--disk-dir",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="where checkpoints and states get a directory, removed at the end (default: .)",
    )
    parser.add_argument("--contenders", nargs="+", metavar="NAME", help="train these (default: all)")
    add_common(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the cases of ``gemini bench exact``, print the record, and return the exit code."""
    from gemini_bench import exact
    from gemini_bench.exact_table import render
    from gemini_bench.session import Session

    names, whom = exact.chosen(options.only), exact.contenders(options.contenders)
    check_paths(options.disk_dir, options.out)
    session = Session(
        disk_dir=options.disk_dir.resolve(), quick=options.quick, progress=progress(), record=options.out
    )
    return publish(exact.run(session, names, command(), whom), options, show=render)
