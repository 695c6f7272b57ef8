"""``gemini finetune``: trains a Hugging Face checkpoint on text or conversations, under byte budgets. Before
it loads the model, it prints a forecast: whether it fits, the memory of each tier, the time of a step."""

from __future__ import annotations

import argparse
import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from gemini.chunk.disk_file import lacking_space
from gemini.cli.options import (
    add_memory_options,
    add_option,
    add_report_option,
    add_resume_option,
    options_named,
    with_options,
)
from gemini.cli.plan import settings_from
from gemini.cli.plan_model import hugging_face
from gemini.errors import ConfigError, GeminiError, OutOfBudgetError
from gemini.forecast.forecast import BatchForecast, Settings, forecast_batch, forecast_rank, time_step
from gemini.forecast.rehearsal import ModelSource
from gemini.jobs.finetune.adapters import adapter_errors, adapter_of, adapting
from gemini.jobs.finetune.config import NO, PARTS, QUANTIZE, SCHEDULES, TILED_LOSS, FineTuneConfig
from gemini.jobs.finetune.encoding import LOSS_ON
from gemini.jobs.finetune.engine import quantization_of, stored_quantization
from gemini.jobs.finetune.layouts import plan_of, refuse_unread, trains_parts
from gemini.jobs.finetune.preferences import DPO, OBJECTIVES
from gemini.jobs.finetune.record_kinds import DATA_FORMATS
from gemini.jobs.finetune.samples import DOCUMENTS
from gemini.jobs.run.managed import PRECISIONS
from gemini.jobs.run.run_directory import saved_options
from gemini.optim.kernels import STATE_DTYPES
from gemini.runtime.activation.recomputed_blocks import recompute_blocks, refuse_unfit_blocks
from gemini.runtime.config import GeminiConfig
from gemini.runtime.storage.experts import expert_sets
from gemini.system.config import format_bytes
from gemini.system.device import default_budget_bytes
from gemini.system.process import keep_few_kernels

COMMAND = "gemini finetune"

EPILOG = """\
examples:
  gemini finetune --model ./llama --data chats.jsonl --output out/tuned --device-bytes 20GiB \\
      --disk-dir /mnt/nvme
      train all weights in 20 GiB, the rest on a drive; out/tuned/model is for transformers
  gemini finetune --model ./llama --data chats.jsonl --output out/lora --lora 16 --merge
      train adapters of rank 16, and write the model with them merged in
  gemini finetune --model ./llama --data chats.jsonl --output out/qlora --lora 16 --quantize nf4
      the same on a 4-bit base model, quantized while it is loaded
  gemini finetune --model ./llama --data chats.jsonl --show 3
      print the tokens of three records, mark those in the loss, and exit
  gemini finetune recipes/full.toml --data mine.jsonl --steps 100
      a recipe: the same options in a file (lr = 1e-5, device_bytes = "20GiB"); the command line wins
  gemini finetune recipes/dpo.toml --model ./tuned --data pairs.jsonl --output out/dpo
      learn from preference pairs, by DPO
  gemini finetune recipes/full.toml --batch 4 --nproc 2
      two processes share the rows of each step, and the model
  gemini finetune recipes/full.toml --accumulate 4 --nproc 4 --tp 2 --pp 2
      four processes: tensor parallelism over two, two pipeline stages; --plan FILE runs a plan of gemini plan
  gemini finetune recipes/full.toml --resume auto
      continue the last run, or start one: for a job scheduler that restarts the command

data, recognized by the ending of a file and the keys of a record:
  .jsonl .json          records, one in each line or in a list; also .jsonl.gz
  .csv .tsv             records, named by the first line
  .parquet .arrow       records; needs pip install 'gemini-runtime[data]'
  other endings         each file is one text, in UTF-8
  a directory           all files in it, recursively; or a pattern in quotes: 'data/train-*.parquet'

  messages              {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}
  sharegpt              {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", ...}]}
  alpaca                {"instruction": "...", "input": "...", "output": "..."}
  prompt-completion     {"prompt": "...", "completion": "..."}; both may be lists of messages
  text                  {"text": "..."}
  preference            {"prompt": "...", "chosen": "...", "rejected": "..."}; with --objective dpo
  other keys            --data-keys prompt=question,completion=answer

  The tokenizer's chat template formats the first three. The loss counts answers and completions (with
  --loss-on all: every token), and every token of a text. --show 3 marks these tokens.

in the --output directory:
  model/         the trained model (from_pretrained())    metrics.jsonl   one line per step
  checkpoint/    the two newest (see gemini ckpt)         summary.json    the summary printed at the end
  memory.png     memory per tier over one step            best/           see --keep-best
  tensorboard/   see --report-to                          references.jsonl  the reference of dpo, if all
  tokens.bin     the tokens of the data, for --resume                       weights train

exit codes:
  0 done    2 an error
  130, 143, 138 Ctrl-C, SIGTERM or SIGUSR1: the step was finished and a checkpoint saved; to continue, run
                the same command with --resume auto

Sizes are bytes: 65536, 64KiB, 512MiB, 4GiB; auto: the runtime chooses. More: docs/finetune.md.
"""

