"""``gemini convert-config``: what a configuration of DeepSpeed or Accelerate becomes here."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from gemini.cli import accelerate_config, deepspeed_config
from gemini.cli.console import Console, print_json
from gemini.cli.conversion import NONE, Conversion
from gemini.errors import ConfigError, InputError, printable
from gemini.system.input_files import read_document

HELP = """\
FILE is ds_config.json, or the YAML that accelerate config writes (FSDP or DeepSpeed). It is only read:
nothing in it is run. Standard output is a program; what became of each key goes to standard error.

examples:
  gemini convert-config ds_config.json
  gemini convert-config default_config.yaml > train.py
  gemini convert-config ds_config.json --json
"""


def add_parser(subparsers: Any) -> None:
    """Add the ``convert-config`` command to ``subparsers``."""
    parser = subparsers.add_parser(
        "convert-config",
        help="print our call for a DeepSpeed or Accelerate config",
        description="Print the call that a configuration becomes, and name each key that has no equivalent.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="ds_config.json, or a YAML of accelerate config"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object: program, and keys with verdicts"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the conversion; return 0.

    Raises:
        ConfigError: the file cannot be read, holds what its own library refuses, or no key that is known.
    """
    found = convert(options.file)
    if options.json:
        print_json(found.as_json())
        return 0
    print(found.program(), end="")
    table = Table("key", "", "what to do", title=Text(f"keys of {found.source}"))
    for key, verdict, text in found.keys:
        table.add_row(*(Text(printable(each)) for each in (key, verdict, text)))
    Console(stderr=True).print(table)
    return 0


def convert(path: Path) -> Conversion:
    """Return what the configuration at ``path`` becomes. Raises ConfigError."""
    document = _read(path)
    is_accelerate = isinstance(document, dict) and document.keys() & {"distributed_type", "fsdp_config"}
    part = accelerate_config if is_accelerate else deepspeed_config
    found: Conversion = part.convert(document, ascii(path.name)[1:-1])  # one line of any name
    if document and document.keys() <= {key for key, verdict, _ in found.keys if verdict == NONE}:
        keys = printable(", ".join(str(key) for key in list(document)[:5]))
        raise ConfigError(
            f"{path} has no key of a configuration of DeepSpeed or Accelerate, but {keys}; "
            "name ds_config.json, or the YAML that accelerate config writes"
        )
    return found


def _read(path: Path) -> Any:
    kind = path.suffix if path.suffix in (".yaml", ".yml") else ".json"
    try:
        return read_document(path, "the configuration", kind=kind)
    except InputError as error:
        if kind != ".json" or " is no JSON: " not in str(error):
            raise
        raise InputError(f"{error}; name a YAML file .yaml, and save a Python dict as JSON") from error
