"""The table of planning systems: what each one decides, which of its plans run here, and its search
function."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from math import prod

from torch import nn

from gemini.errors import ConfigError
from gemini.planner.chunks import StageCapacity
from gemini.planner.records import Part
from gemini.planner.search import RunOf, Search
from gemini.planner.spaces import alpa, galvatron
from gemini.planner.spaces.blocks import Blocks, PlanPrice
from gemini.planner.spaces.flexflow import flexflow
from gemini.planner.spaces.graph import CONTRACTING, LayerGraph, capture
from gemini.planner.spaces.layerwise import LayerwisePlan, Strategy
from gemini.planner.spaces.mesh import (
    LayoutCosts,
    Named,
    gshard,
    gshard_seconds,
    mesh_tensorflow,
    named,
)
from gemini.planner.spaces.splits import Chosen, SplitCosts, one_weird_trick, optcnn
from gemini.system.config import format_bytes

_SHOWN = 3  # layers that a reason names
_DEFAULT_ANNOTATIONS = {"inputs": "split:sample"}


@dataclass(frozen=True, eq=False)
class SystemRequest:
    """The input of a system's search.

    Attributes:
        run_of: returns the function that runs ``model`` on a number of samples.
        batch: number of samples in a step of all ranks.
        capacity: budget of each rank.
        annotations: annotations of tensors by name, for systems that use them.
        seed: seed of systems that search at random.
    """

    searching: Search
    model: nn.Module
    run_of: RunOf
    ranks: int
    batch: int
    capacity: StageCapacity
    annotations: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0

    @cached_property
    def blocks(self) -> Blocks:
        """The blocks of the model."""
        return Blocks.of(self.searching, self.capacity)

    @cached_property
    def graph(self) -> LayerGraph:
        """The layers of the model. Raises the errors of :func:`capture`."""
        return capture(self.searching, self.model, self.run_of, self.batch)

    @cached_property
    def splits(self) -> SplitCosts:
        """The costs of the layers' splits."""
        return SplitCosts(self.graph, self.ranks, self.searching.speeds)


@dataclass(frozen=True)
class SystemPlan:
    """The result of a system.

    Attributes:
        rows: (part of the model, its strategy), for display.
        seconds: of a step, by resource.
        device_bytes: peak bytes of a rank; None if the system ignores memory.
        differs: the properties that must be made uniform for the plan to run; empty: ``plan`` runs.
    """

    step_seconds: float
    rows: tuple[tuple[str, str], ...]
    seconds: Mapping[str, float]
    device_bytes: int | None
    differs: tuple[str, ...]
    plan: LayerwisePlan | None = None


@dataclass(frozen=True)
class System:
    """A system of the survey. ``decides``: its search space; ``runs``: which of its plans run here; ``plan``:
    its search, which returns None if nothing fits."""

    title: str
    decides: str
    runs: str
    plan: Callable[[SystemRequest], SystemPlan | None]


# -- strategies of blocks ------------------------------------------------------------------------------------


def priced_plan(plan: LayerwisePlan, price: PlanPrice) -> SystemPlan:
    """Return a layerwise plan and its price as the plan of a system."""
    device_bytes = max(each.device_bytes for each in price.ranks)
    return SystemPlan(price.step_seconds, _rows(plan), price.seconds, device_bytes, plan.not_uniform(), plan)


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


def _galvatron(request: SystemRequest) -> SystemPlan | None:
    found = galvatron.best_plan(request.blocks, request.ranks, request.batch)
    return None if found is None else priced_plan(found.plan, found.price)


def _alpa(request: SystemRequest) -> SystemPlan | None:
    found = alpa.best_plan(request.blocks, request.ranks, request.batch)
    return None if found is None else priced_plan(found.plan, found.price)


# -- splits of layers ----------------------------------------------------------------------------------------


