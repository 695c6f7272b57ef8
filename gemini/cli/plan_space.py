"""``gemini plan MODEL --ranks N --space NAME``: prints the plan of another system, and whether it can run
here."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from rich.table import Table

from gemini.cli.console import Console, print_json
from gemini.cli.plan_search import question_of, runner_of
from gemini.errors import ConfigError
from gemini.forecast.machine import threads_of_a_rank
from gemini.forecast.rehearsal import ModelSource
from gemini.planner.search import Search
from gemini.planner.spaces.galvatron_files import GalvatronFile, exported
from gemini.planner.spaces.table import SYSTEMS, SystemPlan, SystemRequest, priced_plan, system
from gemini.planner.spaces.tree import candidates, counts
from gemini.system.config import format_bytes

LIST = "list"


def run_without_model(options: argparse.Namespace) -> int:
    """Print the table of systems, or the candidates of Galvatron's trees. Raises ConfigError."""
    if options.space == LIST:
        _print_systems(options)
    elif options.space == "galvatron" and options.ranks is not None:
        _print_trees(options)
    else:
        system(options.space)
        raise ConfigError(f"--space {options.space} needs a MODEL, such as gpt2")
    return 0


def run(options: argparse.Namespace, source: ModelSource, settings: Any) -> int:
    """Print the plan of a system, and save it if requested. Return 0, or 1 if nothing fits.

    Raises:
        ConfigError: the system does not support the model or the number of ranks, or the plan to save is not
            uniform.
    """
    question = question_of(options, settings)
    model, run_of = runner_of(options, source)
    with Console(stderr=True).status("rehearsing") as status, threads_of_a_rank(question.num_ranks):
        searching = Search(model, run_of, dataclasses.replace(question, tell=status.update))
        request = SystemRequest(
            searching,
            model,
            run_of,
            question.num_ranks,
            question.batch,
            question.capacity,
            _annotations(options),
            options.seed or 1,
        )
        found = _imported(options, request) if options.import_plan else system(options.space).plan(request)
    if found is None:
        why = f"no plan of {options.space} fits in {format_bytes(request.capacity.device_bytes)} per rank"
        if options.json:
            print_json({"model": source.name, "space": options.space, "fits": False, "why": why})
        else:
            Console().print(f"{why}; raise --device-bytes", highlight=False)
        return 1
    _keep(options, request, found, source)
    if options.json:
        print_json({"model": source.name, "space": options.space, **_document(found, request)})
    else:
        _render(options, request, found)
    return 0 if _fits(found, request) else 1


def _annotations(options: argparse.Namespace) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in options.annotate or ():
        name, given, how = text.partition("=")
        if not given or name in found:
            raise ConfigError(f"--annotate {text}: write TENSOR=HOW, once for each tensor")
        found[name] = how
    return found


def _imported(options: argparse.Namespace, request: SystemRequest) -> SystemPlan:
    """Return the price of an imported Galvatron plan."""
    file = GalvatronFile.load(options.import_plan)
    plan = file.layerwise(request.ranks)
    return dataclasses.replace(
        priced_plan(plan, request.blocks.priced(plan)), differs=file.not_runnable(request.ranks)
    )


def _keep(
    options: argparse.Namespace, request: SystemRequest, found: SystemPlan, source: ModelSource
) -> None:
    if options.export_plan is not None:
        if found.plan is None:
            raise ConfigError(
                f"--export-plan: plans of {options.space} have no Galvatron strategies; leave it out"
            )
        exported(found.plan).save(options.export_plan)
    if options.save_plan is not None:
        if found.plan is None or found.differs:
            raise ConfigError(f"--save-plan: the plan does not run: {'; '.join(found.differs)}")
        runnable = request.blocks.runnable(found.plan, source.example(1).model, options.dtype)
        runnable.save(options.save_plan)


def _fits(found: SystemPlan, request: SystemRequest) -> bool:
    return found.device_bytes is None or found.device_bytes <= request.capacity.device_bytes


