"""The table of systems: what each decides, which of its plans run here, and how it plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

from torch import nn

from gemini.errors import ConfigError
from gemini.planner.chunks import Capacity
from gemini.planner.search import RunOf, Search
from gemini.planner.spaces import alpa, galvatron
from gemini.planner.spaces.blocks import Blocks, PlanPrice
from gemini.planner.spaces.layerwise import LayerwisePlan


@dataclass(frozen=True, eq=False)
class Asked:
    """What a system plans: a ``model`` that ``run_of`` runs, over ``ranks`` with ``batch`` samples in a step
    of all, with ``capacity`` on each. ``annotations``: of tensors, by name, for systems that take them;
    ``seed``: of systems that search at random."""

    searching: Search
    model: nn.Module
    run_of: RunOf
    ranks: int
    batch: int
    capacity: Capacity
    annotations: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0

    @cached_property
    def blocks(self) -> Blocks:
        """The blocks of the model."""
        return Blocks.of(self.searching, self.capacity)


@dataclass(frozen=True)
class Answer:
    """What a system found. ``rows``: what has which strategy; ``seconds``: of a step, by resource;
    ``device_bytes``: the most that a rank holds, None where the system does not look at memory;
    ``differs``: what would have to be uniform to run, nothing: ``plan`` runs."""

    step_seconds: float
    rows: tuple[tuple[str, str], ...]
    seconds: Mapping[str, float]
    device_bytes: int | None
    differs: tuple[str, ...]
    plan: LayerwisePlan | None = None


@dataclass(frozen=True)
class System:
    """A system of the survey. ``decides``: its space; ``runs``: which of its plans run here; ``plan``: None
    where nothing fits."""

    title: str
    decides: str
    runs: str
    plan: Callable[[Asked], Answer | None]


def answer_of(plan: LayerwisePlan, price: PlanPrice) -> Answer:
    """Return the answer that is a strategy for each block."""
    device_bytes = max(each.device_bytes for each in price.ranks)
    return Answer(price.step_seconds, _rows(plan), price.seconds, device_bytes, plan.not_uniform(), plan)


def _rows(plan: LayerwisePlan) -> tuple[tuple[str, str], ...]:
    rows = [("step", f"{plan.batch} samples of all ranks in {plan.chunks} micro-batches, {plan.schedule}")]
    rows.append(("before the blocks", str(plan.outside[0])))
    for stage, (first, last) in enumerate(plan.ranges):
        name = f"stage {stage}, " if plan.pp > 1 else ""
        at = first
        for strategy, own in groupby(plan.strategies[first:last]):
            count = len(list(own))
            where = f"blocks {at} to {at + count - 1}" if count > 1 else f"block {at}"
            rows.append((name + where, str(strategy)))
            at += count
    return (*rows, ("behind the blocks", str(plan.outside[1])))


def _galvatron(asked: Asked) -> Answer | None:
    found = galvatron.best_plan(asked.blocks, asked.ranks, asked.batch)
    return None if found is None else answer_of(found.plan, found.price)


def _alpa(asked: Asked) -> Answer | None:
    found = alpa.best_plan(asked.blocks, asked.ranks, asked.batch)
    return None if found is None else answer_of(found.plan, found.price)


SYSTEMS: Mapping[str, System] = {
    "galvatron": System(
        "Galvatron",
        "dp, sdp (ZeRO 3), tp and recomputation for each block, within memory; stages of equal length",
        "one tp, dp and ZeRO stage for all blocks; recomputation may differ",
        _galvatron,
    ),
    "alpa": System(
        "Alpa",
        "stages of any length on submeshes of any size, dp and tp within each",
        "submeshes of one size with one dp, tp and ZeRO stage; stages of any length",
        _alpa,
    ),
}


def system(name: str) -> System:
    """Return a system of the table. Raises ConfigError where there is none of the name."""
    if name not in SYSTEMS:
        raise ConfigError(f"there is no space {name!r}; give list, or one of {', '.join(SYSTEMS)}")
    return SYSTEMS[name]
