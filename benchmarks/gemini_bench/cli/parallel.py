"""``gemini bench parallel``: the command."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gemini_bench.cli.output import EXIT_CODES, add_common, check_paths, command, progress, publish

HELP = f"""\
cases:
  tensor     layers cut over 2 ranks: HybridParallelPlugin, and our layers with torch's AdamW, against
             parallelize_module
  pipeline   stages over 2 ranks, 1F1B and interleaved, and 1F1B over 2 stages x 2 copies, against
             torch.distributed.pipelining and DDP
  widths     stages of narrow models over 2 ranks, hidden sizes of 128, 256 and 512, 1F1B, against
             torch.distributed.pipelining
  hybrid     2 copies x layers cut over 2 ranks: HybridParallelPlugin against FSDP2 over DTensor
  single     one process: what HybridParallelPlugin adds to GeminiDDP

Contenders of a case train the same model on the same tokens in the same processes, in turns step by step,
in a changing order; their losses must agree. A ratio is the median of the ratios within a step, with the
lowest and highest. Peaks of memory are of a rank, in processes of its own. '60 % in memory': the rest of
parameters, gradients and states is on the disk of the current directory.

examples:
  gemini bench parallel --out benchmarks/results/parallel.json
  gemini bench parallel --only tensor hybrid
  gemini bench parallel --quick --json

{EXIT_CODES.format(tiny="with --quick")}
Measure on a machine that does nothing else, with a core for every rank ('hybrid' and half of 'pipeline' have
4 ranks; on 2 cores both sides share them alike). A full run takes about 6 minutes and 6 GB of memory.
"""


def add_parallel(kinds: Any) -> None:
    """Add ``gemini bench parallel`` to ``kinds``."""
    parser = kinds.add_parser(
        "parallel",
        help="parts of models over ranks: against DTensor, torch's pipelines and FSDP2",
        description="Measure tensor and pipeline parallelism over processes of this machine.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny settings: see that every case runs, no figures"
    )
    add_common(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the cases of ``gemini bench parallel``, print the record, and return the exit code."""
    from gemini_bench import parallel
    from gemini_bench.session import Session

    names = parallel.chosen(options.only)
    check_paths(Path(), options.out)
    session = Session(disk_dir=Path().resolve(), quick=options.quick, progress=progress(), record=options.out)
    return publish(parallel.run(session, names, command()), options)
