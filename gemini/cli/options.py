"""Options that several commands have, their sizes, and messages that name them."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gemini.errors import ConfigError, OutOfBudgetError
from gemini.jobs.run.managed import ACTIVATIONS, POLICIES
from gemini.jobs.run.run_directory import RESUME
from gemini.jobs.run.trackers import TRACKERS
from gemini.system.config import parse_bytes

_PARAMETERS = re.compile(
    r"\b(device_bytes|host_bytes|kv_bytes|disk_bytes|disk_dir|non_model_bytes|device(?==))"
)
_WITH_VALUES = {
    "torch.utils.checkpoint": "--activation-checkpointing",
    "activation_offload='auto'": "--activations offload",
    'activation_offload="auto"': "--activations offload",
}


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


def add_memory_options(group: argparse._ArgumentGroup, kind: type[Any]) -> None:
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


def add_report_option(group: argparse._ArgumentGroup, kind: type[Any]) -> None:
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


def add_option(group: argparse._ArgumentGroup, option: str, *, kind: type[Any], **settings: Any) -> None:
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