_option = partial(add_option, kind=FineTuneConfig)
_YES_OR_NO = argparse.BooleanOptionalAction


def add_parser(subparsers: Any) -> None:
    """Add the ``finetune`` command to ``subparsers``."""
    parser = subparsers.add_parser(
        "finetune",
        help="fine-tune a Hugging Face model within byte budgets",
        description="Fine-tune all weights or LoRA adapters of a causal language model within the memory "
        "that you allow. The model is read from, and written to, a directory in the format of "
        "save_pretrained(). The command first prints a plan: whether the run fits, which tiers hold "
        "the model, how long a step takes. It asks no questions.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "recipe",
        nargs="?",
        type=Path,
        metavar="RECIPE",
        help="a .toml or .yaml file with options; paths in it are relative to its directory",
    )
    _add_data_options(parser.add_argument_group("model and data"))
    _add_training_options(parser.add_argument_group("training"))
    _add_adapter_options(parser.add_argument_group("adapters"))
    add_memory_options(parser.add_argument_group("memory"), FineTuneConfig)
    _add_run_options(parser.add_argument_group("run and output"))
    parser.set_defaults(run=run)


def config_from(options: argparse.Namespace) -> FineTuneConfig:
    """Return the config for parsed ``options``. They override those of the recipe, which override the stored
    options of a run to resume.

    Raises:
        ConfigError: the options are invalid, or the recipe cannot be read.
        CheckpointError: the stored options of the run cannot be read.
    """
    from gemini.jobs.finetune.config import with_plan
    from gemini.jobs.finetune.recipe import read_recipe

    names = {field.name for field in dataclasses.fields(FineTuneConfig)}
    recipe = {} if options.recipe is None else read_recipe(options.recipe)
    given = {**recipe, **{name: value for name, value in vars(options).items() if name in names}}
    saved: dict[str, Any] = {}
    if given.get("resume", "no") != "no" and given.get("output"):
        saved = saved_options(given["output"], FineTuneConfig, COMMAND)
    config = FineTuneConfig(**{**saved, **with_plan(given)})
    if options.recipe is None:  # with a recipe, an option may be given only to reset the recipe's value
        config.refuse_unread(given)
    return config


def run(options: argparse.Namespace) -> int:
    """Fine-tune, print the summary, and return the exit code."""
    from gemini.jobs.run.ranks import errors_of_rank, num_ranks, run_on_ranks

    keep_few_kernels()
    ranks = num_ranks()
    with errors_of_rank():
        config = config_from(options)
        if ranks > 1:
            return _run(options, _on_ranks(config, ranks))
        refuse_unread(config)
        if config.num_ranks == 1 or config.show:
            return _run(options, config)
    return run_on_ranks(_without_nproc(options.called), config.num_ranks)


def _without_nproc(arguments: Sequence[str]) -> list[str]:
    """Return the arguments for a rank, without ``--nproc``. torchrun would read ``--nproc`` as an
    abbreviation of its own options, even after the program's name."""
    return [
        each
        for before, each in zip(("", *arguments), arguments, strict=False)
        if "--nproc" not in (before, each) and not each.startswith("--nproc=")
    ]


def _on_ranks(config: FineTuneConfig, ranks: int) -> FineTuneConfig:
    """Return the config for one of ``ranks`` running ranks. Raises ConfigError if it is for another
    number."""
    config.data_ranks(ranks)
    if config.nproc not in (1, ranks):
        raise ConfigError(f"--nproc is {config.nproc}, but torchrun started {ranks} ranks; leave --nproc out")
    return replace(config, nproc=ranks)


