"""``gemini plan --tp --pp --sp --dp``: forecasts the memory of each rank of a layout, and its idle time."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import nn

from gemini.cli.console import Console, print_json
from gemini.errors import ConfigError
from gemini.forecast.rehearsal import Example, LossFunction, ModelSource, Recipe, rehearse
from gemini.parallel.layout import Layout
from gemini.parallel.layout_plan import (
    DataCut,
    LayoutChoices,
    LayoutPlan,
    RankPlan,
    Run,
    model_bytes,
    plan_layout,
)
from gemini.parallel.pipeline.orders import SCHEDULES
from gemini.parallel.sequence.outline import SequenceOutline
from gemini.runtime.build import draw_blueprint
from gemini.runtime.config import GeminiConfig
from gemini.runtime.intercept.nested import cast_floating, map_tensors
from gemini.runtime.intercept.precision import BYTES, is_quantized
from gemini.system.config import MOST_BYTES, format_bytes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NEED_MACHINE = ("host_bytes", "disk_dir", "disk_bytes", "machine", "save_machine", "measure_ranks")


def run(options: argparse.Namespace, source: ModelSource) -> int:
    """Print the plan of a layout. Return 0, or 1 if a rank does not fit ``--device-bytes``.

    Raises:
        ConfigError: the model cannot be cut for this layout, or an option has no meaning here.
    """
    if strange := [name for name in _NEED_MACHINE if getattr(options, name)]:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in strange)
        raise ConfigError(
            f"{named} does not go with --tp, --pp, --sp and --dp: the plan of a layout has no "
            "machine speeds and no tiers below DEVICE; leave it out, or plan a single process"
        )
    plan = plan_source(source, options.batch, DTYPES[options.dtype], _choices(options))
    misfits = [] if options.device_bytes is None else misfits_of(plan, options.device_bytes)
    if options.json:
        said = {"model": source.name, "batch": options.batch, "dtype": options.dtype}
        fits = None if options.device_bytes is None else not misfits
        print_json({**said, **plan.to_dict(), "device_bytes": options.device_bytes, "fits": fits})
    else:
        render(plan, source, options, misfits, Console())
    return 1 if misfits else 0


def _choices(options: argparse.Namespace) -> LayoutChoices:
    dp, pp, sp, tp = (getattr(options, name) or 1 for name in ("dp", "pp", "sp", "tp"))
    layout, (style, chunks) = Layout(dp, pp, sp, tp), (options.schedule, options.stages_per_rank)
    if chunks is None:
        chunks = 1 if SCHEDULES[style].of_torch is None else 2
    if layout.pp == 1:
        style, chunks = "1f1b", 1
    return LayoutChoices(
        layout,
        options.sp_mode,
        style,
        chunks,
        options.accumulation,
        options.zero_stage,
        options.split,
    )


def plan_source(source: ModelSource, batch: int, dtype: torch.dtype, choices: LayoutChoices) -> LayoutPlan:
    """Plan ``choices`` for a model with micro-batches of ``batch`` samples. Raises the errors of
    plan_layout."""
    example = source.example(batch)
    if any(map(is_quantized, example.module.parameters())):
        return _plan_quantized(example, source, dtype, choices)
    if dtype is not torch.float32:
        example.module.to(dtype)
    inputs = map_tensors(example.inputs, lambda tensor: cast_floating(tensor, dtype))
    return plan_layout(example.model, run_on(example, inputs, source.loss), choices)


def _plan_quantized(
    example: Example, source: ModelSource, dtype: torch.dtype, choices: LayoutChoices
) -> LayoutPlan:
    """Plan data-parallel ranks for a model with quantized weights, which must be in chunks. Activations are
    the peak of non-model data, including temporaries of operators.

    Raises:
        ConfigError: ``choices`` have no chunks, or the model cannot be rehearsed.
    """
    if choices.zero_stage < 3:
        raise ConfigError(
            f"--zero-stage {choices.zero_stage}: only ZeRO 3 shards quantized weights; give --zero-stage 3"
        )
    module = example.module
    precision = None if dtype is torch.float32 else dtype
    config = GeminiConfig.from_options(mixed_precision=precision, device_bytes=MOST_BYTES)
    wide = dtype.itemsize if precision is not None else None  # itemsize of weights that are not quantized
    sizes = [
        (param.numel(), wide or param.element_size(), param.requires_grad)
        for param in module.parameters()
        if not is_quantized(param)
    ]
    blueprint = draw_blueprint(module, config)
    quantized = sum(spec.layout.used_numel for spec in blueprint.groups if spec.dtype is BYTES)
    cut = DataCut(choices.layout.dp, 3, choices.num_micro_batches)
    parameters, gradients, states = model_bytes([*sizes, (quantized, 1, False)], cut)
    recipe = Recipe(source.loss, choices.num_micro_batches)
    trace = rehearse(module, example.inputs, recipe, config, blueprint).trace
    activations = max(trace.non_model_bytes, default=0)
    rank = RankPlan(0, (0,), (), parameters, gradients, states, activations, 0, 0.0)
    return LayoutPlan(choices, (rank,))


def run_on(example: Example, inputs: tuple[Any, ...], loss: LossFunction) -> Run:
    """Return a function that runs the model of ``example``, or a rank's part of it, on ``inputs``. A rank of
    ``sp`` gets its part of them."""
    names = list(inspect.signature(example.module.forward).parameters)

    def run_once(model: nn.Module, sequence: SequenceOutline | None) -> torch.Tensor:
        model = example.around(model)
        if sequence is None:
            return loss(model(*inputs), inputs)
        if len(inputs) == 1 and isinstance(inputs[0], Mapping):
            own = (sequence.cut(inputs[0]),)
            return loss(model(*own), own)
        return _run_part(model, sequence, dict(zip(names, inputs, strict=False)), loss)

    return run_once


def _run_part(
    model: nn.Module, sequence: SequenceOutline, inputs: dict[str, Any], loss: LossFunction
) -> torch.Tensor:
    """Run a rank's part of ``inputs``, which are named by parameter of ``model``. If the first input looks
    like tokens, its parameter may have any name."""
    tokens = next(iter(inputs.values()))
    if "input_ids" in inputs or "inputs_embeds" in inputs or not _are_tokens(tokens):
        own = sequence.cut(inputs)
        return loss(model(**own), tuple(own[name] for name in inputs))
    own = sequence.cut({"input_ids": tokens, **inputs})
    given = tuple(own[name] for name in inputs)
    return loss(model(*given), given)


def _are_tokens(value: Any) -> bool:
    """Return whether ``value`` looks like token ids ``[batch, length]``."""
    return isinstance(value, torch.Tensor) and value.dim() == 2 and not value.is_floating_point()


def misfits_of(plan: LayoutPlan, device_bytes: int) -> list[str]:
    """Return the reasons why ranks do not fit. With ``zero_stage=3``, model data may lie below DEVICE."""
    found = []
    for rank in plan.ranks:
        chunked = plan.choices.zero_stage == 3
        alone = "activations alone" if plan.choices.layout.sp == 1 else "activations and messages only"
        needs, what = (rank.unplaced_bytes, alone) if chunked else (rank.total_bytes, "all together")
        if needs > device_bytes:
            way_out = "raise tp, pp or sp, or give a smaller --batch"
            if not chunked:
                way_out += (
                    ", raise dp (--zero-stage 2), or give --zero-stage 3, which can keep chunks on HOST "
                    "and DISK"
                )
            found.append(
                f"rank {rank.rank} of a pipeline needs {format_bytes(needs)} ({what}), "
                f"{format_bytes(needs - device_bytes)} more than the {format_bytes(device_bytes)} of DEVICE; "
                f"{way_out}"
            )
    return found


def render(
    plan: LayoutPlan, source: ModelSource, options: argparse.Namespace, misfits: list[str], console: Console
) -> None:
    """Print the plan for people."""
    choices, layout = plan.choices, plan.choices.layout
    console.print(_verdict(plan, source, options, misfits))
    table = Table(title="each rank of a pipeline", title_justify="left", box=None, pad_edge=False)
    table.collapse_padding = True
    table.add_column("rank")
    table.add_column("blocks", no_wrap=True)
    for name in (*_columns(plan), "together", "idle"):
        table.add_column(name, justify="right")
    for rank in plan.ranks:
        blocks = ", ".join(_stretch(first, last) for first, last in rank.blocks)
        sizes = (getattr(rank, field) for field in _columns(plan).values())
        cells = [format_bytes(size) for size in (*sizes, rank.total_bytes)]
        table.add_row(str(rank.rank), blocks or "all", *cells, f"{rank.idle:.1%}")
    console.print(table)
    lines = Text("\n")
    lines.append(f"Ranks are idle for {plan.bubble:.1%} of a step")
    lines.append(f" ({choices.style}, {choices.num_micro_batches} micro-batches of {options.batch}).\n")
    lines.append(_what_is_cut(choices.zero_stage, layout.dp * layout.sp))
    if layout.sp > 1:
        lines.append(
            f"Each sp rank has 1 / {layout.sp} of every sequence, of the logits and of the labels, "
            "and is also a data rank. Messages are the attention messages in flight at once.\n"
        )
    console.print(lines)


def _columns(plan: LayoutPlan) -> dict[str, str]:
    """Return the size columns of the table: title -> field of RankPlan."""
    sizes = ["parameters", "gradients", "states", "activations"]
    if plan.choices.layout.sp > 1:
        sizes.append("messages")
    return {name: f"{name.removesuffix('s')}_bytes" for name in sizes}


def _stretch(first: str, last: str) -> str:
    return first if first == last else f"{first}-{last.rpartition('.')[2]}"


def _verdict(plan: LayoutPlan, source: ModelSource, options: argparse.Namespace, misfits: list[str]) -> Panel:
    layout = plan.choices.layout
    sp = f" x sp {layout.sp} ({plan.choices.sp_mode})" if layout.sp > 1 else ""
    title = (
        f"{source.name} over {layout.world_size} processes: "
        f"tp {layout.tp} x pp {layout.pp}{sp} x dp {layout.dp}"
    )
    lines = Text()
    if misfits:
        lines.append("It does not fit.", style="bold red")
        for misfit in misfits:
            lines.append(f"\n- {misfit}")
    elif options.device_bytes is not None:
        lines.append("It fits.", style="bold green")
    else:
        lines.append("This layout is possible.", style="bold green")
        lines.append(" Give --device-bytes to compare it with a budget.")
    return Panel(lines, title=title, title_align="left", expand=False)


def _what_is_cut(stage: int, copies: int) -> str:
    cut: dict[int, Any] = {
        0: "nothing is sharded over",
        1: "states are sharded over",
        2: "states, and gradients after their exchange, are sharded over",
        3: "parameters, gradients and states are sharded in chunks over",
    }
    ranks = f"{copies} data ranks" if copies > 1 else "one data rank"
    return (
        f"zero_stage {stage}: {cut[stage]} {ranks}. Activations are the tensors that forward keeps "
        "for backward; temporaries of operators are not counted.\n"
    )
