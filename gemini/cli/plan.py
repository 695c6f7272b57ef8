"""``gemini plan``: forecasts whether a model fits, how long a step takes and which resource bounds it,
without its weights."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gemini.cli.console import Console, print_json
from gemini.cli.options import size_in_bytes
from gemini.errors import ConfigError
from gemini.jobs.finetune.config import INT8, NF4
from gemini.system.config import format_bytes, parse_bytes

EPILOG = """\
MODEL is one of
  gpt2, gpt2-medium, gpt2-large, gpt2-xl, gpt3-6.7b, gpt3-13b, gpt3-175b
  gpt:layers=12,hidden=768,heads=12    the GPT of gemini train in any shape; also vocab=N (256)
  DIR or FILE.json                     a Hugging Face config.json (pip install transformers)
  package.module:function              your factory: returns a module, (module, inputs) or (module, inputs,
                                       loss); it is called with batch=, seq= and checkpointing= as far as it
                                       has such parameters, while torch makes everything on 'meta'

examples:
  gemini plan gpt2 --batch 8 --seq 1024 --device-bytes 4GiB --disk-dir .
      GPT-2 in 4 GiB of this machine's memory and a file in this directory
  gemini plan ./llama-70b --dtype bf16 --seq 4096 --checkpointing --machine server.json --disk-bytes 2TiB
      a model and a machine that are only described, not present
  gemini plan ./llama-8b --lora 16 --quantize nf4 --dtype bf16 --seq 512 --device-bytes 2GiB --disk-dir .
      adapters on a 4-bit base model (pip install 'gemini-runtime[quantized]')
  gemini plan my_models:build --batch 32 --json > plan.json
      for scripts: exit code 0 if it fits, 1 if not
  gemini plan gpt2-xl --tp 2 --pp 4 --accumulation 16 --zero-stage 1 --device-bytes 16GiB
      memory and idle time of each rank with tensor and pipeline parallelism
  gemini plan ./llama-8b --seq 65536 --sp 8 --sp-mode ring --dtype bf16 --device-bytes 40GiB
      the same with sequence parallelism
  gemini plan ./llama-8b --ranks 4 --search --batch 32 --machine server.json --save-plan plan.json
      the fastest way to train 32 samples per step on 4 ranks, and a file that plugins run
  gemini plan gpt2 --ranks 2 --search --batch 8 --seq 128 --measure 3
      the same on this machine; run three steps of each of the three best plans, keep the fastest
  gemini plan ./llama-8b --ranks 8 --space galvatron --batch 32 --machine server.json
      the plan of another system, and whether it runs here; --space list prints all systems
  gemini plan gpt2 --save-machine here.json
      save the measured machine, to edit it or to plan for it on another machine
  gemini plan --measure-ranks 4 --save-machine here.json
      the same without a model, plus the speed of collectives over 2 and 4 ranks; under a minute

