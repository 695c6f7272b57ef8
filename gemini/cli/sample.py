"""``gemini sample``: generates texts with a model that need not fit in memory."""

from __future__ import annotations

import argparse
import resource
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

from gemini.cli.options import options_named, refuse_ranks, size
from gemini.system.config import format_bytes

EPILOG = """\
examples:
  gemini sample out/tuned/model --prompt "Once upon a time" --max-new-tokens 100
      the most likely continuation
  gemini sample ./llama --adapter out/lora/model --chat --prompt "Who are you?" --prompt "Why?" \\
      --temperature 0.7 --top-p 0.9 --seed 1 --device-bytes 4GiB
      two random answers of a model with adapters, in 4 GiB

Weights are read from the checkpoint when they are needed: nothing is copied, and a model
larger than --device-bytes runs at the speed of the disk. Text goes to standard output as it grows. Tokens
per second, and the peak of memory, go to standard error at the end.

exit codes:
  0 done    2 an error    130 Ctrl-C

Sizes are bytes: 65536, 64KiB, 512MiB, 4GiB.
"""


def add_parser(subparsers: Any) -> None:
    """Add the ``sample`` command to ``subparsers``."""
    parser = subparsers.add_parser(
        "sample",
        help="generate text with a model within byte budgets",
        description="Generate text with a causal language model within the memory that you allow. The model "
        "is in a directory in the format of save_pretrained().",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="the model: config.json, safetensors")
    parser.add_argument(
        "--prompt", action="append", required=True, metavar="TEXT", help="the text to continue; repeatable"
    )
    parser.add_argument("--adapter", type=Path, metavar="DIR", help="directory of adapters saved by PEFT")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="format the prompt as a user message with the tokenizer's chat template",
    )
    _add_choices(parser.add_argument_group("sampling"))
    _add_budgets(parser.add_argument_group("memory"))
    parser.set_defaults(run=run)


def _add_choices(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-new-tokens",
        type=int,
        default=64,
        metavar="N",
        help="maximum number of new tokens (default: 64)",
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="X",
        help="0: always the most likely token; 1: the model's probabilities; higher is more random "
        "(default: 0)",
    )
    group.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the most likely tokens with this total probability (default: 1, all tokens)",
    )
    group.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of the sampling, the same for each prompt (default: 0)",
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
        help="DISK tier for weights that cannot be read from the checkpoint directly, and for a GPU",
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
