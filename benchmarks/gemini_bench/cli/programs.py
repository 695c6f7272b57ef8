"""``gemini bench programs``: the command."""

from __future__ import annotations

import argparse
from typing import Any

from gemini.errors import ConfigError
from gemini_bench.cli.output import EXIT_CODES, add_session_options, run_session

HELP = f"""\
cases:
  loop    steps of about 50 ms by a plain loop of torch, by an engine and by a trainer with its usual hooks,
          on the same model and data, epochs in turns: what engine and trainer add to a step, in a process
          that is alone and in one that has launched
  resume  GeminiTrainer of transformers, 110M parameters, their Adam states on DISK: the memory that saving
          and resuming add to training, and whether all bits are those of not stopping
  load    gemini.from_pretrained of 1.0 billion bf16 parameters in four files, under 300 MiB of memory: its
          time against reading the files, and against reading them while what does not stay is written; its
          memory
  import  `import gemini` after torch, in processes in turns with `import torch`, bytecode cached: its time,
          and the large packages that it must not load
  kills   runs of gemini finetune and gemini train, of GeminiTrainer and of Lightning, which SIGKILL, SIGTERM
          and SIGINT end at random moments, some under a limit on files: whether the runs that go on have the
          losses, weights and files of one that nothing has ended

A figure is a median, with the lowest and highest; a ratio is the median of the ratios within a turn.
'resume', 'load' and 'kills' need transformers, 'resume' accelerate, too (pip install "gemini-runtime[hf]"),
'kills' lightning and torchao as well.

examples:
  gemini bench programs --out benchmarks/results/programs.json
  gemini bench programs --only resume --disk-dir /mnt/nvme
  gemini bench programs --only kills --kills 50
  gemini bench programs --quick --json

{EXIT_CODES.format(tiny="with --quick")}
Measure on a machine that does nothing else. A case takes 1 to 4 minutes, 'kills' 20; 'resume' and 'load' need
3 GB of memory and for a while 5 and 7 GB of disk.
"""


def add_programs(kinds: Any) -> None:
    """Add ``gemini bench programs`` to ``kinds``."""
    parser = kinds.add_parser(
        "programs",
        help="what programs pay: engine and trainer, saving and resuming, the import",
        description="Measure what a program pays for the ways in which it may use the runtime.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_session_options(parser, quick="tiny settings", held="checkpoints and the DISK tier get")
    parser.add_argument(
        "--kills", type=int, metavar="N", help="kills of the case of that name (default: 200; --quick: 2)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the cases of ``gemini bench programs``, print the record, and return the exit code."""
    from gemini_bench import programs

    if options.kills is not None and options.kills < 1:
        raise ConfigError(f"--kills is {options.kills}; it must be 1 or more")
    return run_session(programs, options, kills=options.kills)
