"""``gemini sample``: generates texts with a model that need not fit in memory."""

from __future__ import annotations

import argparse
import resource
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

from gemini.cli.train import options_named, refuse_ranks
from gemini.errors import ConfigError
from gemini.system.config import format_bytes, parse_bytes

EPILOG = """\
examples:
  gemini sample out/tuned/model --prompt "Once upon a time" --max-new-tokens 100
      the likeliest continuation
  gemini sample ./llama --adapter out/lora/model --chat --prompt "Who are you?" --prompt "Why?" \\
      --temperature 0.7 --top-p 0.9 --seed 1 --device-bytes 4GiB
      two answers of a model with adapters, drawn at random, in 4 GiB

The weights are read where the checkpoint has them, whenever they are needed: nothing is copied, and a model
larger than --device-bytes works, at the speed of the disk. Texts go to standard output as they grow. Tokens
per second, and the peak of memory, go to standard error at the end.

exit codes:
  0 done    2 an error, with its reason    130 ended by Ctrl-C

Sizes are bytes: 65536, 64KiB, 512MiB, 4GiB.
"""


def add_parser(subparsers: Any) -> None:
    """Add the ``sample`` command to ``subparsers``."""
    parser = subparsers.add_parser(
        "sample",
        help="print what a model says, within byte budgets",
        description="Generate text with a causal language model from a directory that save_pretrained() has "
        "made, in as much memory as you allow.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="the model: config.json, safetensors")
    parser.add_argument(
        "--prompt", action="append", required=True, metavar="TEXT", help="what to continue; repeatable"
    )
    parser.add_argument("--adapter", type=Path, metavar="DIR", help="adapters that PEFT has saved")
    parser.add_argument(
        "--chat", action="store_true", help="ask by the tokenizer's chat template, as a user would"
    )
    _add_choices(parser.add_argument_group("sampling"))
    _add_budgets(parser.add_argument_group("memory"))
    parser.set_defaults(run=run)


def _add_choices(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-new-tokens", type=int, default=64, metavar="N", help="at most so many tokens (default: 64)"
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="X",
        help="0: the likeliest token; 1: as the model gives the odds; higher is wilder (default: 0)",
    )
    group.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw from the likeliest tokens that together have this probability (default: 1, all)",
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the draws, the same for each prompt (default: 0)"
    )


def _add_budgets(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--device", default="cpu", metavar="DEVICE", help="where operators compute: cpu, cuda, cuda:1"
    )
    group.add_argument(
        "--device-bytes",
        type=size,
        metavar="SIZE",
        help="budget of DEVICE, where operators compute; default: the free memory, less a margin",
    )
    group.add_argument(
        "--host-bytes",
        type=size,
        metavar="SIZE",
        help="budget of HOST, CPU memory beside a GPU; default: chosen by the runtime",
    )
    group.add_argument(
        "--disk-dir",
        metavar="DIR",
        help="for weights that cannot be read from the checkpoint as they are, and on a GPU",
    )


def run(options: argparse.Namespace) -> int:
    """Generate, print the summary, and return the exit code."""
    refuse_ranks("gemini sample")
    from gemini.jobs.after_training.sampling import SampleConfig, Sampled, sample

    config = SampleConfig(
        model=options.model,
        prompts=tuple(options.prompt),
        adapter=options.adapter,
        chat=options.chat,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
        device=options.device,
        device_bytes=options.device_bytes,
        host_bytes=options.host_bytes,
        disk_dir=options.disk_dir,
    )
    from gemini.cli.console import silence_transformers

    silence_transformers()
    sampled = Sampled()
    say = partial(print, end="", flush=True)
    try:
        with options_named(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations between transformers and PEFT
            sample(config, say, sampled)
    except KeyboardInterrupt:
        say("\n")
        raise
    finally:
        if sampled.num_tokens:
            print(summary(sampled), file=sys.stderr)
    return 0


def summary(sampled: Any) -> str:
    """Return a line about the tokens, time and memory."""
    budget = "" if sampled.budget_bytes is None else f" of {format_bytes(sampled.budget_bytes)}"
    process_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return (
        f"{sampled.num_tokens:,} tokens in {sampled.seconds:.1f} s, {sampled.tokens_per_second:.1f} "
        f"tokens/s; {format_bytes(sampled.model_data_bytes)} of model data, DEVICE peak "
        f"{format_bytes(sampled.peak_bytes)}{budget}, {format_bytes(sampled.read_bytes)} read; process peak "
        f"{format_bytes(process_bytes)}"
    )


def size(text: str) -> int | None:
    """Parse a size in bytes; "auto" gives None."""
    try:
        return None if text == "auto" else parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
