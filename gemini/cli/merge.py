"""``gemini merge``: merges PEFT adapters into the weights that they were trained on."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

from gemini.cli.console import print_json, silence_transformers
from gemini.system.config import format_bytes

EPILOG = """\
examples:
  gemini finetune --model ./llama --data chats.jsonl --output out/lora --lora 16
  gemini merge ./llama out/lora/model out/merged
      every program that loads ./llama loads out/merged: transformers, vLLM, gemini sample, gemini export

One tensor is in memory at a time. The weights equal those of PEFT's merge_and_unload(), bit for bit. OUT has
the shards, config and tokenizer of BASE (the tokenizer of ADAPTER, if it has one), and a model card.

Adapters: LoRA, rsLoRA, DoRA, with modules_to_save. BASE must be their base model. OUT must not exist; it
appears when it is complete.

exit codes:
  0 done    2 an error; nothing was written
"""


def add_parser(subparsers: Any) -> None:
    """Add the ``merge`` command to ``subparsers``."""
    parser = subparsers.add_parser(
        "merge",
        help="merge LoRA adapters into the weights of their base model",
        description="Merge the adapters in ADAPTER into the weights of the model in BASE.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("base", type=Path, metavar="BASE", help="the model: config.json, safetensors")
    parser.add_argument(
        "adapter",
        type=Path,
        metavar="ADAPTER",
        help="adapters saved by PEFT: adapter_config.json, adapter_model.safetensors",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the output directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Merge, print the result, and return the exit code."""
    from gemini.jobs.after_training.adapter_merge import merge

    silence_transformers()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations between transformers and PEFT
        merged = merge(options.base, options.adapter, options.out)
    copied = merged.copied
    if options.json:
        print_json(
            {
                "output": str(options.out),
                "tensors": copied.num_tensors,
                "merged": merged.num_merged,
                "replaced": merged.num_replaced,
                "bytes": copied.nbytes,
            }
        )
    else:
        print(
            f"{options.out}: {copied.num_tensors:,} tensors, {format_bytes(copied.nbytes)}; adapters merged "
            f"into {merged.num_merged:,}, {merged.num_replaced:,} replaced"
        )
    return 0