def _run(options: argparse.Namespace, config: FineTuneConfig) -> int:
    """Run :func:`run` in this process."""
    try:
        from transformers.utils import logging
    except ImportError as error:
        raise ConfigError(
            f"{COMMAND} needs the package transformers: pip install 'gemini-runtime[hf]' ({error})"
        ) from error
    from gemini.cli.console import Console, print_json
    from gemini.jobs.finetune import job
    from gemini.jobs.run.display import ReadingDisplay, make_display
    from gemini.jobs.run.outcome import summary_table
    from gemini.jobs.run.ranks import place_among_ranks

    if config.show:
        for line in job.preview(config):
            print(line)
        return 0
    if config.plan is not None or config.recompute:
        _check_model(config)
    logging.disable_progress_bar()  # otherwise they would be drawn across the display
    console = Console(stderr=True)
    with options_named(), place_among_ranks() as rank, warnings.catch_warnings():
        # Deprecations between transformers and peft do not concern the user.
        warnings.simplefilter("ignore", FutureWarning)
        # PEFT sets these patterns itself for arrays of experts, then warns that no layer matches them.
        warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern keys", RuntimeWarning)
        result = job.run(
            config,
            show=lambda steps: make_display(console, steps=steps, quiet=options.quiet),
            reading=ReadingDisplay(console, quiet=options.quiet or rank.index > 0),
            forecast=forecast_lines if config.forecast and not options.quiet and not rank.index else None,
            rank=rank,
        )
    if rank.index:
        return result.exit_code
    if options.json:
        print_json(result.summary.to_dict())
    else:
        Console().print(summary_table(result.summary, COMMAND))
    return result.exit_code


def _check_model(config: FineTuneConfig) -> None:
    """Raise ConfigError if the plan or the blocks to recompute do not belong to the model, which is built on
    ``meta`` as in ``gemini plan``."""
    plain = replace(config, recompute="", quantize=NO)
    model = forecast_source(plain, config.seq or _ANY_SEQ).example(1).model
    if config.plan is not None:
        from gemini.parallel.plan import ParallelPlan

        ParallelPlan.load(config.plan).check(model, config.num_ranks)
    refuse_unfit_blocks(model, config.recomputed_blocks)


def _add_data_options(group: argparse._ArgumentGroup) -> None:
    _option(group, "--model", metavar="DIR", help="the checkpoint to start from: config.json, safetensors")
    _option(
        group,
        "--data",
        metavar="PATH",
        help="a file of records or text, a directory of them, or a pattern in quotes: see below",
    )
    _option(
        group,
        "--data-format",
        choices=DATA_FORMATS,
        help="the kind of the records, if their keys do not show it; see below",
    )
    _option(
        group,
        "--data-keys",
        metavar="NAMES",
        help="the names of the keys in your records, such as prompt=question,completion=answer",
    )
    _option(
        group,
        "--objective",
        choices=OBJECTIVES,
        help="sft learns answers; dpo learns to prefer chosen answers over rejected ones",
    )
    _option(
        group,
        "--dpo-beta",
        type=float,
        metavar="X",
        help="how close dpo stays to the initial model; higher is closer",
    )
    _option(
        group,
        "--loss-on",
        choices=LOSS_ON,
        help="the tokens of conversations and prompts that the loss counts: the answers, or all",
    )
    _option(
        group,
        "--show",
        type=int,
        metavar="N",
        help="print the tokens of the first N records, mark those in the loss, and exit; needs no --output",
    )
    _option(group, "--tokenizer", metavar="DIR", help="directory of the tokenizer; default: that of --model")
    _option(
        group,
        "--seq",
        type=int,
        metavar="N",
        help="tokens per row; default: 1024, or the model's number of positions if smaller",
    )
    _option(
        group,
        "--packing",
        action=_YES_OR_NO,
        help="pack several documents into a row (default); without: one document per row, truncated or "
        "padded to --seq",
    )
    _option(
        group,
        "--documents",
        choices=DOCUMENTS,
        help="how documents are packed: whole (a document longer than --seq is truncated), cut at the end "
        "of a row, or joined (cut, with attention between documents); auto: cut for texts, whole for "
        "other records",
    )
    _option(
        group,
        "--eval-share",
        type=float,
        metavar="X",
        help="share of the rows that is held out; their loss is printed at the end",
    )
    _option(
        group, "--eval-data", metavar="PATH", help="held-out records in files of their own, given like --data"
    )
    _option(
        group,
        "--eval-every",
        type=int,
        metavar="N",
        help="also compute the held-out loss after every N steps; 0: only at the end",
    )
    _option(
        group,
        "--keep-best",
        action=_YES_OR_NO,
        help="export the weights with the lowest held-out loss instead of the last weights; during the "
        "run they are in best/",
    )


