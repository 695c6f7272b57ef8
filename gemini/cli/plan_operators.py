"""``gemini plan MODEL --ranks N --operators``: plans layouts for every operator of a step."""

from __future__ import annotations

import argparse
from typing import Any

from torch import nn

from gemini.cli.console import Console, print_json
from gemini.cli.plan_layout import DTYPES
from gemini.cli.plan_model import ModelOptions
from gemini.cli.plan_search import run as run_search
from gemini.errors import ConfigError
from gemini.forecast.rehearsal import ModelSource
from gemini.planner.operators.autoshard import make_problem
from gemini.planner.operators.axes import solve_on_mesh
from gemini.planner.operators.capture import CaptureError, capture
from gemini.planner.operators.plan import plan_of
from gemini.planner.operators.program import MisfitError
from gemini.planner.search import require_speeds
from gemini.runtime.intercept.nested import cast_floating, map_tensors


class _Called(nn.Module):
    """Wraps a model such that it is called with the tuple of an example's inputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: tuple[Any, ...]) -> Any:
        """Call the model."""
        return self.model(*inputs)


def refuse_unused(options: argparse.Namespace) -> None:
    """Raise ConfigError for search options that a plan of operators does not use."""
    unused = {"--save-plan": options.save_plan, "--measure": options.measure, "--pin": options.pin}
    for name, value in unused.items():
        if value:
            raise ConfigError(
                f"--operators does not go with {name}: it prints layouts of operators, which "
                "autoshard() runs; give --search to plan by blocks"
            )


def run(options: argparse.Namespace, asked: ModelOptions, source: ModelSource, settings: Any) -> int:
    """Print the plan. Return 0, or 1 if nothing fits.

    If the step cannot be captured, the reason is printed and the model is planned by blocks. Raises
    ConfigError if the machine has no speeds of collectives.
    """
    ranks = options.ranks or 1
    require_speeds(settings.machine, ranks)
    example = source.example(options.batch)
    dtype = DTYPES[options.dtype]
    inputs = map_tensors(example.inputs, lambda tensor: cast_floating(tensor, dtype))
    notes = Console(stderr=True)
    try:
        with notes.status("capturing the step"):
            captured = capture(
                _Called(example.model.to(dtype)),
                {"inputs": inputs},
                lambda outputs, batch: source.loss(outputs, batch["inputs"]),
            )
    except CaptureError as error:
        notes.print(f"{error}\nPlanned by blocks:", highlight=False, markup=False)
        return run_search(options, asked, source, settings)
    try:
        with notes.status("planning operators"):
            problem = make_problem(
                captured, (ranks,), settings.machine, sample_seconds=settings.sample_seconds
            )
            found = solve_on_mesh(problem.program, problem.axes, settings.config.device_bytes)
            plan = plan_of(problem, found)
    except MisfitError as error:
        if options.json:
            print_json({"model": source.name, "fits": False, "why": str(error)})
        else:
            Console().print(str(error), highlight=False, markup=False)
        return 1
    if options.json:
        print_json({"model": source.name, "fits": True, **plan.to_json()})
    else:
        Console().print(plan.explain().rstrip(), highlight=False, markup=False)
    return 0
