"""``gemini plan MODEL --ranks N --search``: searches the fastest way to train a model over ranks and
tiers."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import nn

from gemini.cli.console import Console, print_json
from gemini.cli.options import with_options
from gemini.cli.plan_layout import DTYPES, run_on
from gemini.cli.plan_model import ModelOptions
from gemini.errors import ConfigError, OutOfBudgetError
from gemini.forecast.machine import threads_of_a_rank
from gemini.forecast.rehearsal import ModelSource
from gemini.parallel.layout_plan import Run
from gemini.parallel.plan import ParallelPlan
from gemini.planner.chunks import StageCapacity
from gemini.planner.plans import misfit_text, plan_of
from gemini.planner.search import Found, Question, RunOf, Search, require_speeds
from gemini.planner.space import Pins
from gemini.runtime.intercept.nested import cast_floating, map_tensors
from gemini.system.config import MOST_BYTES

_SHOWN = 5  # runners-up to print


def run(options: argparse.Namespace, asked: ModelOptions, source: ModelSource, settings: Any) -> int:
    """Print the best plan, and save it if requested. Return 0, or 1 if nothing fits.

    Raises:
        ConfigError: the pins exclude everything, or the machine has no speeds of collectives.
        StateError: --measure was given, and no plan could be run.
    """
    question = question_of(options, settings)
    example = source.example(1)
    model, run_of = runner_of(options, source)
    with Console(stderr=True).status("rehearsing") as status, threads_of_a_rank(question.num_ranks):
        question = dataclasses.replace(question, tell=status.update)
        searching = Search(model, run_of, question)
        found = searching.run()

    def make(found: Found, place: int = 0) -> ParallelPlan:
        """Return a plan for the model that plugins get, which they cast themselves."""
        return plan_of(found, question, example.model, options.dtype, place=place)

    try:
        plan = make(found)
        if options.measure is not None:
            found, plan = _measured(searching, found, make, options, asked)
    except OutOfBudgetError as error:
        if options.json:
            print_json({"model": source.name, "fits": False, "why": with_options(str(error))})
        else:
            Console().print(with_options(str(error)), highlight=False)
        return 1
    if options.save_plan is not None:
        plan.save(options.save_plan)
    if options.json:
        print_json({"model": source.name, "fits": True, **plan.to_json()})
    else:
        _render(plan, found, options, Console())
    return 0


def runner_of(options: argparse.Namespace, source: ModelSource) -> tuple[nn.Module, RunOf]:
    """Return the model in the requested type, and a function that returns its run for a number of samples."""
    example, dtype = source.example(1), DTYPES[options.dtype]

    def run_of(samples: int) -> Run:
        inputs = source.example(samples).inputs
        cast = map_tensors(inputs, lambda tensor: cast_floating(tensor, dtype))
        return run_on(example, cast, source.loss)

    return source.example(1).model.to(dtype), run_of


def _measured(
    searching: Search,
    found: Found,
    make: Callable[[Found, int], ParallelPlan],
    options: argparse.Namespace,
    asked: ModelOptions,
) -> tuple[Found, ParallelPlan]:
    """Return the last result of the search and the fastest measured plan. Raises StateError."""
    from gemini.cli.plan_measure import Job, Trials, run_on_ranks

    job = Job(options.model, asked.seq, asked.seq_is_asked, options.disk_dir)
    with Console(stderr=True).status("running plans") as status:
        trials = Trials(options.measure, make, partial(run_on_ranks, job=job), status.update)
        return trials.fastest(searching, found)


def question_of(options: argparse.Namespace, settings: Any) -> Question:
    """Return the input of the search. Raises ConfigError."""
    machine, config = settings.machine, settings.config
    require_speeds(machine, options.ranks or 1)
    return Question(
        options.ranks or 1,
        options.batch,
        machine,
        StageCapacity(config.device_bytes, config.host_bytes or 0, _disk_bytes(config)),
        Pins.parse(options.pin or ()),
        settings.sample_seconds,
    )


def _disk_bytes(config: Any) -> int:
    """Return the budget of DISK; unlimited if there is a directory without a budget."""
    if config.disk_dir is None:
        return 0
    return config.disk_bytes if config.disk_bytes is not None else MOST_BYTES


def _render(plan: ParallelPlan, found: Found, options: argparse.Namespace, console: Console) -> None:
    """Print the plan for people."""
    shown = dataclasses.replace(plan, runners_up=plan.runners_up[:_SHOWN], left_out=())
    console.print(shown.explain().rstrip(), highlight=False, markup=False)
    _render_left_out(found, console)
    console.print(
        f"\n{found.num_priced} of {found.num_combinations} combinations were evaluated; the others "
        "cannot be faster.",
        highlight=False,
    )
    if options.save_plan is None:
        console.print("Save the plan with --save-plan FILE.", highlight=False)
    else:
        runs = "one process runs" if plan.world_size == 1 else f"{plan.world_size} processes run"
        said = f"Run it: HybridParallelPlugin(plan={str(options.save_plan)!r}) in a program that {runs}"
        if Path(options.model).is_dir():
            said += f", or {_finetune_command(plan, options)}"
        console.print(f"{said}.", highlight=False)


def _finetune_command(plan: ParallelPlan, options: argparse.Namespace) -> str:
    """Return the ``gemini finetune`` command that runs the plan, with the options that the plan does not
    contain."""
    has_disk = any(plan.budgets_of(rank).disk_bytes for rank in range(plan.layout.pp))
    asked = {
        "--model": options.model,
        "--plan": options.save_plan,
        "--seq": options.seq,
        "--lora": options.lora,
        "--lora-targets": options.lora_targets,
        "--quantize": options.quantize,
        "--disk-dir": (options.disk_dir or "DIR") if has_disk else None,
    }
    given = [f"{name} {value}" for name, value in asked.items() if value is not None]
    given += ["--dora"] if options.dora else []
    return " ".join(["gemini finetune", *given, "--data PATH --output DIR"])


def _render_left_out(found: Found, console: Console) -> None:
    table = Table(title="\nleft out", title_justify="left", box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for what, why in found.left_out.items():
        table.add_row(what, why)
    for layout, misfit in found.misfits.items():
        if all(each.combination.layout != layout for each in found.prices):
            table.add_row(str(misfit.combination), misfit_text(misfit))
    if table.row_count:
        console.print(table)


def refuse_contradictions(options: argparse.Namespace) -> None:
    """Raise ConfigError for options that fix a choice of the search, or that need ``--search`` without it."""
    of_spaces = ("import_plan", "export_plan", "annotate", "seed")
    if given := [f"--{name.replace('_', '-')}" for name in of_spaces if getattr(options, name) is not None]:
        raise ConfigError(f"{', '.join(given)} need another system: add --space NAME")
    if not options.search:
        given = [name for name in ("ranks", "pin", "save_plan", "measure") if getattr(options, name)]
        if given:
            named = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            verb = "belongs" if len(given) == 1 else "belong"
            raise ConfigError(f"{named} {verb} to a search; add --search")
        return
    fixed = [name for name in ("tp", "pp", "sp", "dp") if getattr(options, name) is not None]
    if fixed:
        pins = " ".join(f"--pin {name}={getattr(options, name)}" for name in fixed)
        raise ConfigError(f"--search chooses sizes: write {pins} instead of --{', --'.join(fixed)}")
    if options.accumulation != 1 or options.checkpointing:
        raise ConfigError(
            "--search chooses micro-batches and recomputation: leave out --accumulation and "
            "--checkpointing, and give --batch the number of samples per step over all ranks"
        )
    if options.measure is not None:
        from gemini.cli.plan_measure import refuse_unmeasurable

        refuse_unmeasurable(options)