def _add_training_options(group: argparse._ArgumentGroup) -> None:
    _option(group, "--epochs", type=float, metavar="X", help="passes over the data")
    _option(group, "--steps", type=int, metavar="N", help="total optimizer steps, instead of --epochs")
    _option(group, "--batch", type=int, metavar="N", help="rows per forward pass")
    _option(group, "--accumulate", type=int, metavar="N", help="forward passes per optimizer step")
    _option(
        group,
        "--lr",
        type=float,
        metavar="X",
        help="highest learning rate; default: 1e-5 for all weights, 2e-4 for LoRA, 1e-4 for DoRA; with dpo "
        "1e-6 for all weights, 5e-6 for adapters",
    )
    _option(group, "--schedule", choices=SCHEDULES, help="how the learning rate changes after the warm-up")
    _option(
        group,
        "--warmup",
        type=float,
        metavar="X",
        help="share of the steps over which the learning rate rises",
    )
    _option(group, "--weight-decay", type=float, metavar="X", help="of AdamW")
    _option(
        group, "--clip", type=float, metavar="X", help="clip the global gradient norm to this; 0: no clipping"
    )
    _option(
        group,
        "--precision",
        choices=PRECISIONS,
        help="dtype of weights, activations and the exported model; bf16 keeps an fp32 master of every "
        "trained weight",
    )
    _option(
        group,
        "--state-dtype",
        choices=STATE_DTYPES,
        help="dtype of Adam's two moments: 8, 4 or 2 bytes per trained weight",
    )
    _option(
        group,
        "--activation-checkpointing",
        action="store_true",
        help="recompute activations in backward instead of keeping them: less memory, more computing",
    )
    _option(
        group,
        "--recompute",
        metavar="NAMES",
        help="recompute only these blocks, such as model.layers.0,model.layers.1",
    )
    _option(
        group,
        "--tiled-loss",
        nargs="?",
        const="yes",
        choices=tuple(TILED_LOSS),
        help="compute the loss in tiles of rows, without all logits in memory at once; auto: if the "
        "logits would take more than a sixteenth of --device-bytes",
    )
    _option(
        group, "--seed", type=int, metavar="N", help="seed of the row order and of the adapters' first values"
    )


def _add_adapter_options(group: argparse._ArgumentGroup) -> None:
    _option(
        group,
        "--lora",
        type=int,
        metavar="RANK",
        help="train LoRA adapters of this rank; 0: train all weights",
    )
    _option(
        group,
        "--lora-alpha",
        type=int,
        metavar="N",
        help="adapters are scaled by alpha / rank; default: twice the rank, or 8 with --rslora",
    )
    _option(
        group,
        "--dora",
        action="store_true",
        help="DoRA: also train the magnitude of each row of a weight; slower, often better at a low rank",
    )
    _option(
        group,
        "--rslora",
        action="store_true",
        help="divide --lora-alpha by the square root of the rank: for high ranks",
    )
    _option(group, "--lora-dropout", type=float, metavar="X", help="dropout of the adapters' input")
    _option(
        group,
        "--lora-targets",
        metavar="NAMES",
        help="layers that get adapters, such as q_proj,v_proj; none: only the expert arrays that the next "
        "option names",
    )
    _option(
        group,
        "--lora-target-parameters",
        metavar="NAMES",
        help="expert arrays that get adapters, too, such as "
        "mlp.experts.gate_up_proj,mlp.experts.down_proj (PEFT's target_parameters)",
    )
    _option(
        group,
        "--quantize",
        choices=QUANTIZE,
        help="QLoRA: store the frozen weights of linear layers in 4 bits (nf4, bitsandbytes) or 8 (int8, "
        "torchao); needs --lora",
    )
    _option(
        group,
        "--merge",
        action="store_true",
        help="export the model with the adapters merged in; default: export only the adapters",
    )


