"""``gemini train``: trains a GPT on text, under byte budgets, with a live display."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gemini.errors import ConfigError, OutOfBudgetError
from gemini.jobs.gpt.config import TrainConfig
from gemini.jobs.run.managed import ACTIVATIONS, POLICIES, PRECISIONS
from gemini.jobs.run.run_directory import RESUME, saved_options
from gemini.jobs.run.trackers import TRACKERS
from gemini.system.config import parse_bytes

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


_PARAMETERS = re.compile(
    r"\b(device_bytes|host_bytes|kv_bytes|disk_bytes|disk_dir|non_model_bytes|device(?==))"
)
_WITH_VALUES = {
    "torch.utils.checkpoint": "--activation-checkpointing",
    "activation_offload='auto'": "--activations offload",
    'activation_offload="auto"': "--activations offload",
}


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
    add_option(
        training,
        "--steps",
        type=int,
        metavar="N",
        help="total optimizer steps, including those before --resume",
    )
    add_training_options(training)
    add_memory_options(parser.add_argument_group("memory"))
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


def refuse_ranks(command: str) -> None:
    """Raise ConfigError if torchrun has started several processes: each would train the whole model again."""
    ranks = os.environ.get("WORLD_SIZE", "")
    if "RANK" in os.environ and ranks.isdigit() and int(ranks) > 1:
        raise ConfigError(
            f"{command} trains on one process, but torchrun started {ranks}; run it without "
            "torchrun, or write your own program for several ranks, such as "
            "examples/ranks_that_restart.py"
        )


@contextmanager
def options_named() -> Iterator[None]:
    """Context manager that makes errors name command line options instead of GeminiDDP's parameters."""
    try:
        yield
    except (ConfigError, OutOfBudgetError) as error:
        error.args = (with_options(str(error)),)
        raise


def with_options(text: str) -> str:
    """Replace the library's parameter names in a text with command line options."""
    for said, option in _WITH_VALUES.items():
        text = text.replace(said, option)
    return _PARAMETERS.sub(lambda found: "--" + found[0].replace("_", "-"), text)


def add_model_options(group: argparse._ArgumentGroup) -> None:
    """Add the options of the model and its text."""
    add_option(
        group,
        "--data",
        metavar="PATH",
        help="a text file, or a directory, read recursively without binary and hidden files; default: the "
        "sources of Python's standard library",
    )
    add_option(group, "--layers", type=int, metavar="N", help="transformer blocks")
    add_option(group, "--hidden", type=int, metavar="N", help="width of the model; a multiple of --heads")
    add_option(group, "--heads", type=int, metavar="N", help="attention heads")
    add_option(group, "--seq", type=int, metavar="N", help="length of a training sequence, in bytes of text")
    add_option(
        group,
        "--activation-checkpointing",
        action="store_true",
        help="recompute activations in backward instead of keeping them: less memory, more computing",
    )


def add_training_options(group: argparse._ArgumentGroup) -> None:
    """Add the options of a training step."""
    add_option(group, "--batch", type=int, metavar="N", help="sequences per forward pass")
    add_option(
        group,
        "--accumulate",
        type=int,
        metavar="N",
        help="forward passes per optimizer step; a step has batch * accumulate sequences",
    )
    add_option(
        group,
        "--lr",
        type=float,
        metavar="X",
        help="highest learning rate; warms up over a tenth of the steps (at most 100), then falls as a "
        "cosine to a tenth",
    )
    add_option(
        group, "--clip", type=float, metavar="X", help="clip the global gradient norm to this; 0: no clipping"
    )
    add_option(
        group,
        "--precision",
        choices=PRECISIONS,
        help="dtype of weights and activations; bf16 keeps an fp32 master of every weight",
    )
    add_option(
        group, "--seed", type=int, metavar="N", help="seed of the initial weights and of the choice of text"
    )