Sizes are bytes: 65536, 64KiB, 512MiB, 4GiB. docs/plan.md explains the numbers.
"""

# Endurance that makers of common 1 TB drives promise.
DEFAULT_TBW = "600TB"
DEFAULT_SEQ = 1024
_SAMPLE_SECONDS = 5.0
_DTYPES = ("fp32", "bf16", "fp16")
_AXES = ("tp", "pp", "sp", "dp")
_SEQUENCE_MODES = ("ulysses", "ring")
# Same as gemini.parallel.pipeline.orders.SCHEDULES; importing that would import torch, which takes seconds.
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero_bubble", "zbv", "dualpipev")
EXIT_MISFIT = 1


def add_parser(subparsers: Any) -> None:
    """Add the ``plan`` command to ``subparsers``."""
    parser = subparsers.add_parser(
        "plan",
        help="predict whether a model fits, and how long a step takes",
        description="Rehearse one training step of a model without its weights. The report says whether the "
        "step fits the budgets, and gives the largest batch, the peak of each tier, the time of a step "
        "and its parts, the number of tokens that hides the transfers, the wear of the drive, and "
        "the settings to copy.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="the model to train, see below; not needed with --measure-ranks",
    )
    _add_step_options(parser.add_argument_group("the step"))
    _add_machine_options(parser.add_argument_group("the machine"))
    _add_layout_options(parser.add_argument_group("several processes"))
    _add_search_options(parser.add_argument_group("search for the best plan over several processes"))
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=run)


def _add_step_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--batch", type=_count, default=1, metavar="N", help="samples per forward pass (default: 1)"
    )
    group.add_argument(
        "--seq",
        type=_count,
        metavar="N",
        help=f"tokens per sample, for models of tokens (default: {DEFAULT_SEQ}, or the model's number of "
        "positions if smaller)",
    )
    group.add_argument(
        "--accumulation",
        type=_count,
        default=1,
        metavar="N",
        help="forward passes per optimizer step (default: 1)",
    )
    group.add_argument(
        "--dtype",
        choices=_DTYPES,
        default="fp32",
        help="dtype of the computation; bf16 and fp16 keep an fp32 master of every weight (default: fp32)",
    )
    group.add_argument("--checkpointing", action="store_true", help="recompute activations in backward")
    group.add_argument(
        "--lora",
        type=_count,
        metavar="RANK",
        help="train adapters of this rank on the linear layers of a DIR, and freeze the model",
    )
    group.add_argument(
        "--lora-targets",
        metavar="NAMES",
        help="layers that get adapters, such as q_proj,v_proj (default: every linear layer)",
    )
    group.add_argument("--dora", action="store_true", help="with --lora: the adapters are those of DoRA")
    group.add_argument(
        "--quantize", choices=(NF4, INT8), help="store the linear layers under the adapters in 4 or 8 bits"
    )
    group.add_argument(
        "--no-clipping", action="store_true", help="train without clipping the global gradient norm"
    )


def _add_layout_options(group: argparse._ArgumentGroup) -> None:
    for name, what in (
        ("tp", "tensor parallelism: number of parts of every layer"),
        ("pp", "pipeline parallelism: number of ranks with stages"),
        ("sp", "sequence parallelism: number of parts of every sequence"),
        (
            "dp",
            (
                "data parallelism: number of copies of the model; ZeRO shards over their ranks and those of "
                "--sp"
            ),
        ),
    ):
        group.add_argument(f"--{name}", type=_count, metavar="N", help=f"{what} (default: 1)")
    group.add_argument(
        "--sp-mode",
        choices=_SEQUENCE_MODES,
        default="ulysses",
        help="how attention crosses the parts: ulysses (each rank computes some heads of the whole "
        "sequence) or ring (keys and values pass around all ranks) (default: ulysses)",
    )
    group.add_argument(
        "--schedule",
        choices=SCHEDULES,
        default="1f1b",
        help="pipeline schedule for --accumulation micro-batches of --batch samples (default: 1f1b)",
    )
    group.add_argument(
        "--stages-per-rank",
        type=_count,
        metavar="N",
        help="stages per rank (default: 1, or 2 if the schedule needs several)",
    )
    group.add_argument(
        "--split",
        choices=("bytes", "layers"),
        default="bytes",
        help="balance stages by bytes of parameters or by blocks (default: bytes)",
    )
    group.add_argument(
        "--zero-stage",
        type=int,
        choices=(0, 1, 2, 3),
        default=3,
        help="what the copies shard: 0 nothing, 1 states, 2 also gradients, 3 also weights (default: 3)",
    )


def _add_search_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--search",
        action="store_true",
        help="find the fastest layout, schedule, micro-batches, ZeRO stage, recomputation and tiers; "
        "--batch is then the number of samples per step over all ranks",
    )
    group.add_argument(
        "--operators",
        action="store_true",
        help="choose a layout for each operator of a step instead, on one axis of ranks",
    )
    group.add_argument(
        "--ranks", type=_count, metavar="N", help="number of processes that train (default: 1)"
    )
    group.add_argument(
        "--pin",
        action="append",
        metavar="NAME=VALUE",
        help="fix a choice of the search, such as tp=2, pp=1, zero=3, microbatches=4, schedule=1f1b, "
        "sp_mode=ring, recompute=none, fit, rotor, half or all, tiers=device, activations=device; "
        "repeatable",
    )
    group.add_argument(
        "--measure",
        type=_count,
        metavar="N",
        help="run three steps of each of the N best plans on ranks of this machine, and keep the fastest; "
        "a plan that fails is reported, and the next one runs",
    )
    group.add_argument(
        "--save-plan", type=Path, metavar="FILE", help="write the plan to a file that plugins run"
    )
    group.add_argument(
        "--space",
        metavar="NAME",
        help="plan like another system, such as galvatron or alpa; list prints all systems, their "
        "decisions and which of their plans run",
    )
    group.add_argument(
        "--annotate",
        action="append",
        metavar="TENSOR=HOW",
        help="for --space gshard: the layout of a tensor: replicate, split:DIM or shard:DIM=N,DIM=N; "
        "tensors are inputs, LAYER (its output) and LAYER.weight; repeatable",
    )
    group.add_argument("--seed", type=_count, metavar="N", help="for --space flexflow (default: 1)")
    group.add_argument(
        "--import-plan",
        type=Path,
        metavar="FILE",
        help="predict the time of a Galvatron plan file instead of searching",
    )
    group.add_argument(
        "--export-plan", type=Path, metavar="FILE", help="write the plan of --space as a Galvatron plan file"
    )


def _add_machine_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--device-bytes",
        type=size_in_bytes,
        metavar="SIZE",
        help="budget of DEVICE (default: the free memory, less a margin)",
    )
    group.add_argument("--host-bytes", type=size_in_bytes, metavar="SIZE", help="budget of HOST (default: 0)")
    group.add_argument("--disk-dir", metavar="DIR", help="directory of the DISK tier; its drive is measured")
    group.add_argument(
        "--disk-bytes",
        type=size_in_bytes,
        metavar="SIZE",
        help="budget of DISK (default: what the model needs)",
    )
    group.add_argument(
        "--machine",
        type=Path,
        metavar="FILE",
        help="a machine description (docs/plan.md) to plan for, instead of this machine",
    )
    group.add_argument(
        "--save-machine", type=Path, metavar="FILE", help="write the machine description that was used"
    )
    group.add_argument(
        "--measure-ranks",
        metavar="N",
        help="start 2 to 16 processes on this machine and measure all-reduce, all-gather, reduce-scatter, "
        "all-to-all and messages over gloo, for every group size that divides N; prints the results "
        "and adds them to --save-machine",
    )
    group.add_argument(
        "--tbw",
        type=size_in_bytes,
        default=parse_bytes(DEFAULT_TBW),
        metavar="SIZE",
        help="bytes that can be written to the drive in its life, from its data sheet (default: "
        f"{DEFAULT_TBW}, a 1 TB drive)",
    )


def run(options: argparse.Namespace) -> int:
    """Print the forecast. Return 0 if the model fits, 1 if not."""
    from gemini.cli.plan_model import ModelOptions, find_model
    from gemini.cli.plan_output import render, render_collectives
    from gemini.cli.plan_search import refuse_contradictions
    from gemini.forecast.report import make_report

    if options.operators:
        from gemini.cli.plan_operators import refuse_unused

        refuse_unused(options)
    options = argparse.Namespace(**{**vars(options), "search": options.search or options.operators})
    if options.measure_ranks is not None:
        _require_measurable(options)
    if options.model is None and options.space is not None:
        from gemini.cli.plan_space import run_without_model

        return run_without_model(options)
    if options.model is None:
        return _run_without_model(options)
    if options.space is not None:
        from gemini.cli.plan_space import refuse_contradictions as refuse_with_space

        refuse_with_space(options)
    else:
        refuse_contradictions(options)
    seq = DEFAULT_SEQ if options.seq is None else options.seq
    asked = ModelOptions(seq, options.checkpointing, seq_is_asked=options.seq is not None)
    if options.lora or options.quantize or options.dora or options.lora_targets:
        from gemini.cli.plan_model import adapting_of

        asked = dataclasses.replace(asked, adapted=adapting_of(options))
    source = find_model(options.model, asked)
    if any(getattr(options, name) is not None for name in _AXES):
        from gemini.cli.plan_layout import run as run_layout

        return run_layout(options, source)
    with Console(stderr=True).status("measuring this machine") as status:
        settings = dataclasses.replace(settings_from(options, ranks=options.ranks or 1), tell=status.update)
        machine = _kept(options, settings.machine, status.update)
        settings = dataclasses.replace(settings, machine=machine)
        searches = options.search or options.space is not None
        report = None if searches else make_report(source, settings, tbw_bytes=options.tbw)
    if options.space is not None:
        from gemini.cli.plan_space import run as run_space

        return run_space(options, source, settings)
    if options.operators:
        from gemini.cli.plan_operators import run as run_operators

        return run_operators(options, asked, source, settings)
    if report is None:
        from gemini.cli.plan_search import run as run_search

        return run_search(options, asked, source, settings)
    if options.json:
        print_json(report.to_dict())
    else:
        render(report, Console())
        if options.measure_ranks is not None:
            render_collectives(machine.collectives, Console())
    return 0 if report.fits else EXIT_MISFIT


def _run_without_model(options: argparse.Namespace) -> int:
    """Measure this machine and its ranks. Raises ConfigError if options require a model."""
    from gemini.cli.plan_output import render_collectives

    axes = [f"--{name}" for name in _AXES if getattr(options, name) is not None]
    if options.measure_ranks is None or axes:
        why = f"{', '.join(axes)} cut a model" if axes else "there is nothing to plan"
        raise ConfigError(f"{why}: give a MODEL, such as gpt2 (gemini plan --help)")
    with Console(stderr=True).status("measuring this machine") as status:
        machine = _kept(options, settings_from(options).machine, status.update)
    if options.json:
        print_json({"collectives": machine.collectives.to_json()})
    else:
        render_collectives(machine.collectives, Console())
    return 0


def _require_measurable(options: argparse.Namespace) -> None:
    """Raise ConfigError if ranks cannot be measured as requested, before anything that takes time."""
    from gemini.parallel.collective_speeds import parse_ranks

    parse_ranks(options.measure_ranks)
    if options.machine is not None:
        raise ConfigError(
            f"--measure-ranks measures this machine, but --machine {options.machine} describes "
            "another; leave one out"
        )


def _kept(options: argparse.Namespace, machine: Any, tell: Callable[[str], object]) -> Any:
    """Return the machine, with measured speeds of collectives if requested, and save it if requested."""
    ranks = options.measure_ranks
    if ranks is None and options.machine is None and (options.ranks or 1) > 1:
        ranks = str(options.ranks)
    if ranks is not None:
        from gemini.parallel.collective_speeds import measure_collectives, parse_ranks

        tell(f"measuring {ranks} ranks")
        measured = measure_collectives(parse_ranks(ranks))
        machine = dataclasses.replace(machine, collectives=measured)
    if options.save_machine is not None:
        machine.save(options.save_machine)
    return machine


def settings_from(options: argparse.Namespace, *, ranks: int = 1) -> Any:
    """Return the settings for parsed ``options``. Measures this machine, divided among ``ranks``, unless a
    machine file is given.

    Raises:
        ConfigError: a tier has no directory or no measured links, or DEVICE has no positive budget.
    """
    from gemini.forecast.forecast import Settings
    from gemini.forecast.machine import MachineSpeeds, measure_machine, threads_of_a_rank
    from gemini.offload.async_file import checked_directory
    from gemini.placement.probe import probe_links
    from gemini.runtime.config import GeminiConfig
    from gemini.system.device import default_budget_bytes

    here = options.machine is None
    config = GeminiConfig.from_options(mixed_precision=None if options.dtype == "fp32" else options.dtype)
    if options.disk_dir is not None:
        checked_directory(options.disk_dir)
    if here:
        links = probe_links(disk_dir=options.disk_dir, host=bool(options.host_bytes), ranks=ranks)
        with threads_of_a_rank(ranks):
            machine = measure_machine(config.precision, links)
    else:
        machine = MachineSpeeds.load(options.machine)
    if here and options.disk_bytes and options.disk_dir is None:
        raise ConfigError("--disk-bytes needs --disk-dir, or --machine with the speed of a disk")
    device_bytes = _first(
        options.device_bytes,
        machine.device_bytes,
        default_budget_bytes() // ranks if here else None,
    )
    if device_bytes is None:
        raise ConfigError(f"{options.machine} has no device_bytes; add them, or give --device-bytes")
    if device_bytes <= 0:
        raise ConfigError(f"device_bytes is {device_bytes}; it must be positive")
    disk_bytes = _first(options.disk_bytes, machine.disk_bytes)
    has_disk = options.disk_dir is not None or bool(disk_bytes)
    host_bytes = _first(options.host_bytes, machine.host_bytes, 0)
    disk_dir = options.disk_dir if here else None
    _require_links(machine, host=bool(host_bytes), disk=has_disk, disk_dir=disk_dir)
    return Settings(
        batch=options.batch,
        config=GeminiConfig(
            precision=config.precision,
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            disk_dir=(options.disk_dir or "DIR") if has_disk else None,
            disk_bytes=disk_bytes,
        ),
        machine=machine,
        accumulation=options.accumulation,
        clips_norm=not options.no_clipping,
        sample_seconds=_SAMPLE_SECONDS if here else 0.0,
        disk_is_here=disk_dir is not None,
    )


def _require_links(machine: Any, *, host: bool, disk: bool, disk_dir: str | None) -> None:
    """Raise ConfigError if the speeds of a tier's links are unknown. ``disk_dir``: directory of a disk on
    this machine."""
    from gemini.placement.probe import LARGE_BYTES

    needed = (["h2d", "d2h"] if host else []) + (["disk_read", "disk_write"] if disk else [])
    missing = sorted(set(needed) - {link.name for link in machine.links})
    if disk_dir is not None and "disk_read" in missing:
        free = format_bytes(shutil.disk_usage(disk_dir).free)
        raise ConfigError(
            f"cannot measure --disk-dir {disk_dir}: the test file needs {format_bytes(LARGE_BYTES)}, "
            f"and {free} are free there; free some space, name another directory, or describe the "
            "speed in a --machine file (docs/plan.md)"
        )
    if missing:
        raise ConfigError(
            f"the machine {machine.name!r} does not describe the links {', '.join(missing)}; add them to "
            'its "links" (docs/plan.md)'
        )


def _first(*values: int | None) -> int | None:
    """Return the first value that is not None."""
    return next((value for value in values if value is not None), None)


_LARGEST_COUNT = 2**20  # limit of a batch and a sequence: larger products overflow torch's sizes


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    if len(text.lstrip("0")) > 9 or int(text) > _LARGEST_COUNT:
        raise argparse.ArgumentTypeError(f"{text[:20]} is above the maximum of {_LARGEST_COUNT}")
    return int(text)