def _uniform(request: SystemRequest, strategy: Strategy) -> tuple[LayerwisePlan | None, tuple[str, ...]]:
    """Return the plan with one strategy for all blocks, or why the model does not support it."""
    try:
        request.searching.costs_of(Part(strategy.tp), 2)
    except ConfigError as error:
        return None, (str(error),)
    count = len(request.blocks.names)
    plan = LayerwisePlan(request.batch, 1, (strategy,) * count, (strategy, strategy), (count,))
    return plan, plan.not_uniform()


def _grouped(pairs: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Merge rows that differ only in the numbers in their names into one row with a count."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, text in pairs:
        found.setdefault((re.sub(r"\d+", "*", name), text), []).append(name)
    return tuple(
        (f"{name} ({len(own)})" if len(own) > 1 else own[0], text) for (name, text), own in found.items()
    )


def _text(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} in {count}" for name, count in parts.items()) or "whole, on one rank"


def _split_plan(request: SystemRequest, found: Chosen) -> SystemPlan:
    costs, layers = request.splits, list(zip(request.graph, found.splits, strict=True))
    rows = _grouped((layer.name, _text(dict(split))) for layer, split in layers)
    own = sum(costs.own(at, split) for at, split in enumerate(found.splits))
    seconds = {"layers": own, "transfers": max(costs.total(found.splits) - own, 0.0)}
    data = (("sample", request.ranks),) if request.ranks > 1 else ()
    other = [(layer.name, split) for layer, split in layers if layer.numel and split != data]
    if not other:
        plan, differs = _uniform(request, Strategy(dp=request.ranks))
        return SystemPlan(found.seconds, rows, seconds, None, differs, plan)
    names = [f"{name} ({_text(dict(split))})" for name, split in other[:_SHOWN]]
    more = [f"and {len(other) - _SHOWN} more"] if len(other) > _SHOWN else []
    said = ", ".join([*names, *more])
    reason = f"every layer must have its samples in {request.ranks} parts, as dp; not so: {said}"
    return SystemPlan(found.seconds, rows, seconds, None, (reason,))


def _one_weird_trick(request: SystemRequest) -> SystemPlan:
    return _split_plan(request, one_weird_trick(request.splits))


def _optcnn(request: SystemRequest) -> SystemPlan:
    return _split_plan(request, optcnn(request.splits))


def _flexflow(request: SystemRequest) -> SystemPlan:
    found = _split_plan(request, flexflow(request.splits, seed=request.seed))
    # Transfers and exchanges overlap with computing, so their times do not add up.
    alone = ("without overlap", f"{sum(found.seconds.values()):.4g} s a step")
    return replace(found, seconds={}, rows=(alone, *found.rows))


# -- tensors over a mesh -------------------------------------------------------------------------------------


def _mesh_tensorflow(request: SystemRequest) -> SystemPlan:
    graph = named(request.graph)
    found = mesh_tensorflow(LayoutCosts(graph, request.searching.speeds), request.ranks)
    shape = " x ".join(map(str, found.mesh))
    rows = [("mesh", f"{shape} ranks")]
    for name, size in graph.sizes.items():
        place = found.layout.get(name)
        cut = "not cut" if place is None else f"along dimension {place}, in {found.mesh[place]}"
        rows.append((f"{name} {size}", cut))
    strategy, differs = _strategy_of(graph, found.layout, found.mesh)
    plan = None
    if strategy is not None:
        plan, differs = _uniform(request, strategy)
    return SystemPlan(found.seconds, tuple(rows), {"layers and messages": found.seconds}, None, differs, plan)


def _strategy_of(
    graph: Named, layout: Mapping[str, int], mesh: Sequence[int]
) -> tuple[Strategy | None, tuple[str, ...]]:
    """Return the strategy that equals a layout: cut samples are dp, cut channels within all blocks are tp. If
    there is none, return the changes that the layout needs."""
    rows = list(zip(graph.graph, graph.outputs, graph.reduced, strict=True))
    passed = {output["channel"] for layer, output, _ in rows if layer.kind in ("sum", "norm")}
    inner = {output["channel"] for layer, output, _ in rows if layer.kind in CONTRACTING} - passed
    inner &= {reduced for _, _, reduced in rows if reduced is not None}
    ends = {output["channel"] for _, output, _ in rows[-1:]} | {
        name for name in graph.sizes if name.endswith(" input")
    }
    cut = set(layout) - {"sample"}
    reasons = [
        f"{name} must be whole: dp cuts samples, and tp channels within blocks"
        for name in sorted(cut - inner - ends)
    ]
    cut &= inner | ends
    places = {layout[name] for name in cut}
    if cut and (missing := sorted(inner - cut)):
        reasons.append(f"{', '.join(missing)} must be cut as {min(cut)} is: one tp holds for all")
    if len(places) > 1:
        reasons.append("all channels must lie along one dimension of the mesh: one tp holds for all")
    if not reasons:
        tp = prod(mesh[place] for place in places)
        dp = mesh[layout["sample"]] if "sample" in layout else 1
        if tp * dp == prod(mesh):
            return Strategy(tp=tp, dp=dp), ()
        reasons.append(f"all {prod(mesh)} ranks must divide samples or channels, and {tp * dp} do")
    return None, tuple(reasons)


def _gshard(request: SystemRequest) -> SystemPlan:
    sharded = gshard(request.graph, request.annotations or _DEFAULT_ANNOTATIONS, request.ranks)
    rows = []
    for layer, each in zip(request.graph, sharded, strict=True):
        text = _text(each.output) if each.output else "whole, on every rank"
        weight = f"; weight: {_text(each.weight)}" if each.weight else ""
        sent = "; ".join(
            f"{m.kind} of {format_bytes(m.nbytes)} over {m.ranks} ({m.why})" for m in each.collectives
        )
        rows.append((layer.name, text + weight + (f"; {sent}" if sent else "")))
    seconds = gshard_seconds(request.graph, sharded, request.searching.speeds)
    data = {"sample": request.ranks} if request.ranks > 1 else {}
    other = [
        layer.name
        for layer, each in zip(request.graph, sharded, strict=True)
        if each.weight or dict(each.output) != data
    ]
    plan, differs = None, tuple[str, ...]()
    if other:
        more = f" and {len(other) - 1} more" if len(other) > 1 else ""
        differs = (
            f"every layer must have its samples in {request.ranks} parts and its weight whole, as dp; not "
            f"so: {other[0]}{more}",
        )
    else:
        plan, differs = _uniform(request, Strategy(dp=request.ranks))
    return SystemPlan(seconds, _grouped(rows), {"layers and messages": seconds}, None, differs, plan)


_DATA_ALONE = "data parallelism of all layers"

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
    "one-weird-trick": System(
        "One weird trick",
        "samples of layers with more activations than parameters, channels of the others",
        _DATA_ALONE,
        _one_weird_trick,
    ),
    "optcnn": System(
        "OptCNN",
        "parts of samples, channels, height, width or length for each layer; exact",
        _DATA_ALONE,
        _optcnn,
    ),
    "flexflow": System(
        "FlexFlow",
        "the same at random, priced by a simulator in which transfers overlap with computing",
        _DATA_ALONE,
        _flexflow,
    ),
    "mesh-tensorflow": System(
        "Mesh-TensorFlow",
        "which dimensions of tensors lie along which dimension of a mesh; all layouts",
        "samples as dp, all channels within blocks as tp",
        _mesh_tensorflow,
    ),
    "gshard": System(
        "GShard",
        "nothing: annotations of tensors (--annotate) decide, and what follows from them is shown",
        _DATA_ALONE,
        _gshard,
    ),
}


def system(name: str) -> System:
    """Return a system by name. Raises ConfigError if the name is unknown."""
    if name not in SYSTEMS:
        raise ConfigError(f"{name!r} is not a known space; give list, or one of {', '.join(SYSTEMS)}")
    return SYSTEMS[name]
