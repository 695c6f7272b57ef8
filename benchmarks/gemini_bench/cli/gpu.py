"""``gemini bench gpu``: the command."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gemini.system.config import parse_bytes
from gemini_bench.cli.output import EXIT_CODES, add_common, check_paths, command, progress, publish

HELP = f"""\
cases:
  copies     chunks of 32 and 64 MiB between HOST and DEVICE through the runtime's engine, each direction and
             both at once: share of what torch gets out of page-locked memory on streams of its own
  remap      what the host takes to put other memory under a window of 64 MiB, and whether that waits for what
             operators and copies have under way
  resident   a LLaMA-like model of 1.3 billion parameters in bf16, everything on DEVICE: step time and peak
             of the GPU's memory against plain torch with fp32 masters and fused AdamW
  offload    the same model with 40 % of its model data on DEVICE, the rest on HOST, norm clipped: step time
             against the longer of computing (the same model, resident) and what the bytes take on the links
  bound      7 billion parameters in bf16, tokens enough that computing bounds a step, states on HOST, norm
             clipped: against the step of a GPU with memory for all (computing, and the update of what fits
             for all), where floor F0 allows that; and against what no schedule can beat if the CPU makes all
             updates: F0, the longest of computing, links and updates; F1, updates that end before the next
             step; F2, those that wait for the norm and run beside the next forward pass. With --out
             FILE.json the timeline of two more steps goes to FILE_timeline.html
  largest    the deepest model that DEVICE, HOST (up to 120 GiB) and the disk (up to 256 GiB) hold together,
             trained: share of what their bytes could hold, tokens per second
  peers      1.3 billion parameters, all states in host memory: time of a step and host memory against torch
             FSDP2, torchao and DeepSpeed, as far as they are installed
  preop      what one PreOp takes of the host's time, around a small operator

Contenders live in one process and take alternating turns; those of bound and peers come one after the other,
in processes of their own. A figure is the median over the turns, with the lowest and highest; a ratio is the
median of the ratios within the turns. Copies are timed by the GPU's own events, steps from an idle GPU to an
idle GPU. Where memory is short the models have fewer layers; the first row says how many parameters that
leaves.

examples:
  gemini bench gpu --out benchmarks/results/gpu.json
  gemini bench gpu --only copies
  gemini bench gpu --only largest --disk-dir /mnt/nvme
  gemini bench gpu --only largest --limit 64GiB         of HOST and the disk no more than this, each
  gemini bench gpu --quick                     on a GPU, everything tiny: do the cases run at all?
  gemini bench gpu --simulated --json          the same without a GPU: on one simulated in host memory

{EXIT_CODES.format(tiny="with --quick or --simulated")}
Measure on a machine that does nothing else. All but bound, largest and peers take 70 GB of
the GPU's memory and 30 GB of the host's, of which most is page-locked. Of the host's memory bound takes up to
110 GB, peers 45 GB, largest 130 GB and nine tenths of what is free on the disk. On an H200
bound took 3 minutes, and all but largest and peers 7. With less memory models are smaller.
"""


def add_gpu(kinds: Any) -> None:
    """Add ``gemini bench gpu`` to ``kinds``."""
    parser = kinds.add_parser(
        "gpu",
        help="the runtime on a GPU: copies, resident and offloaded steps, PreOps",
        description="Measure the runtime on the current CUDA GPU, every case in processes of its own.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny settings: see that every case runs, no figures"
    )
    parser.add_argument(
        "--simulated",
        action="store_true",
        help="on a GPU simulated in host memory, with tiny settings: see that every case runs; nothing is "
        "judged",
    )
    parser.add_argument(
        "--disk-dir",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="where 'largest' puts the DISK tier's file (default: the current directory)",
    )
    parser.add_argument(
        "--limit",
        metavar="SIZE",
        help="the most that 'largest' takes of HOST, and of the disk, where less than all is to be filled",
    )
    add_common(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the cases of ``gemini bench gpu``, print the record, and return the exit code."""
    from gemini_bench import gpu
    from gemini_bench.gpu_device import CUDA, SIMULATED
    from gemini_bench.session import Session

    device = SIMULATED if options.simulated else CUDA
    names = gpu.chosen(options.only, device)
    check_paths(options.disk_dir, options.out)
    quick = options.quick or options.simulated
    session = Session(
        disk_dir=options.disk_dir.resolve(),
        quick=quick,
        limit_bytes=parse_bytes(options.limit, name="--limit"),
        progress=progress(),
        record=options.out,
    )
    return publish(gpu.run(session, device, names, command()), options)