def _document(found: SystemPlan, request: SystemRequest) -> dict[str, Any]:
    return {
        "fits": _fits(found, request),
        "step_seconds": found.step_seconds,
        "seconds": dict(found.seconds),
        "device_bytes": found.device_bytes,
        "plan": [{"what": what, "strategy": how} for what, how in found.rows],
        "runs": not found.differs,
        "would_have_to_be_uniform": list(found.differs),
    }


def _render(options: argparse.Namespace, request: SystemRequest, found: SystemPlan) -> None:
    console, title = Console(), system(options.space).title
    console.print(
        f"{title} on {request.ranks} ranks: a step is predicted to take {found.step_seconds:.4g} s",
        highlight=False,
    )
    if found.seconds:
        spent = ", ".join(f"{name} {value:.3g} s" for name, value in found.seconds.items())
        console.print(f"Of that: {spent}", highlight=False)
    if found.device_bytes is not None:
        has = format_bytes(request.capacity.device_bytes)
        verb = "holds" if _fits(found, request) else "would hold"
        console.print(f"Each rank {verb} {format_bytes(found.device_bytes)} of its {has}", highlight=False)
    table = Table(box=None, pad_edge=False, show_header=False)
    for row in found.rows:
        table.add_row(*row)
    console.print(table)
    if found.differs:
        console.print("The plan does not run here. To run, it must be uniform:", highlight=False)
        for reason in found.differs:
            console.print(f"  {reason}", highlight=False, markup=False)
    elif options.save_plan is None:
        console.print("This plan runs here: save it with --save-plan FILE.", highlight=False)
    else:
        console.print(f"Run it: HybridParallelPlugin(plan={str(options.save_plan)!r})", highlight=False)


def _print_systems(options: argparse.Namespace) -> None:
    if options.json:
        print_json(
            {name: {"title": e.title, "decides": e.decides, "runs": e.runs} for name, e in SYSTEMS.items()}
        )
        return
    table = Table("space", "system", "decides", "runs here", box=None, pad_edge=False)
    for name, each in SYSTEMS.items():
        table.add_row(name, each.title, each.decides, each.runs)
    Console().print(table)


def _print_trees(options: argparse.Namespace) -> None:
    """Print the candidates of Galvatron's trees for a number of ranks."""
    every, pruned = counts(options.ranks, pruned=False), counts(options.ranks)
    found = candidates(options.ranks)
    if options.json:
        names = [str(each) for each in found]
        print_json({"ranks": options.ranks, "all": every, "pruned": pruned, "candidates": names})
        return
    table = Table("pp", "all", "pruned", "candidates", box=None, pad_edge=False)
    for pp, count in every.items():
        own = ("; ".join(str(each).removeprefix(f"pp {pp}, ") for each in found if each.pp == pp)) or "-"
        table.add_row(str(pp), str(count), str(pruned[pp]), own)
    table.add_row("sum", str(sum(every.values())), str(len(found)), "with recomputation twice as many")
    Console().print(table)


def refuse_contradictions(options: argparse.Namespace) -> None:
    """Raise ConfigError for options that fix a choice of the space, or that belong to another way of
    planning."""
    if options.space == LIST:
        raise ConfigError("--space list prints all systems: leave MODEL out")
    system(options.space)
    fixed = [name for name in ("tp", "pp", "sp", "dp", "pin", "measure", "search") if getattr(options, name)]
    if fixed:
        raise ConfigError(f"--space {options.space} chooses these itself: leave out --{', --'.join(fixed)}")
    if options.accumulation != 1 or options.checkpointing:
        raise ConfigError(
            "--space chooses micro-batches and recomputation: leave out --accumulation and --checkpointing"
        )
    for name, space in (("annotate", "gshard"), ("seed", "flexflow")):
        if getattr(options, name) and options.space != space:
            raise ConfigError(f"--{name} needs --space {space}")
    if options.import_plan is not None and options.space != "galvatron":
        raise ConfigError("--import-plan reads Galvatron plan files: add --space galvatron")