def _add_run_options(group: argparse._ArgumentGroup) -> None:
    _option(group, "--output", metavar="DIR", help="directory of the run: see below")
    _option(
        group,
        "--checkpoint-every",
        type=int,
        metavar="N",
        help="also save after every N steps; 0: only at the end and on a stop signal",
    )
    add_resume_option(group, FineTuneConfig, "--output")
    _option(group, "--overwrite", action="store_true", help="discard the run in --output and start over")
    add_report_option(group, FineTuneConfig)
    _option(
        group,
        "--nproc",
        type=int,
        metavar="N",
        help="processes on this machine (ZeRO 3: each keeps a shard of the model; budgets are per "
        "process); a step uses the same rows as with one process",
    )
    for name, what in (
        ("tp", "tensor parallelism: each rank has a part of every weight"),
        (
            "pp",
            "pipeline parallelism: each rank has some blocks; --accumulate is the number of micro-batches",
        ),
        ("sp", "sequence parallelism: each rank has a part of every row"),
    ):
        _option(group, f"--{name}", type=int, metavar="N", help=f"number of ranks for {what}")
    _option(
        group,
        "--plan",
        metavar="FILE",
        help="a plan file, which sets budgets, precision, --batch, --accumulate, --recompute, --nproc, "
        "--tp, --pp, --sp and the pipeline schedule",
    )
    _option(group, "--forecast", action=_YES_OR_NO, help="print a forecast before training (default)")
    group.add_argument("--json", action="store_true", help="print the summary as JSON on standard output")
    group.add_argument("--quiet", action="store_true", help="print only the summary: no progress and no plan")


_SAMPLE_SECONDS = 1.0
_ANY_SEQ = 8  # used if only the parameters matter
_TIERS = ("device", "host", "disk")


def forecast_lines(config: FineTuneConfig, seq: int) -> Iterator[str]:
    """Yield the forecast of a run with rows of ``seq`` tokens, line by line. It asks and refuses nothing; if
    there is no forecast, a line gives the reason."""
    if trains_parts(config) or (config.plan is not None and config.num_ranks > 1):
        yield _line_of_layout(config)
        return
    try:
        yield from _lines_of_rank(config, seq) if config.num_ranks > 1 else _lines(config, seq)
    except GeminiError as error:
        yield f"plan: not available ({error})"


def _line_of_layout(config: FineTuneConfig) -> str:
    """Return the prediction of the plan of a run over ranks, or the command that makes a plan."""
    plan = plan_of(config)
    if plan is None:
        sizes = {**{name: getattr(config, name) for name in PARTS}, "dp": config.data_ranks(config.num_ranks)}
        asked = " ".join(f"--{name} {size}" for name, size in sizes.items() if size > 1)
        return (
            f"plan: not available here for {config.num_ranks} ranks; run gemini plan {config.model} {asked}"
        )
    sizes = {name: getattr(plan.layout, name) for name in (*PARTS, "dp")}
    named = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    most = max(each.device_bytes for each in plan.predicted.ranks)
    return (
        f"plan: {named}, ZeRO {plan.zero_stage} ({config.plan}): at most {format_bytes(most)} on "
        f"DEVICE per rank; about {plan.predicted.step_seconds:.3g} s per step"
    )


def _lines_of_rank(config: FineTuneConfig, seq: int) -> Iterator[str]:
    """Yield the forecast of each rank in a run in which ranks share whole models in chunks."""
    _refuse_devices(config)
    ranks, options = config.num_ranks, config.managed_options()
    del options["device"]
    if config.device_bytes is None:
        options["device_bytes"] = default_budget_bytes() // ranks
    rows, passes = config.rows_of_rank(ranks)
    if config.objective == DPO:
        rows *= 2  # a pair has two rows
    settings = GeminiConfig.from_options(**options)
    forecast = forecast_rank(forecast_source(config, seq), settings, rows, ranks, accumulation=passes)
    yield from _verdict(config, forecast, where=f" on each of {ranks} ranks", refused=_misfits(forecast))


def _lines(config: FineTuneConfig, seq: int) -> Iterator[str]:
    source, settings = forecast_source(config, seq), _settings(config)
    rows = 2 if config.objective == DPO else 1  # a pair has two rows
    forecast = forecast_batch(source, settings, config.batch * rows)
    yield from _verdict(config, forecast, where="", refused=_is_refused(forecast, settings))
    if forecast.obstacles:
        return
    step = time_step(forecast, settings)
    simulation, capacity = step.plan.simulation, forecast.blueprint.context.capacity
    budgets = (capacity.device_bytes, capacity.host_bytes, capacity.disk_bytes)
    kept = [
        f"{name.upper()} {format_bytes(simulation.peak_bytes.get(name, 0))} of {format_bytes(budget)}"
        for name, budget in zip(_TIERS, budgets, strict=True)
        if budget
    ]
    tokens = config.batch * rows * config.accumulate * seq
    writes = simulation.link_bytes.get("disk_write", 0)
    yield (
        f"plan: model data peaks at {', '.join(kept)}; about {step.seconds:.3g} s per step, "
        f"{tokens / step.seconds:,.0f} tokens/s, bound by {step.bound}; {format_bytes(writes)} "
        "written to DISK per step"
    )


