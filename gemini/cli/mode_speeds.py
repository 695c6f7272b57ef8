"""``gemini benchmark``: compares the modes of tensor parallelism over the GPUs of a machine."""

from __future__ import annotations

import argparse
from typing import Any

from rich.table import Table

from gemini.cli.console import Console, print_json
from gemini.system.config import format_bytes

EPILOG = """\
examples:
  gemini benchmark --gpus 4                  1d and 2d over 4 GPUs, or 4 processes if there are fewer GPUs
  gemini benchmark --gpus 8 --hidden 2048    1d, 2.5d and 3d
  gemini benchmark --gpus 4 --json           for scripts

Bytes, calls, parameters and saved activations are counted on the first rank in one pass; times
are medians. Processes on one CPU share its cores: compare bytes and memory there, not times.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "benchmark",
        help="time the modes of tensor parallelism on this machine",
        description="Run an MLP over N ranks of this machine in every mode of tensor parallelism that "
        "supports N ranks: 1d, 2d, 2.5d of each depth, 3d.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="number of ranks, one per GPU")
    for name, default, text in (
        ("batch", 8, "rows of the input"),
        ("length", 512, "tokens per row"),
        ("hidden", 1024, "features; the hidden layer of the MLP has four times as many"),
        ("layers", 2, "number of MLPs in sequence"),
        ("steps", 3, "measured passes"),
        ("warmup", 1, "warmup passes"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default: {default})"
        )
    parser.add_argument("--device", help="cpu, cuda, ... (default: the GPUs, if there are enough)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure and print; return 0."""
    from gemini.parallel.tensor.mode_speeds import Benchmark, run_benchmark

    facts = run_benchmark(
        Benchmark(
            ranks=options.gpus,
            batch=options.batch,
            length=options.length,
            hidden=options.hidden,
            layers=options.layers,
            warmup=options.warmup,
            steps=options.steps,
            device=options.device,
        )
    )
    if options.json:
        print_json(facts)
    else:
        render(facts, Console())
    return 0


def render(facts: dict[str, Any], console: Console) -> None:
    """Print a row for each mode, and the reason for each mode that the sizes do not permit."""
    where = f"{facts['ranks']} ranks on {facts['device']} over {facts['backend']}"
    shape = " x ".join(map(str, facts["input"]))
    table = Table(
        title=f"gemini benchmark: {where}, input {shape}, {facts['layers']} MLPs", title_justify="left"
    )
    for column in ("mode", "forward", "backward", "sent", "calls", "parameters", "kept for backward"):
        table.add_column(column, justify="left" if column == "mode" else "right")
    for row in facts["results"]:
        mode = (row["mode"] or "one process") + (f", depth {row['depth']}" if row["depth"] else "")
        if "refused" in row:
            table.add_row(mode, "refused", *[""] * 5)
            continue
        table.add_row(
            mode,
            *(f"{1000 * row[key]:.1f} ms" for key in ("forward_s", "backward_s")),
            format_bytes(row["sent_bytes"]),
            str(row["calls"]),
            *(format_bytes(row[key]) for key in ("parameter_bytes", "kept_bytes")),
        )
    console.print(table)
    for row in facts["results"]:
        if "refused" in row:
            console.print(f"{row['mode']}: {row['refused']}", highlight=False)
