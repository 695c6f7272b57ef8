"""Common parts of the benchmark commands: options, progress, the record and the exit code."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gemini.cli.console import print_json
from gemini.errors import ConfigError

EXIT_MISSED = 1
_PIPED_WIDTH = 130  # columns where nobody says how many there are

EXIT_CODES = """\
exit codes:
  0 every target that was measured is met ({tiny}: every case ran)
  1 a target missed or a case failed
  2 an error
"""


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add the options that every benchmark has."""
    parser.add_argument("--only", nargs="+", metavar="CASE", help="run these cases (default: all)")
    parser.add_argument(
        "--json", action="store_true", help="print the record as one JSON object, not as a table"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the record to this file")


def add_session_options(
    parser: argparse.ArgumentParser, *, quick: str, held: str = "the DISK tier gets"
) -> None:
    """Add the options of a benchmark whose cases share a :class:`gemini_bench.session.Session`. ``quick``:
    what is done with ``--quick``; ``held``: what lies in ``--disk-dir``."""
    parser.add_argument("--quick", action="store_true", help=f"{quick}: see that every case runs, no figures")
    parser.add_argument(
        "--disk-dir",
        type=Path,
        default=Path(),
        metavar="DIR",
        help=f"where {held} a directory, removed at the end (default: .)",
    )
    add_common(parser)


def run_session(benchmark: Any, options: argparse.Namespace, **own: Any) -> int:
    """Run the cases of ``benchmark``, a module, print the record, and return the exit code. ``own``: further
    options of its ``run``."""
    from gemini_bench.session import Session

    names = benchmark.chosen(options.only)
    check_paths(options.disk_dir, options.out)
    session = Session(
        disk_dir=options.disk_dir.resolve(), quick=options.quick, progress=progress(), record=options.out
    )
    return publish(benchmark.run(session, names, command(), **own), options)


def check_paths(directory: Path, out: Path | None, *, option: str = "--disk-dir") -> None:
    """Raise now if a path would fail only after minutes of measuring; ``option`` is the option that gave
    ``directory``.
    """
    if not directory.is_dir():
        raise ConfigError(f"{option} {directory} is not a directory; create it or name another")
    if out is None:
        return
    target = out.resolve()
    if not target.parent.is_dir():
        raise ConfigError(f"--out {out}: its directory does not exist; create it or name another file")
    if target.is_dir():
        raise ConfigError(f"--out {out} is a directory; name a file in it")
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise ConfigError(f"--out {out} cannot be written; change the permissions or name another file")


def progress() -> Callable[[str], None]:
    """Return a function that reports on standard error which case is being measured."""
    from gemini.cli.console import Console

    console = Console(stderr=True)
    return lambda text: console.print(text, style="dim", markup=False, highlight=False)


def command() -> list[str]:
    """Return the command line as it belongs into a record: with paths as from here, and of those elsewhere,
    which are this machine's, the last part."""
    return ["gemini", *(shlex.quote(_from_here(argument)) for argument in sys.argv[1:])]


def _from_here(argument: str) -> str:
    path = Path(argument)
    if not path.is_absolute():
        return argument
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else path.name or argument


def publish(
    record: Mapping[str, Any],
    options: argparse.Namespace,
    *,
    show: Callable[[Mapping[str, Any], Any], None] | None = None,
) -> int:
    """Print and write a record; return the exit code that it deserves. ``show`` prints it to a console; None:
    as the table of every benchmark."""
    from gemini.cli.console import Console
    from gemini_bench.cases import write_record
    from gemini_bench.table import render

    if options.json:
        print_json(record)
    else:
        (show or render)(record, Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH))
    if options.out is not None:  # not before: a disk that is full by now does not cost the figures
        write_record(record, options.out)
    if not_measured := len(record.get("not_measured", ())):
        targets = "1 target" if not_measured == 1 else f"{not_measured} targets"
        install = record.get("install", "deepspeed")
        progress()(f"{targets} not measured: " + (f"install {install}" if install else "see their rows"))
    bad = record["failed"] or (record["missed"] and not record["quick"])
    return EXIT_MISSED if bad else 0
