"""``gemini plan MODEL --search --measure N``: runs steps of the best plans on ranks of this machine."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from gemini.cli.plan_model import ModelOptions, find_model
from gemini.errors import ConfigError, GeminiError, StateError, in_words
from gemini.forecast.machine import MachineSpeeds, own_name
from gemini.forecast.rehearsal import Example, ModelSource
from gemini.optim import CPUAdam
from gemini.parallel.booster.booster import Booster
from gemini.parallel.booster.plugin.hybrid import HybridParallelPlugin
from gemini.parallel.booster.ranks import Ranks, join_launched_group
from gemini.parallel.launch.local_ranks import as_rank, directory_of_job, run_local_ranks
from gemini.parallel.layout import Layout
from gemini.parallel.plan import ParallelPlan
from gemini.planner.plans import Trial, after_trials
from gemini.planner.search import Found, Search
from gemini.planner.space import named
from gemini.runtime.intercept.nested import map_tensors
from gemini.system.device import gpu_count
from gemini.system.durable import write_text
from gemini.system.threads import usable_processors

STEPS = 3  # measured steps
_SETTLING = 4  # unmeasured steps in which activation_offload="auto" decides which activations stay on DEVICE
_PLAN, _JOB, _SECONDS = "plan.json", "job.json", "seconds"


@dataclass(frozen=True)
class Job:
    """The job of the ranks: the model as named on the command line, and the directory of DISK."""

    model: str
    seq: int
    seq_is_asked: bool
    disk_dir: str | None = None

    def source(self) -> ModelSource:
        """Return the model."""
        return find_model(self.model, ModelOptions(self.seq, False, seq_is_asked=self.seq_is_asked))


def refuse_unmeasurable(options: argparse.Namespace) -> None:
    """Raise ConfigError if plans cannot be run here, before anything that takes time."""
    ranks = options.ranks or 1
    if options.machine is not None and (other := MachineSpeeds.load(options.machine).name) != own_name():
        raise ConfigError(
            f"--measure runs plans on this machine ({own_name()}), but --machine {options.machine} "
            f"describes {other!r}: leave one out, or measure on that machine"
        )
    what, most = ("GPUs", gpu_count()) if gpu_count() else ("processors", len(usable_processors()))
    if ranks > most:
        raise ConfigError(
            f"--measure needs {ranks} ranks on this machine, which has {most} {what}: times of ranks "
            "that share one are not representative; plan without --measure, or measure on a larger "
            "machine"
        )


@dataclass(frozen=True)
class Trials:
    """Runs the best plans of a search until ``count`` of them have run.

    Attributes:
        plan_at: returns the plan of the result at an index.
        run: runs a plan, and returns the seconds of a step.
        tell: called with the description of each plan before it runs.
    """

    count: int
    plan_at: Callable[[Found, int], ParallelPlan]
    run: Callable[[ParallelPlan], float]
    tell: Callable[[str], object]
    _runnable: set[Layout] = field(default_factory=set, init=False)

    def fastest(self, searching: Search, found: Found) -> tuple[Found, ParallelPlan]:
        """Return the plan with the fastest steps, and the last result of the search; ``found`` is the first
        one.

        If the library refuses a layout for this model, the search is repeated without the layout. A plan that
        fails for another reason is left out.

        Raises:
            StateError: no plan could be run.
        """
        trials: dict[str, Trial] = {}
        impossible: dict[Layout, str] = {}
        self._try(found, trials, impossible)
        known = 0
        while known < len(impossible):
            known = len(impossible)
            found = searching.run(impossible=impossible)
            self._try(found, trials, impossible)
        ran = {name: each.seconds for name, each in trials.items() if each.seconds is not None}
        if not ran:
            reasons = {name: each.why for name, each in trials.items()}
            reasons |= {named(layout): why for layout, why in impossible.items()}
            said = "; ".join(f"{name}: {why}" for name, why in reasons.items())
            raise StateError(f"all plans failed to run: {said}")
        best = min(ran, key=lambda name: ran[name])
        place = [str(each.combination) for each in found.prices].index(best)
        return found, after_trials(self.plan_at(found, place), best, trials)

    def _try(self, found: Found, trials: dict[str, Trial], impossible: dict[Layout, str]) -> None:
        """Run the best plans of ``found`` until ``count`` of them have run."""
        for place, price in enumerate(found.prices):
            ran, name = sum(each.seconds is not None for each in trials.values()), str(price.combination)
            layout = price.combination.layout
            if ran == self.count:
                return
            if name in trials or layout in impossible:
                continue
            self.tell(f"running plan {ran + 1} of {self.count}: {name}")
            try:
                trials[name] = Trial(price.step_seconds, self.run(self.plan_at(found, place)))
                self._runnable.add(layout)
            except GeminiError as error:
                why = f"when run: {in_words(error)}"
                if isinstance(error, ConfigError) and layout not in self._runnable:
                    impossible[layout] = why
                else:
                    trials[name] = Trial(price.step_seconds, None, why)


def run_on_ranks(plan: ParallelPlan, job: Job) -> float:
    """Return the median time of a step in seconds; the slowest rank counts in each step. Raises StateError if
    a rank has failed."""
    with directory_of_job() as directory:
        plan.save(directory / _PLAN)
        write_text(directory / _JOB, json.dumps(asdict(job)), "write what ranks train")
        run_local_ranks(__name__, directory, plan.world_size)
        taken = [json.loads(path.read_text()) for path in directory.glob(f"{_SECONDS}-*")]
    seconds: float = median(max(each) for each in zip(*taken, strict=True))
    return seconds


# -- on a rank ---------------------------------------------------------------------------------------------


def seconds_of_steps(plan: ParallelPlan, job: Job) -> list[float]:
    """Train as this rank of a plan. Return the seconds of each step after the first ones."""
    source, samples = job.source(), plan.num_microbatches * plan.microbatch_size
    # With ZeRO 3, values are initialized in chunks; below, the whole model needs values before it is cut.
    example = source.example(samples) if plan.zero_stage == 3 else source.build(samples)
    example.module.train()
    torch.manual_seed(0)  # ranks along tp, pp and sp must have the same samples
    batch, inputs_of = _batch(example)

    def loss_of(outputs: Any, own: Any) -> torch.Tensor:
        return source.loss(outputs, inputs_of(own))

    options: dict[str, Any] = {"disk_dir": job.disk_dir} if plan.budgets.disk_bytes else {}
    booster, model = Booster(plugin=HybridParallelPlugin(plan=plan, **options)), example.model
    model, optimizer, *_ = booster.boost(model, CPUAdam(model.parameters()), loss_of)
    seconds, ranks = [], Ranks()
    first = 1 if plan.activation_offload is None else _SETTLING
    for _ in range(first + STEPS):
        optimizer.zero_grad()
        ranks.agree(None)  # barrier: all ranks begin the step together
        begin = time.perf_counter()
        booster.execute_pipeline(iter([batch]), model, loss_of, optimizer)
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    return seconds[first:]


def _batch(example: Example) -> tuple[Any, Callable[[Any], tuple[Any, ...]]]:
    """Return a batch with values, as a dict of the model's keywords, and a function that converts such a dict
    to the inputs for the loss."""
    inputs: tuple[Any, ...] = map_tensors(example.inputs, _with_values)
    if len(inputs) == 1 and isinstance(inputs[0], Mapping):
        return dict(inputs[0]), lambda batch: (batch,)
    names = _names(example.model, len(inputs))
    return dict(zip(names, inputs, strict=True)), lambda batch: tuple(batch[name] for name in names)


def _names(model: nn.Module, count: int) -> Sequence[str]:
    """Return the names of the first ``count`` arguments of a model."""
    names = [
        name
        for name, each in inspect.signature(model.forward).parameters.items()
        if each.kind is each.POSITIONAL_OR_KEYWORD
    ]
    if len(names) < count:
        raise ConfigError(
            f"{type(model).__name__} is called with {count} inputs, but its forward() names "
            f"{len(names)}: name all inputs in forward() to measure the model"
        )
    return names[:count]


def _with_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor with random values: normal floats, True, or integers 0 and 1, which are valid
    tokens and classes for almost every model. Other tensors are returned unchanged."""
    if not tensor.is_meta:
        return tensor
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, dtype=tensor.dtype, device="cpu")
    if tensor.dtype is torch.bool:
        return torch.ones(tensor.shape, dtype=tensor.dtype, device="cpu")
    return torch.randint(0, 2, tensor.shape, dtype=tensor.dtype, device="cpu")


def _main(directory: Path) -> None:
    """Entry point of each rank."""
    with as_rank(directory):
        join_launched_group()
        job = Job(**json.loads((directory / _JOB).read_text()))
        seconds = seconds_of_steps(ParallelPlan.load(directory / _PLAN), job)
        text, rank = json.dumps(seconds), os.environ["RANK"]
        write_text(directory / f"{_SECONDS}-{rank}", text, "write how long steps took")
        Ranks().agree(None)  # barrier: no rank ends while others still use its connections


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