def _verdict(config: FineTuneConfig, forecast: BatchForecast, *, where: str, refused: bool) -> Iterator[str]:
    """Yield whether a step fits, and the reasons if not.

    Args:
        where: the processes that the lines are about; empty for a single process.
        refused: loading will raise the same error.
    """
    size = forecast.blueprint.context.size.total_bytes
    needs = (
        f"{format_bytes(size)} of model data, at most {format_bytes(forecast.non_model_bytes)} of "
        "activations and temporaries at one moment"
    )
    smaller = (
        ""
        if config.state_dtype == "fp32"
        else f"; planned with fp32 states; {config.state_dtype} states take less"
    )
    if refused:
        if expert_sets(forecast.source.example(1).module):
            yield (
                "plan: not available for a mixture of experts within these budgets: the forecast "
                "counts all experts of a layer at once, but the run transfers them one by one; the "
                "first step is measured"
            )
            return
        yield f"plan: the run {'may' if smaller else 'does'} not fit{where}: {needs}{smaller}"
        if not smaller:
            return  # loading will raise the reason
    elif forecast.obstacles and config.activations == "keep":
        yield f"plan: activations will exceed the budget{where}: {needs}{smaller}"
    elif forecast.obstacles:
        yield (
            f"plan: activations do not fit on DEVICE, so --activations {config.activations} takes "
            f"effect{where}: {needs}"
        )
    if forecast.obstacles:
        for obstacle in forecast.obstacles:
            yield f"plan: {with_options(obstacle).replace('--checkpointing', '--activation-checkpointing')}"
        return
    yield f"plan: the run fits{where}: {needs}{smaller}"


def _is_refused(forecast: BatchForecast, settings: Settings) -> bool:
    """Return whether the model data does not fit, so that loading will be refused."""
    blueprint = forecast.blueprint
    if _misfits(forecast):
        return True
    if not settings.disk_is_here:
        return False
    return lacking_space(blueprint.budgets, blueprint.context.size.total_bytes) is not None


def _misfits(forecast: BatchForecast) -> bool:
    """Return whether the budgets are too small for the model data."""
    try:
        forecast.blueprint.refuse_misfit()
    except OutOfBudgetError:
        return True
    return False


def forecast_source(config: FineTuneConfig, seq: int) -> ModelSource:
    """Return the model of a run with rows of ``seq`` tokens, on ``meta``. Raises ConfigError."""
    directory = Path(config.model)
    quantization = quantization_of(config) or stored_quantization(directory)
    change = adapting(adapter_of(config), quantization, directory)

    def prepared(module: nn.Module) -> nn.Module:
        with adapter_errors(config):
            module = change(module)
        recompute_blocks(module, config.recomputed_blocks)
        return module

    return hugging_face(
        Path(config.model) / "config.json",
        seq,
        seq_is_asked=True,
        checkpointing=config.activation_checkpointing,
        adapted=prepared,
    )


def _settings(config: FineTuneConfig) -> Settings:
    options = argparse.Namespace(
        machine=None,
        dtype=config.precision,
        disk_dir=config.disk_dir,
        host_bytes=config.host_bytes,
        device_bytes=config.device_bytes,
        disk_bytes=config.disk_bytes,
        batch=config.batch,
        accumulation=config.accumulate,
        no_clipping=not config.clip,
    )
    _refuse_devices(config)
    settings: Settings = settings_from(options)
    tiled = replace(settings.config, tiled_loss=TILED_LOSS[config.tiled_loss])
    return replace(settings, sample_seconds=_SAMPLE_SECONDS, config=tiled)


def _refuse_devices(config: FineTuneConfig) -> None:
    """Raise ConfigError for a device that cannot be forecast."""
    if config.device_kind != "cpu":
        raise ConfigError(f"there is no forecast for {config.device}: the first step is measured")
