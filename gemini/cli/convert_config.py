"""``gemini convert-config``: prints our program for a configuration of DeepSpeed or Accelerate."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.text import Text

from gemini.cli import accelerate_config, deepspeed_config
from gemini.cli.console import Console, print_json
from gemini.cli.conversion import AUTO, NOT_NEEDED, NOT_SUPPORTED, TAKEN, Conversion, Document, Target
from gemini.cli.conversion_programs import program
from gemini.cli.deepspeed_keys import KEYS
from gemini.errors import ConfigError, InputError, printable
from gemini.system.input_files import read_document

HELP = """\
FILE is one of
  ds_config.json         a configuration of DeepSpeed
  default_config.yaml    what accelerate config writes, with FSDP or DeepSpeed
  fsdp_config.json       for fsdp_config= of TrainingArguments
gemini only reads FILE and runs nothing from it.

Standard output gets a program that does the same with a managed model:
  --for trainer       TrainingArguments and GeminiTrainer; what the file
                      leaves "auto" stays in your TrainingArguments
  --for accelerate    GeminiAccelerator and its loop
  --for loop          GeminiDDP, GeminiOptimizer and a plain loop
Without --for: a DeepSpeed file with "auto" values, or an FSDP file, is for the
Trainer; a file of accelerate config is for Accelerate; any other file for a loop.

Standard error lists every key of the file:
  taken               and the option that it became
  not needed          and why
  not supported       and what to do instead
The learning rate of a scheduler equals DeepSpeed's at every update.

examples:
  gemini convert-config ds_config.json
  gemini convert-config ds_config.json --for trainer > train.py
  gemini convert-config default_config.yaml --for accelerate
  gemini convert-config ds_config.json --json
"""
_NO_AUTO_OF_THE_TRAINER = ("zenflow", "pipeline", "autotuning")


def add_parser(subparsers: Any) -> None:
    """Add the ``convert-config`` command to ``subparsers``."""
    parser = subparsers.add_parser(
        "convert-config",
        help="convert a DeepSpeed or Accelerate config to a program",
        description="Convert a DeepSpeed or Accelerate configuration to a program, and report how "
        "each key was handled.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a JSON or YAML file, see below")
    parser.add_argument(
        "--for",
        dest="target",
        choices=[target.value for target in Target],
        help="the kind of program to print (default: chosen from the file)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object: program, and keys with verdicts"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the conversion; return 0.

    Raises:
        ConfigError: the file cannot be read, has no known key, or has a value that its own library would
            refuse.
    """
    found = convert(options.file, None if options.target is None else Target(options.target))
    if options.json:
        print_json(as_json(found))
        return 0
    print(program(found), end="")
    console = Console(stderr=True, soft_wrap=True, highlight=False)  # soft_wrap: never truncate a key
    for line in _report(found, is_guessed=options.target is None):
        console.print(Text(line))
    return 0


def _report(found: Conversion, *, is_guessed: bool) -> list[str]:
    """Return the lines about all keys, grouped by verdict."""
    others = " or ".join(f"--for {target.value}" for target in Target if target is not found.target)
    guess = f"; for another program: {others}" if is_guessed else ""
    lines = [f"keys of {found.source}, --for {found.target.value}{guess}"]
    for verdict in (TAKEN, NOT_NEEDED, NOT_SUPPORTED):
        said = [(key, text) for key, own, text in found.keys if own == verdict]
        if said:
            lines += ["", f"{verdict}:", *(f"  {printable(key)}: {printable(text)}" for key, text in said)]
    return lines


def as_json(found: Conversion) -> dict[str, Any]:
    """Return a conversion as plain data."""
    return {
        "source": found.source,
        "target": found.target.value,
        "program": program(found),
        "keys": [{"key": key, "verdict": verdict, "what": text} for key, verdict, text in found.keys],
    }


def convert(path: Path, target: Target | None = None) -> Conversion:
    """Convert the configuration at ``path``. Without a ``target``, the program is chosen from the file.
    Raises ConfigError."""
    document = _read(path)
    source = ascii(path.name)[1:-1]  # a file name may contain newlines
    if accelerate_config.is_accelerates(document):
        found = accelerate_config.convert(document, source, target or Target.ACCELERATE)
    elif accelerate_config.is_of_fsdp(document):
        found = accelerate_config.convert_fsdp(document, source, target or Target.TRAINER)
    else:
        _require_known(document, path)
        target = target or (Target.TRAINER if _leaves_to_trainer(document, source) else Target.LOOP)
        found = deepspeed_config.convert(document, source, target)
    return found


def _leaves_to_trainer(document: Any, source: str) -> bool:
    """Return whether a DeepSpeed file has "auto" values that transformers' Trainer fills in."""
    return any(
        isinstance(value, str) and value == AUTO and not {*key} & {*_NO_AUTO_OF_THE_TRAINER}
        for key, value in Document(document, source).leaves()
    )


def _require_known(document: Any, path: Path) -> None:
    """Raise ConfigError for a document without any known key."""
    known = {key.split(".")[0] for key in KEYS} | _TOP
    if not isinstance(document, dict) or not document or {str(key) for key in document} & known:
        return
    keys = printable(", ".join(str(key) for key in list(document)[:5]))
    raise ConfigError(
        f"{path} has no key of DeepSpeed or Accelerate, only {keys}; name ds_config.json, or the "
        "YAML file that accelerate config writes"
    )


_TOP = {"bf16", "bfloat16", "fp16", "zero_optimization", "optimizer", "scheduler", "train_batch_size",
        "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}  # fmt: skip


def _read(path: Path) -> Any:
    kind = path.suffix if path.suffix in (".yaml", ".yml") else ".json"
    try:
        return read_document(path, "the configuration", kind=kind)
    except InputError as error:
        if kind != ".json" or " is not JSON: " not in str(error):
            raise
        raise InputError(f"{error}; name a YAML file .yaml; save a Python dict as JSON") from error