def add_memory_options(group: argparse._ArgumentGroup, kind: type[Any] = TrainConfig) -> None:
    """Add the options of device, budgets, tiers and policy, with the defaults of ``kind``."""
    add_option(
        group,
        "--device",
        kind=kind,
        metavar="DEVICE",
        help="where operators compute; DEVICE is its memory: cpu, cuda, or cuda:1 for one of several "
        "GPUs; results are identical, bit for bit, on devices of one kind",
    )
    add_option(
        group,
        "--device-bytes",
        kind=kind,
        type=size,
        metavar="SIZE",
        help="budget of DEVICE, where operators compute: model data and activations; default: the free "
        "memory, less a margin",
    )
    add_option(
        group,
        "--host-bytes",
        kind=kind,
        type=size,
        metavar="SIZE",
        help="budget of HOST, CPU memory next to the device; default: chosen by the policy (0 if DEVICE "
        "is CPU memory)",
    )
    add_option(
        group,
        "--disk-dir",
        kind=kind,
        metavar="DIR",
        help="directory of the DISK tier, created if missing; default: no DISK tier; all model data must "
        "fit on DEVICE and HOST",
    )
    add_option(
        group,
        "--disk-bytes",
        kind=kind,
        type=size,
        metavar="SIZE",
        help="budget of DISK; default: the size of all model data; with --activations offload or plan, "
        "plus half of the free space",
    )
    add_option(
        group,
        "--non-model-bytes",
        kind=kind,
        type=size,
        metavar="SIZE",
        help="DEVICE bytes to keep free for activations and temporaries; default: measured in the first step",
    )
    _add_placement_options(group, kind)


def _add_placement_options(group: argparse._ArgumentGroup, kind: type[Any]) -> None:
    add_option(
        group,
        "--policy",
        kind=kind,
        choices=POLICIES,
        help="where model data stays: auto plans from the first step, cpu keeps it on HOST, cuda keeps "
        "all of it on DEVICE, const keeps a fixed part on DEVICE",
    )
    add_option(
        group,
        "--activations",
        kind=kind,
        choices=ACTIVATIONS,
        help="tensors that forward saves for backward: keep them where they are, offload those that do "
        "not fit on DEVICE to lower tiers, or plan for each block whether to keep, offload or "
        "recompute them",
    )


def _add_run_options(group: argparse._ArgumentGroup) -> None:
    add_option(
        group,
        "--checkpoint",
        metavar="DIR",
        help="directory of the run: checkpoint, metrics, summary and plot; default: nothing is saved",
    )
    add_option(
        group,
        "--checkpoint-every",
        type=int,
        metavar="N",
        help="also save after every N steps; 0: only at the end and on Ctrl-C",
    )
    add_resume_option(group, TrainConfig, "--checkpoint")
    add_option(
        group,
        "--overwrite",
        action="store_true",
        help="discard the run in --checkpoint and start over",
    )
    add_report_option(group)
    add_option(
        group,
        "--verify",
        action="store_true",
        help="afterwards train again from the same seed without the runtime and report whether all losses "
        "and weights are identical; needs memory for all model data on the same device, and at least "
        "the same time",
    )
    group.add_argument("--json", action="store_true", help="print the summary as JSON on standard output")
    group.add_argument("--quiet", action="store_true", help="print only the summary, no progress")


def add_resume_option(group: argparse._ArgumentGroup, kind: type[Any], directory: str) -> None:
    """Add ``--resume``, for the run in the directory of an option."""
    add_option(
        group,
        "--resume",
        kind=kind,
        nargs="?",
        const="yes",
        choices=RESUME,
        help=f"continue the run in {directory}, bit for bit, with its options; auto: start one if there "
        "is none",
    )


def add_report_option(group: argparse._ArgumentGroup, kind: type[Any] = TrainConfig) -> None:
    """Add ``--report-to``, which may be given several times."""
    add_option(
        group,
        "--report-to",
        kind=kind,
        action=_JoinedByCommas,
        metavar="NAMES",
        help=f"also report losses, learning rate, speed and bytes per tier to {', '.join(TRACKERS)}; "
        "separate several by commas; none: report to none (default)",
    )


class _JoinedByCommas(argparse.Action):
    """Action that joins the values of a repeated option by commas."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        before = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, values if before is None else f"{before},{values}")


def add_option(
    group: argparse._ArgumentGroup, option: str, *, kind: type[Any] = TrainConfig, **settings: Any
) -> None:
    """Add ``option`` without a default value in the namespace. The help names the default of its field in
    ``kind``."""
    name = option.lstrip("-").replace("-", "_")
    default = kind.__dataclass_fields__[name].default
    if not isinstance(default, bool) and default not in (None, ""):
        settings["help"] += f" (default: {default})"
    group.add_argument(option, default=argparse.SUPPRESS, **settings)


def size(text: str) -> int | None:
    """Parse the value of an option that is a size in bytes; "auto" gives None."""
    return None if text == "auto" else size_in_bytes(text)


def size_in_bytes(text: str) -> int:
    """Parse the value of an option that is a size in bytes and has no "auto"."""
    try:
        return parse_bytes(text) or 0
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
