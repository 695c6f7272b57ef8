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
      train a model several times larger than 24 MiB, the rest on disk; prove that this changed nothing
  gemini train --data book.txt --steps 2000 --checkpoint out/book --checkpoint-every 200
      train on your own text and keep a checkpoint; Ctrl-C saves one and ends cleanly
  gemini train --checkpoint out/book --resume
      go on where it ended, with the same options: the same losses, bit for bit, as if it had never
      stopped; options given here replace those of the device, budgets, tiers, policy and --steps
  gemini train --data book.txt --checkpoint out/book --resume auto
      go on where the last run ended, or start: for a scheduler that runs the command again
  gemini train --device-bytes 64MiB --disk-dir out/disk --quiet --json > summary.json
      for scripts: nothing but the summary, as JSON

in the --checkpoint directory:
  checkpoint/    the two newest (see gemini ckpt)      metrics.jsonl   one line per step
  summary.json   what is printed at the end            memory.png      memory per tier over one step

exit codes:
  0 done    1 --verify found a difference    2 an error, with its reason
  130, 143, 138 ended by Ctrl-C, SIGTERM or SIGUSR1 after its step, with a checkpoint where --checkpoint
                is given: run the same command again with --resume auto

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
        help="train a GPT on your text within byte budgets",
        description="Train a decoder-only GPT on bytes of real text, in as much memory as you allow. "
        "Parameters, gradients and optimizer states live on three tiers (DEVICE, HOST, DISK) so that every "
        "operator finds its operands; the numbers are those of a run without any budget.",
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
        help="optimizer steps in all, those before --resume included",
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
            f"{command} trains on one process and torchrun has started {ranks}; run it without torchrun, "
            "or train over ranks with a program of your own, such as examples/ranks_that_restart.py"
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
        help="a text file, or a directory read recursively (binary and hidden "
        "files left out); default: the sources of Python's own library",
    )
    add_option(group, "--layers", type=int, metavar="N", help="transformer blocks")
    add_option(group, "--hidden", type=int, metavar="N", help="width of the model; a multiple of --heads")
    add_option(group, "--heads", type=int, metavar="N", help="attention heads")
    add_option(group, "--seq", type=int, metavar="N", help="length of a training sequence in bytes of text")
    add_option(
        group,
        "--activation-checkpointing",
        action="store_true",
        help="compute activations again in backward instead of keeping them: less memory, more work",
    )


def add_training_options(group: argparse._ArgumentGroup) -> None:
    """Add the options of a training step."""
    add_option(group, "--batch", type=int, metavar="N", help="sequences per forward pass")
    add_option(
        group,
        "--accumulate",
        type=int,
        metavar="N",
        help="passes per optimizer step; a step learns from batch * accumulate sequences",
    )
    add_option(
        group,
        "--lr",
        type=float,
        metavar="X",
        help="highest learning rate; warms up over a tenth of the steps (at most 100), then falls as a "
        "cosine to a tenth",
    )
    add_option(group, "--clip", type=float, metavar="X", help="largest global gradient norm; 0: no clipping")
    add_option(
        group,
        "--precision",
        choices=PRECISIONS,
        help="dtype of weights and activations; bf16 keeps an fp32 master of every weight",
    )
    add_option(group, "--seed", type=int, metavar="N", help="seed of the weights and of the choice of text")


def add_memory_options(group: argparse._ArgumentGroup, kind: type[Any] = TrainConfig) -> None:
    """Add the options of device, budgets, tiers and policy, with the defaults of ``kind``."""
    add_option(
        group,
        "--device",
        kind=kind,
        metavar="DEVICE",
        help="where operators compute; DEVICE is its memory: cpu, cuda, or cuda:1 for one of several GPUs; "
        "numbers are the same, bit for bit, on devices of one kind",
    )
    add_option(
        group,
        "--device-bytes",
        kind=kind,
        type=_size,
        metavar="SIZE",
        help="budget of DEVICE, where operators compute: model data and activations; default: the free "
        "memory, less a margin",
    )
    add_option(
        group,
        "--host-bytes",
        kind=kind,
        type=_size,
        metavar="SIZE",
        help="budget of HOST, CPU memory next to the device; default: chosen by the policy (0 where DEVICE "
        "is CPU memory already)",
    )
    add_option(
        group,
        "--disk-dir",
        kind=kind,
        metavar="DIR",
        help="directory of the DISK tier, made if missing; default: no DISK tier, so that all model data "
        "must fit above",
    )
    add_option(
        group,
        "--disk-bytes",
        kind=kind,
        type=_size,
        metavar="SIZE",
        help="budget of DISK; default: as much as all model data takes; with --activations offload or plan, "
        "half of the free space on top",
    )
    add_option(
        group,
        "--non-model-bytes",
        kind=kind,
        type=_size,
        metavar="SIZE",
        help="bytes of DEVICE kept free for activations and temporaries; default: measured in the first step",
    )
    _add_placement_options(group, kind)


def _add_placement_options(group: argparse._ArgumentGroup, kind: type[Any]) -> None:
    add_option(
        group,
        "--policy",
        kind=kind,
        choices=POLICIES,
        help="what stays on DEVICE: auto plans from the first step, cpu keeps model data on HOST, cuda keeps "
        "all of it on DEVICE, const keeps a fixed part there",
    )
    add_option(
        group,
        "--activations",
        kind=kind,
        choices=ACTIVATIONS,
        help="what forward saves for backward: keep it where it is, offload to the tiers below what would "
        "not stay on DEVICE, or plan what is kept, offloaded or computed again, block by block",
    )


def _add_run_options(group: argparse._ArgumentGroup) -> None:
    add_option(
        group,
        "--checkpoint",
        metavar="DIR",
        help="directory of the run: checkpoint, metrics, summary and picture; default: nothing is kept",
    )
    add_option(
        group,
        "--checkpoint-every",
        type=int,
        metavar="N",
        help="also save after every N steps; 0: at the end and on Ctrl-C only",
    )
    add_resume_option(group, TrainConfig, "--checkpoint")
    add_option(
        group,
        "--overwrite",
        action="store_true",
        help="start over in a --checkpoint directory that holds a run",
    )
    add_report_option(group)
    add_option(
        group,
        "--verify",
        action="store_true",
        help="afterwards run the same seed unmanaged (which takes the memory of all model data, and the "
        "time again or more, on the same device) and say whether every loss and weight is identical",
    )
    group.add_argument("--json", action="store_true", help="print the summary as JSON on standard output")
    group.add_argument("--quiet", action="store_true", help="no progress display, only the summary")


def add_resume_option(group: argparse._ArgumentGroup, kind: type[Any], directory: str) -> None:
    """Add ``--resume``, for the run in the directory of an option."""
    add_option(
        group,
        "--resume",
        kind=kind,
        nargs="?",
        const="yes",
        choices=RESUME,
        help=f"continue the run in {directory}, bit for bit, with its options; auto: if there is one",
    )


def add_report_option(group: argparse._ArgumentGroup, kind: type[Any] = TrainConfig) -> None:
    """Add ``--report-to``, which may be given several times."""
    add_option(
        group,
        "--report-to",
        kind=kind,
        action=_JoinedByCommas,
        metavar="NAMES",
        help=f"also hand losses, learning rate, speed and bytes per tier to {', '.join(TRACKERS)}; several "
        "with commas between them; none: to none of them (default)",
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


def _size(text: str) -> int | None:
    try:
        return None if text == "auto" else parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
