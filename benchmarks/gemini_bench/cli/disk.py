"""``gemini bench io`` and ``gemini bench nvme``: the commands."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gemini.errors import ConfigError
from gemini.system.config import parse_bytes
from gemini_bench.cli.output import EXIT_CODES, add_common, check_paths, command, progress, publish

IO_HELP = f"""\
cases:
  direct    writing and reading SIZE in a row with O_DIRECT: ours, fio, DeepSpeed's async I/O, TensorNVMe
  memory    the same on tmpfs (/dev/shm, at most 1 GiB), where no disk drifts, against fio's engines
  depth     requests at the device over one long transfer, and system calls per batch
  cpu       processor time of the engine per GB
  checksum  reading and writing with and without CRC32C of every block

In every round each contender writes once, then each reads once, and the order rotates. Ours, fio and
DeepSpeed write and read the same space on the disk, so that no place on it favours one of them; overwriting
allocates nothing. A figure is the median over the rounds, with the lowest and highest; a ratio is the median
of the ratios within the rounds. Times of fio are its own, without its start.
Peers are optional: what is missing is not measured, and if none is left, the target is neither met nor
missed.

examples:
  gemini bench io --dir /mnt/nvme --out benchmarks/results/io.json
  gemini bench io --only direct --size 1GiB --repeats 3
  gemini bench io --quick --json

{EXIT_CODES.format(tiny="with --quick")}
Measure on a machine that does nothing else. The default needs 13 GB of disk below --dir and takes 5 to 10
minutes.
"""

NVME_HELP = f"""\
cases:
  plain    GPT-2 124M on the CPU, HybridAdam with its states in a file against states in memory: time, memory
  managed  the same under GeminiDDP with its states on DISK, against the longer of computing and moving bytes
  alldisk  everything on DISK, a quarter of the model data on DEVICE, against DeepSpeed ZeRO-3 on NVMe
  stream   the optimizer's step alone over --numel parameters, against reading and writing the same bytes
  memory   host memory that states in a file need, for two sizes of model

Every measurement runs in a process of its own, and the processes of a case take turns. What the disk can do
is measured between steps, in the same process and directory, by reading and writing the same bytes through
the same ring without computing. DeepSpeed is optional: without it the targets of 'alldisk' are not measured.

examples:
  gemini bench nvme --dir /mnt/nvme --out benchmarks/results/nvme.json
  gemini bench nvme --only plain managed
  gemini bench nvme --only stream --numel 250M
  gemini bench nvme --quick --json

{EXIT_CODES.format(tiny="with --quick")}
Measure on a machine that does nothing else. The default needs 12 GB of free memory and 17 GB of disk below
--dir, and takes 15 to 25 minutes.
"""


def add_io(kinds: Any) -> None:
    """Add ``gemini bench io`` to ``kinds``."""
    parser = kinds.add_parser(
        "io",
        help="file I/O: against fio, DeepSpeed's async I/O and TensorNVMe",
        description="Measure AsyncFile, every case in a process of its own.",
        epilog=IO_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_place(parser)
    parser.add_argument("--size", default="4GiB", metavar="SIZE", help="bytes of a file (default: 4GiB)")
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="rounds that count (default: 7)")
    parser.add_argument("--block", default="1MiB", metavar="SIZE", help="bytes of a request (default: 1MiB)")
    parser.add_argument(
        "--depth", type=int, default=8, metavar="N", help="requests at the device at one time (default: 8)"
    )
    add_common(parser)
    parser.set_defaults(run=run_io)


def add_nvme(kinds: Any) -> None:
    """Add ``gemini bench nvme`` to ``kinds``."""
    parser = kinds.add_parser(
        "nvme",
        help="training with states on disk: against computing, the bare disk and DeepSpeed ZeRO-3",
        description="Measure training with states on disk, every measurement in a process of its own.",
        epilog=NVME_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_place(parser)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds per case (default: 3)")
    parser.add_argument(
        "--numel", default="1B", metavar="COUNT", help="parameters of the case 'stream' (default: 1B)"
    )
    add_common(parser)
    parser.set_defaults(run=run_nvme)


def _add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quick", action="store_true", help="tiny settings: see that every case runs, no figures"
    )
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="where the files get a directory, removed at the end; not on tmpfs (default: .)",
    )


def run_io(options: argparse.Namespace) -> int:
    """Run the cases of ``gemini bench io``, print the record, and return the exit code."""
    from gemini_bench import io
    from gemini_bench.io_settings import Settings
    from gemini_bench.session import Session

    names = io.chosen(options.only)
    check_paths(options.dir, options.out, option="--dir")
    settings = Settings(
        size_bytes=_bytes(options.size, "--size"),
        repeats=options.repeats,
        block_bytes=_bytes(options.block, "--block"),
        depth=options.depth,
    )
    session = Session(
        disk_dir=options.dir.resolve(), quick=options.quick, progress=progress(), record=options.out
    )
    return publish(io.run(session, settings, names, command()), options)


def run_nvme(options: argparse.Namespace) -> int:
    """Run the cases of ``gemini bench nvme``, print the record, and return the exit code."""
    from gemini_bench import nvme
    from gemini_bench.adam_measure import parse_count
    from gemini_bench.nvme_settings import Settings
    from gemini_bench.session import Session

    names = nvme.chosen(options.only)
    check_paths(options.dir, options.out, option="--dir")
    settings = Settings(rounds=options.rounds, stream_numel=parse_count(options.numel))
    session = Session(
        disk_dir=options.dir.resolve(), quick=options.quick, progress=progress(), record=options.out
    )
    return publish(nvme.run(session, settings, names, command()), options)


def _bytes(text: str, name: str) -> int:
    found = parse_bytes(text, name=name)
    if not found:
        raise ConfigError(f"{name} is {text!r}; it must be positive")
    return found
