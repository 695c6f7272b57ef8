"""``gemini bench``: measure on this machine, against stated targets."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from gemini.system.config import parse_bytes
from gemini_bench.cli.checkpoint import add_checkpoint
from gemini_bench.cli.disk import add_io, add_nvme
from gemini_bench.cli.exact import add_exact
from gemini_bench.cli.gpu import add_gpu
from gemini_bench.cli.inference import add_inference
from gemini_bench.cli.moe import add_moe
from gemini_bench.cli.output import EXIT_CODES, add_common, check_paths, command, progress, publish
from gemini_bench.cli.parallel import add_parallel
from gemini_bench.cli.placement import add_placement
from gemini_bench.cli.plan import add_plan
from gemini_bench.cli.programs import add_programs
from gemini_bench.cli.zero import add_zero

RUNTIME_HELP = f"""\
cases:
  resident   everything fits: step time and peak memory of GPT-2 124M against plain torch, paired
  offload    half and a quarter of its model data on DEVICE, the rest on DISK: time, stalls, traffic, memory
  preop      the cost of one PreOp: in the core, and around a small operator
  many       25,000 and 100,000 parameters of 64 elements: wrapping, the first step and state_dict(), each per
             parameter; and how many files of the runtime it takes to wrap, forward, save and load
  loss       a head and its loss by tiles of rows against torch's: processor time, peak memory, gradients
  largest    the largest model under a real limit on resident memory, against plain torch
  compact    the same with 8 bytes a parameter: 120 times the parameters of plain torch
  endurance  2,000 steps under a tight budget: growth of memory, open files and disk space

examples:
  gemini bench runtime --out benchmarks/results/runtime.json
  gemini bench runtime --only preop resident
  gemini bench runtime --quick --json

{EXIT_CODES.format(tiny="with --quick")}
Measure on a machine that does nothing else. A full run takes 10 to 30 minutes and for a while 20 GB of disk.
"""

ADAM_HELP = f"""\
cases on the CPU:
  limit    what memory can do: 4 reads and 3 writes as in an fp32 step (28 bytes per parameter), and reads
  fp32     fp32 parameter, gradient and moments: share of that limit; torch's fused AdamW, DeepSpeed's CPUAdam
  bf16     fp32 master, bf16 gradient, bf16 copy out in one pass; DeepSpeed doing the same in three passes,
           and its own bf16 step, which keeps no master
  int8     8-bit and bf16 moments against the fp32 case
  sumsq    sum of squares with a finite check: share of read bandwidth
  small    10,000 small tensors against one of the same total size, through the optimizers' step();
           the kernel call alone; 10,000 tensors of 1,024 elements
  steps    step() beside torch's fused AdamW from 1M to --numel parameters, in one tensor and in 100, at rest
           and right after a matrix product
  quality  a small GPT trained with fp32, bf16 and int8 states: its final losses
case on a GPU:
  cuda     FusedAdam: share of the device's copy bandwidth; torch's fused AdamW

In every round each contender runs once, on arrays of its own, and the order rotates. A figure is the median
over the rounds, with the lowest and highest; a ratio is the median of the ratios within the rounds.
On the CPU rows of ours time the call of the kernel, but in 'small' and 'steps' and where they say step();
rows of peers time their optimizer's step().
DeepSpeed is optional: without it fp32 is judged against torch alone, which the row says, and the targets of
bf16 are not measured: they are neither met nor missed, and the last line says how many there are.

examples:
  gemini bench adam --out benchmarks/results/adam.json
  gemini bench adam --only fp32 bf16 --threads 2
  gemini bench adam --numel 1M --repeats 3              do the cases run at all?
  gemini bench adam --device cuda --json

{EXIT_CODES.format(tiny="below 32M parameters")}
Measure on a machine that does nothing else. The default needs 12 GB of free memory and takes 5 to 10 minutes.
"""


def add_parser(subparsers: Any) -> None:
    """Add the ``bench`` command to ``subparsers``."""
    parser = subparsers.add_parser(
        "bench",
        help="measure on this machine, against stated targets",
        description="Measure on this machine, against stated targets.",
    )
    kinds = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    _add_runtime(kinds)
    _add_adam(kinds)
    add_io(kinds)
    add_nvme(kinds)
    add_placement(kinds)
    add_checkpoint(kinds)
    add_zero(kinds)
    add_parallel(kinds)
    add_plan(kinds)
    add_inference(kinds)
    add_moe(kinds)
    add_programs(kinds)
    add_exact(kinds)
    add_gpu(kinds)


def _add_runtime(kinds: Any) -> None:
    runtime = kinds.add_parser(
        "runtime",
        help="the whole runtime: time, memory, model size, endurance",
        description="Measure the whole runtime, every case in processes of its own, watched from outside.",
        epilog=RUNTIME_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    runtime.add_argument(
        "--quick", action="store_true", help="tiny settings: see that every case runs, no figures"
    )
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
        help="real memory limit of the cases largest (default: 1GiB) and compact (640MiB); quick: 448MiB",
    )
    add_common(runtime)
    runtime.set_defaults(run=run)


def _add_adam(kinds: Any) -> None:
    adam = kinds.add_parser(
        "adam",
        help="the Adam kernels: against the limit of memory, torch and DeepSpeed",
        description="Measure the Adam kernels, every case in processes of its own.",
        epilog=ADAM_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    adam.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where the parameters are (default: cpu)"
    )
    adam.add_argument(
        "--numel", metavar="COUNT", help="parameters per contender: 65536, 1M, 1.5B (default: 100M; cuda: 1B)"
    )
    adam.add_argument(
        "--threads",
        nargs="+",
        type=int,
        metavar="N",
        help="numbers of threads to measure with, at most one per core (default: 1 2)",
    )
    adam.add_argument("--repeats", type=int, default=15, metavar="N", help="rounds that count (default: 15)")
    add_common(adam)
    adam.set_defaults(run=run_adam)


def run(options: argparse.Namespace) -> int:
    """Run the cases of ``gemini bench runtime``, print the record, and return the exit code."""
    from gemini_bench import runtime
    from gemini_bench.session import Session

    names = runtime.chosen(options.only)
    check_paths(options.disk_dir, options.out)
    session = Session(
        disk_dir=options.disk_dir.resolve(),
        quick=options.quick,
        limit_bytes=parse_bytes(options.limit, name="--limit"),
        progress=progress(),
    )
    return publish(runtime.run(session, names, command()), options)


def run_adam(options: argparse.Namespace) -> int:
    """Run the cases of ``gemini bench adam``, print the record, and return the exit code."""
    from gemini_bench import adam
    from gemini_bench.adam_measure import Settings, parse_count
    from gemini_bench.session import Session

    names = adam.chosen(options.only, options.device)
    check_paths(Path(), options.out)
    cores = len(os.sched_getaffinity(0))
    settings = Settings(
        numel=adam.DEFAULT_NUMEL[options.device] if options.numel is None else parse_count(options.numel),
        threads=tuple(options.threads or sorted({1, min(2, cores)})),
        repeats=options.repeats,
    )
    session = Session(
        disk_dir=Path(), quick=settings.numel < adam.SERIOUS_NUMEL, progress=progress(), record=options.out
    )
    return publish(adam.run(session, settings, options.device, names, command()), options)
