"""``gemini train``: trains a GPT on text, under byte budgets, with a live display."""

from __future__ import annotations

import argparse
import dataclasses
from functools import partial
from typing import Any

from gemini.cli.options import (
    add_memory_options,
    add_option,
    add_report_option,
    add_resume_option,
    options_named,
    refuse_ranks,
)
from gemini.jobs.gpt.config import TrainConfig
from gemini.jobs.run.managed import PRECISIONS
from gemini.jobs.run.run_directory import saved_options

EPILOG = """\
examples:
  gemini train --device-bytes 24MiB --activations plan --disk-dir out/disk --layers 8 --hidden 256 \\
      --heads 8 --verify
      train a model several times larger than 24 MiB, the rest on disk; check that the results are identical
  gemini train --data book.txt --steps 2000 --checkpoint out/book --checkpoint-every 200
      train on your own text with checkpoints; Ctrl-C saves one and ends cleanly
  gemini train --checkpoint out/book --resume
      continue with the same options: the losses equal those of an uninterrupted run, bit for bit;
      only --steps and the options of device, budgets, tiers and policy may change
  gemini train --data book.txt --checkpoint out/book --resume auto
      continue the last run, or start one: for a job scheduler that restarts the command
  gemini train --device-bytes 64MiB --disk-dir out/disk --quiet --json > summary.json
      for scripts: print only the summary, as JSON

in the --checkpoint directory:
  checkpoint/    the two newest (see gemini ckpt)      metrics.jsonl   one line per step
  summary.json   the summary printed at the end        memory.png      memory per tier over one step

exit codes:
  0 done    1 --verify found a difference    2 an error
  130, 143, 138 Ctrl-C, SIGTERM or SIGUSR1: the step was finished, and with --checkpoint saved; to
                continue, run the same command with --resume auto

Sizes are bytes: 65536, 64KiB, 512MiB, 4GiB.
"""


_option = partial(add_option, kind=TrainConfig)


def add_parser(subparsers: Any) -> None:
    """Add the ``train`` command to ``subparsers``."""
    parser = subparsers.add_parser(
        "train",
        help="train a GPT on a text within byte budgets",
        description="Train a decoder-only GPT on the bytes of a text within the memory that you allow. "
        "Parameters, gradients and optimizer states live on three tiers (DEVICE, HOST, DISK); each "
        "operator finds its operands on DEVICE. The losses and weights equal those of a run without "
        "budgets, bit for bit.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_options(parser.add_argument_group("model and text"))
    training = parser.add_argument_group("training")
    _option(
        training,
        "--steps",
        type=int,
        metavar="N",
        help="total optimizer steps, including those before --resume",
    )
    add_training_options(training)
    add_memory_options(parser.add_argument_group("memory"), TrainConfig)
    _add_run_options(parser.add_argument_group("run and output"))
    parser.set_defaults(run=run)


def config_from(options: argparse.Namespace, **changes: Any) -> TrainConfig:
    """Return the config for parsed ``options`` (all or some of them) with ``changes``. For a resumed run,
    options that are not given keep their stored values.

    Raise ConfigError for invalid options, CheckpointError if the stored options cannot be read.
    """
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    given = {name: value for name, value in vars(options).items() if name in names}
    saved = {}
    if given.get("resume", "no") != "no" and given.get("checkpoint"):
        saved = saved_options(given["checkpoint"], TrainConfig, "gemini train")
    return TrainConfig(**{**saved, **given, **changes})


def run(options: argparse.Namespace) -> int:
    """Train, print the summary, and return the exit code."""
    refuse_ranks("gemini train")
    config = config_from(options)
    from gemini.cli.console import Console, print_json
    from gemini.jobs.gpt import job
    from gemini.jobs.run.display import make_display
    from gemini.jobs.run.outcome import difference_table, summary_table

    # Progress goes to standard error: standard output is the result, for people or for a script.
    display = make_display(Console(stderr=True), steps=config.steps, quiet=options.quiet)
    with options_named():
        result = job.run(config, display=display)
    if options.json:
        print_json(result.summary.to_dict())
        return result.exit_code
    console = Console()
    console.print(summary_table(result.summary))
    verdict = result.summary.verify
    if verdict is not None and not verdict.identical:
        console.print(difference_table(verdict))
    return result.exit_code


def add_model_options(group: argparse._ArgumentGroup) -> None:
    """Add the options of the model and its text."""
    _option(
        group,
        "--data",
        metavar="PATH",
        help="a text file, or a directory, read recursively without binary and hidden files; default: the "
        "sources of Python's standard library",
    )
    _option(group, "--layers", type=int, metavar="N", help="transformer blocks")
    _option(group, "--hidden", type=int, metavar="N", help="width of the model; a multiple of --heads")
    _option(group, "--heads", type=int, metavar="N", help="attention heads")
    _option(group, "--seq", type=int, metavar="N", help="length of a training sequence, in bytes of text")
    _option(
        group,
        "--activation-checkpointing",
        action="store_true",
        help="recompute activations in backward instead of keeping them: less memory, more computing",
    )


def add_training_options(group: argparse._ArgumentGroup) -> None:
    """Add the options of a training step."""
    _option(group, "--batch", type=int, metavar="N", help="sequences per forward pass")
    _option(
        group,
        "--accumulate",
        type=int,
        metavar="N",
        help="forward passes per optimizer step; a step has batch * accumulate sequences",
    )
    _option(
        group,
        "--lr",
        type=float,
        metavar="X",
        help="highest learning rate; warms up over a tenth of the steps (at most 100), then falls as a "
        "cosine to a tenth",
    )
    _option(
        group, "--clip", type=float, metavar="X", help="clip the global gradient norm to this; 0: no clipping"
    )
    _option(
        group,
        "--precision",
        choices=PRECISIONS,
        help="dtype of weights and activations; bf16 keeps an fp32 master of every weight",
    )
    _option(
        group, "--seed", type=int, metavar="N", help="seed of the initial weights and of the choice of text"
    )


def _add_run_options(group: argparse._ArgumentGroup) -> None:
    _option(
        group,
        "--checkpoint",
        metavar="DIR",
        help="directory of the run: checkpoint, metrics, summary and plot; default: nothing is saved",
    )
    _option(
        group,
        "--checkpoint-every",
        type=int,
        metavar="N",
        help="also save after every N steps; 0: only at the end and on Ctrl-C",
    )
    add_resume_option(group, TrainConfig, "--checkpoint")
    _option(
        group,
        "--overwrite",
        action="store_true",
        help="discard the run in --checkpoint and start over",
    )
    add_report_option(group, TrainConfig)
    _option(
        group,
        "--verify",
        action="store_true",
        help="afterwards train again from the same seed without the runtime and report whether all losses "
        "and weights are identical; needs memory for all model data on the same device, and at least "
        "the same time",
    )
    group.add_argument("--json", action="store_true", help="print the summary as JSON on standard output")
    group.add_argument("--quiet", action="store_true", help="print only the summary, no progress")
