"""``gemini export``: writes a model as files for other programs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gemini.cli.console import print_json
from gemini.errors import ConfigError
from gemini.system.config import format_bytes

_FORMATS = ("safetensors", "gguf")
_TYPES = ("f16", "bf16", "q8_0")

EPILOG = """\
examples:
  gemini export out/merged model.gguf --type q8_0
      one file for llama.cpp and programs built on it, with 8.5 bits per weight
  gemini export out/merged out/half --type f16
      the same directory with weights in another dtype

formats:
  safetensors    a directory like MODEL: shards, config, tokenizer. --type f16 or bf16; default: unchanged
  gguf           one file with weights, hyperparameters, tokenizer and chat template. --type f16 (default),
                 bf16 or q8_0; vectors stay fp32. Needs pip install 'gemini-runtime[gguf]'

GGUF is written for Llama, Mistral, SmolLM2, Qwen2, Qwen3 and GPT-2; any other model is an error. One
tensor is in memory at a time. OUT must not exist; it appears when it is complete.

exit codes:
  0 done    2 an error; nothing was written
"""


def add_parser(subparsers: Any) -> None:
    """Add the ``export`` command to ``subparsers``."""
    parser = subparsers.add_parser(
        "export",
        help="export a model to GGUF, or to another dtype",
        description="Export the model in MODEL for other programs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="the model: config.json, safetensors")
    parser.add_argument("out", type=Path, metavar="OUT", help="the output file or directory")
    parser.add_argument(
        "--format", choices=_FORMATS, help="default: gguf if OUT ends in .gguf, else safetensors"
    )
    parser.add_argument("--type", choices=_TYPES, help="dtype of the weights; see below")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Export, print what was written, and return the exit code."""
    form = options.format or ("gguf" if options.out.suffix == ".gguf" else "safetensors")
    notes: tuple[str, ...] = ()
    if form == "gguf":
        from gemini.jobs.after_training.gguf_file import export_gguf

        exported = export_gguf(options.model, options.out, options.type or "f16")
        copied, notes = exported.copied, exported.notes
    else:
        from gemini.jobs.after_training.model_copy import DTYPES, export_safetensors

        if options.type is not None and options.type not in DTYPES:
            raise ConfigError(
                f"--type {options.type} is a type of GGUF; give --format gguf, or --type "
                f"{' or '.join(DTYPES)}"
            )
        copied = export_safetensors(
            options.model, options.out, None if options.type is None else DTYPES[options.type]
        )
    if options.json:
        found = {"output": str(options.out), "format": form, "tensors": copied.num_tensors}
        print_json({**found, "bytes": copied.nbytes, "notes": list(notes)})
    else:
        print(f"{options.out}: {form}, {copied.num_tensors:,} tensors, {format_bytes(copied.nbytes)}")
        for note in notes:
            print(f"note: {note}")
    return 0
