"""``autoshard()``: plan layouts for every operator of a plain model, and return the model cut over the
ranks."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemini.errors import ConfigError
from gemini.forecast.machine import MachineSpeeds, measure_machine
from gemini.forecast.meter import OperationCosts, Period
from gemini.forecast.rehearsal import mean_of_outputs
from gemini.forecast.timing import sample
from gemini.memstats.collectives import CollectiveSpeeds
from gemini.parallel.booster.ranks import Ranks, join_launched_group
from gemini.parallel.collective_speeds import measure_among
from gemini.parallel.mesh import Axis
from gemini.planner.operators.apply import MeshRank, OperatorParallel
from gemini.planner.operators.axes import solve_on_mesh
from gemini.planner.operators.capture import Captured, LossOf, capture
from gemini.planner.operators.conversions import Converter, Links
from gemini.planner.operators.integer_problem import OperatorSeconds, StepProblem
from gemini.planner.operators.plan import OperatorPlan, plan_of
from gemini.planner.operators.rules import Rules
from gemini.system.config import parse_bytes

_SAMPLE_SECONDS = 2.0


def make_problem(
    captured: Captured, sizes: Sequence[int], machine: MachineSpeeds, *, sample_seconds: float = 0.0
) -> StepProblem:
    """Return a captured step on a mesh of these ``sizes`` as a problem; its ``program`` is then solved.

    ``sample_seconds``: how long operators are timed on this machine; 0: use only the machine's speeds. Raises
    ConfigError if the machine has no speeds of collectives.
    """
    times = OperatorSeconds(machine)
    if sample_seconds:
        period = Period()
        for node in captured.nodes:
            if node.op == "call_function" and (operation := times.operation(node)) is not None:
                period.operations[operation] += 1
        samples = sample([period], machine, limit_seconds=sample_seconds)
        times = OperatorSeconds(machine, OperationCosts(machine, samples))
    return StepProblem(captured, Rules(sizes), Converter(Links(tuple(sizes), (machine.collectives,))), times)


def autoshard(
    model: nn.Module,
    samples: Any,
    *,
    loss: LossOf = mean_of_outputs,
    mesh: Sequence[int] | None = None,
    machine: MachineSpeeds | Path | str | None = None,
    device_bytes: int | str | None = None,
) -> OperatorParallel:
    """Plan every operator of a step over the running ranks, and return the model cut into parts. Collective:
    all ranks call this with the same model and samples, and get the same plan; a single process counts as one
    rank::

        sharded = autoshard(model, batch)
        optimizer = torch.optim.AdamW(sharded.parameters())
        for batch in loader:            # of one form; the same on all ranks
            sharded(batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    Args:
        samples: the batch of a step of all ranks. Only its shapes and types matter.
        loss: called with ``(outputs, batch)``. Default: the model's own loss.
        mesh: sizes of the mesh, such as ``(2, 4)``; None: one axis of all ranks.
        machine: speeds of the machine, or the file that has them (docs/plan.md); None: they are measured now.
        device_bytes: limit for each rank's parameters, gradients, two fp32 optimizer states, and all results
            of operators; None: no limit.

    Raises:
        CaptureError: the step cannot be captured as one graph; ``gemini.autoparallelize`` plans it by blocks.
        MisfitError: no plan needs so few bytes.
        ConfigError: the mesh does not have the number of running ranks, or the machine has no speeds of
            collectives.
    """
    join_launched_group()
    world = Ranks().size
    sizes = tuple(mesh) if mesh is not None else (world,)
    if math.prod(sizes) != world or not sizes:
        raise ConfigError(f"a mesh of {' x '.join(map(str, sizes))} is not one of {world} ranks")
    budget = None if device_bytes is None else parse_bytes(device_bytes, name="device_bytes")
    captured = capture(model, samples, loss)
    rank = MeshRank(sizes)
    asked = _ShardRequest(captured, sizes, machine, budget)
    problem, plan = asked.alone() if rank.everyone is None else asked.of_all(rank.everyone)
    return OperatorParallel(model, problem, plan, rank)


@dataclass(frozen=True)
class _ShardRequest:
    """The arguments of :func:`autoshard`."""

    captured: Captured
    sizes: tuple[int, ...]
    machine: MachineSpeeds | Path | str | None
    budget: int | None

    def alone(self) -> tuple[StepProblem, OperatorPlan]:
        """Return the plan for a single process."""
        machine = self._read() or measure_machine(torch.float32, ())
        return self._plan(machine)

    def of_all(self, everyone: Axis) -> tuple[StepProblem, OperatorPlan]:
        """Return the plan of all ranks. Collective. Rank 0 reads or measures the machine and plans. The other
        ranks get its plan and its speeds, because the speeds determine the paths of conversions."""
        is_first = everyone.rank == 0
        machine = everyone.together(lambda: self._read() if is_first else None)
        if everyone.say("" if machine is not None else "measure")[0]:
            speeds = measure_among(everyone)
            measured = everyone.together(lambda: measure_machine(torch.float32, ()) if is_first else None)
            machine = measured and replace(measured, collectives=speeds)
        made = everyone.together(lambda: self._plan(machine) if machine is not None and is_first else None)
        digest = hashlib.sha256(self.captured.module.code.encode()).hexdigest()
        text = ""
        if made is not None and machine is not None:
            text = json.dumps([made[1].to_json(), machine.collectives.to_json(), digest])
        document, collectives, of_first = json.loads(everyone.say(text)[0])
        if set(everyone.say(digest)) != {of_first}:
            raise ConfigError(
                "ranks have captured different steps: give all ranks the same model and samples of one form"
            )
        if made is not None:
            return made
        known = MachineSpeeds("rank 0", {"fp32": 1.0}, 1.0, 1.0)  # computing speeds are not used here
        known = replace(known, collectives=CollectiveSpeeds.from_json(collectives))
        return make_problem(self.captured, self.sizes, known), OperatorPlan.from_json(document)

    def _read(self) -> MachineSpeeds | None:
        if self.machine is None or isinstance(self.machine, MachineSpeeds):
            return self.machine
        return MachineSpeeds.load(Path(self.machine))

    def _plan(self, machine: MachineSpeeds) -> tuple[StepProblem, OperatorPlan]:
        seconds = _SAMPLE_SECONDS if self.machine is None else 0.0
        problem = make_problem(self.captured, self.sizes, machine, sample_seconds=seconds)
        return problem, plan_of(problem, solve_on_mesh(problem.program, problem.axes, self.budget))
