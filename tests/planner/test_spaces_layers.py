"""Systems that share out layers: OptCNN, one weird trick, FlexFlow, Mesh-TensorFlow's layouts and GShard's
annotations."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from math import prod
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_models import Net, machine, net, question, run_of
from torch import nn

from gemini.errors import ConfigError
from gemini.forecast.meter import OperationCosts
from gemini.parallel.layout_plan import Run
from gemini.planner.chunks import StageCapacity
from gemini.planner.records import Part
from gemini.planner.search import Search
from gemini.planner.segment_costs import Speeds
from gemini.planner.spaces.flexflow import flexflow, simulated
from gemini.planner.spaces.graph import Layer, LayerGraph, capture
from gemini.planner.spaces.layerwise import Strategy
from gemini.planner.spaces.mesh import (
    LayoutCosts,
    gshard,
    gshard_seconds,
    layouts,
    mesh_tensorflow,
    meshes,
    named,
    parse_annotation,
    tensors_of,
)
from gemini.planner.spaces.splits import (
    SplitCosts,
    data_split,
    least_choice,
    one_weird_trick,
    optcnn,
    splits_of,
)
from gemini.planner.spaces.table import SYSTEMS, SystemRequest, _strategy_of, _uniform


class Pictures(nn.Module):
    """Convolutions with many activations before linear layers with many parameters, as AlexNet has them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.wide, self.head = nn.Linear(16 * 8 * 8, 128), nn.Linear(128, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.max_pool2d(torch.relu(self.two(torch.relu(self.one(x)))), 2)
        out: torch.Tensor = self.head(torch.relu(self.wide(x.flatten(1))))
        return out


class _Cut(Net):
    _tp_plan: ClassVar = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


class Attention(nn.Module):
    """One layer makes queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        out: torch.Tensor = x + self.out(mixed)
        return out


def pictures(samples: int) -> Run:
    def run(model: nn.Module, _sequence: Any) -> torch.Tensor:
        loss: torch.Tensor = model(torch.empty(samples, 3, 16, 16, device="meta")).sum()
        return loss

    return run


@cache
def drawn(seed: int, kind: str = "pictures", faster: float = 1.0) -> SystemRequest:
    with torch.device("meta"):
        model: nn.Module = Pictures() if kind == "pictures" else net(32, 64)
    run = pictures if kind == "pictures" else run_of
    request = question(4, 8, seed, machine=machine(seed, faster=faster))
    return SystemRequest(Search(model, run, request), model, run, 4, 8, StageCapacity(2**30))


def test_the_layers_of_a_model_have_its_dimensions_inputs_and_seconds() -> None:
    request = drawn(0)
    one, two, wide, head = request.graph
    assert [each.kind for each in request.graph] == ["conv", "conv", "linear", "linear"]
    assert dict(two.dims) == {"sample": 8, "channel": 16, "height": 16, "width": 16}
    assert (two.reduced, two.inputs, dict(two.halo)) == (8, (0,), {"height": 2, "width": 2})
    assert (wide.reduced, wide.numel, head.inputs, one.inputs) == (1024, 1024 * 128 + 128, (2,), ())
    figures = request.searching.costs_of(Part(), 8)
    total = sum(each.forward + each.backward for each in figures)
    assert sum(each.forward + each.backward for each in request.graph) == pytest.approx(total)


def test_tensors_meet_in_sums_and_tokens_in_attention() -> None:
    kinds = [each.kind for each in drawn(0, "net").graph]
    assert kinds == ["embedding", *["linear", "linear", "sum"] * 2, "linear"]
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(16, 16), Attention())

    def run(samples: int) -> Run:
        return lambda given, _: given(torch.empty(samples, 4, 16, device="meta")).sum()

    graph = capture(Search(model, run, question()), model, run, 8)
    assert [(each.kind, each.inputs) for each in graph] == [
        ("linear", ()),
        ("linear", (0,)),
        ("attention", (1,)),
        ("linear", (2,)),
    ]


def test_a_model_without_parameters_is_refused() -> None:
    request = drawn(0)
    with pytest.raises(ConfigError, match="no layers with parameters"):
        capture(request.searching, nn.ReLU(), pictures, 8)


# -- OptCNN and one weird trick ------------------------------------------------------------------------------


def test_configurations_are_all_ways_to_cut_a_layer() -> None:
    layer = Layer("x", "conv", (), {"sample": 8, "channel": 2, "height": 8, "width": 1})
    found = splits_of(layer, 4)
    assert len(set(found)) == len(found) == 9
    assert (("sample", 2), ("channel", 2)) in found
    assert all(4 % prod(count for _, count in each) == 0 for each in found)
    assert not any(name == "width" or count > layer.dims[name] for each in found for name, count in each)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 3), st.floats(0, 1))
def test_elimination_finds_what_brute_force_finds(seed: int, count: int, most: int, density: float) -> None:
    draw = np.random.default_rng(seed)
    choices = [int(draw.integers(1, most + 1)) for _ in range(count)]
    own = [draw.integers(0, 30, each).astype(float) for each in choices]
    between = {
        (a, b): draw.integers(0, 30, (choices[a], choices[b])).astype(float)
        for b in range(count)
        for a in range(b)
        if draw.random() < density
    }
    seconds, choice = least_choice(own, between)

    def cost(picked: tuple[int, ...]) -> float:
        moved = sum(table[picked[a], picked[b]] for (a, b), table in between.items())
        return float(moved + sum(own[at][each] for at, each in enumerate(picked)))

    assert seconds == cost(choice) == min(cost(each) for each in product(*(range(each) for each in choices)))


@pytest.mark.parametrize("kind", ["pictures", "net"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_optcnn_finds_the_best_of_all_configurations(kind: str, seed: int) -> None:
    request = drawn(seed, kind)
    short = request.graph[:4]
    costs = SplitCosts(short, 2, request.searching.speeds)
    best = min(costs.total(each) for each in product(*costs.splits))
    assert optcnn(costs).seconds == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_optcnn_is_never_slower_than_fixed_rules_or_on_slower_links(seed: int) -> None:
    for kind in ("pictures", "net"):
        costs = drawn(seed, kind).splits
        best = optcnn(costs)
        assert best.seconds == pytest.approx(costs.total(best.splits))
        data = [data_split(layer, 4) for layer in costs.graph]
        assert best.seconds <= costs.total(data) * (1 + 1e-9)
        assert best.seconds <= one_weird_trick(costs).seconds * (1 + 1e-9)
        assert optcnn(drawn(seed, kind, 5.0).splits).seconds <= best.seconds * (1 + 1e-9)


def test_a_layer_that_is_cut_as_its_input_gets_nothing() -> None:
    costs = drawn(0).splits
    data, channels = (("sample", 4),), (("channel", 4),)
    assert costs.transfer(0, 1, data, data) == 0
    assert costs.transfer(0, 1, (), ()) == 0
    rows = (("height", 4),)
    assert (
        0 < costs.transfer(0, 1, rows, rows) < costs.transfer(0, 1, channels, channels)
    )  # rows of neighbours


def test_the_weird_trick_cuts_samples_of_convolutions_and_channels_of_linear_layers() -> None:
    request = drawn(0)
    found = one_weird_trick(request.splits)
    assert found.splits == ((("sample", 4),), (("sample", 4),), (("channel", 4),), (("channel", 4),))
    large = SplitCosts(
        tuple(replace(e, dims={**e.dims, "sample": 2**20}) for e in request.graph),
        4,
        request.searching.speeds,
    )
    assert set(one_weird_trick(large).splits) == {(("sample", 4),)}


# -- FlexFlow ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_flexflow_is_never_slower_than_data_parallelism_and_repeats_itself(seed: int) -> None:
    for kind in ("pictures", "net"):
        costs = drawn(seed, kind).splits
        found = flexflow(costs, seed=seed, rounds=60)
        data = [data_split(layer, 4) for layer in costs.graph]
        assert found.seconds <= simulated(costs, data)
        assert found.seconds == simulated(costs, found.splits)
        assert found == flexflow(costs, seed=seed, rounds=60)
        assert flexflow(costs, seed=seed, rounds=120).seconds <= found.seconds


@pytest.mark.parametrize("seed", range(4))
def test_the_simulator_overlaps_what_is_added_up_elsewhere(seed: int) -> None:
    costs = drawn(seed, "net").splits
    draw = np.random.default_rng(seed)
    for _ in range(20):
        picked = [each[int(draw.integers(len(each)))] for each in costs.splits]
        assert simulated(costs, picked) <= costs.total(picked) * len(picked)
        computing = sum(layer.forward + layer.backward for layer in costs.graph)
        assert simulated(costs, picked) >= computing / 4
    alone = [() for _ in costs.graph]
    assert simulated(costs, alone) <= costs.total(alone) * (1 + 1e-9)


# -- Mesh-TensorFlow -----------------------------------------------------------------------------------------


def chain() -> LayerGraph:
    """Return two linear layers between an embedding and a sum: one block of a transformer, in short."""
    dims = {"sample": 4, "length": 4}
    return (
        Layer("tokens", "embedding", (), {**dims, "channel": 8}, 16, 128, 4, 1e-6, 1e-6),
        Layer("0.up", "linear", (0,), {**dims, "channel": 32}, 8, 256, 4, 1e-5, 2e-5),
        Layer("0.down", "linear", (1,), {**dims, "channel": 8}, 32, 256, 4, 1e-5, 2e-5),
        Layer("sum 3", "sum", (0, 2), {**dims, "channel": 8}),
        Layer("1.up", "linear", (3,), {**dims, "channel": 32}, 8, 256, 4, 1e-5, 2e-5),
        Layer("1.down", "linear", (4,), {**dims, "channel": 8}, 32, 256, 4, 1e-5, 2e-5),
    )


def speeds(seed: int = 0) -> Speeds:
    own = machine(seed)
    return Speeds(own, OperationCosts(own))


def test_equal_blocks_have_equal_names_and_sums_make_names_one() -> None:
    graph = named(chain()[:4])
    assert graph.outputs[0]["channel"] == graph.outputs[2]["channel"] == graph.outputs[3]["channel"]
    assert graph.outputs[1]["channel"] == "*.up"
    assert graph.reduced[2] == "*.up"
    assert dict(graph.sizes)["*.up"] == 32
    assert named(chain()).outputs[4]["channel"] == "*.up"


@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
def test_layouts_are_all_valid_ones_and_no_others(mesh: tuple[int, ...]) -> None:
    graph = named(chain())
    tensors, names = tensors_of(graph), list(graph.sizes)
    expected = set()
    for places in product((None, *range(len(mesh))), repeat=len(names)):
        layout = {name: place for name, place in zip(names, places, strict=True) if place is not None}
        once = all(
            len({layout[name] for name in dims if name in layout}) == sum(name in layout for name in dims)
            for dims in tensors
        )
        if once and all(graph.sizes[name] % mesh[place] == 0 for name, place in layout.items()):
            expected.add(frozenset(layout.items()))
    found = [frozenset(each.items()) for each in layouts(graph, mesh)]
    assert len(found) == len(set(found))
    assert set(found) == expected
    assert not any({name for name, _ in each} >= {"sample", "length"} for each in found if len(mesh) == 1)


@pytest.mark.parametrize("seed", range(4))
def test_the_best_layout_is_the_best_of_all(seed: int) -> None:
    costs = LayoutCosts(named(chain()), speeds(seed))
    found = mesh_tensorflow(costs, 4)
    every = [costs.seconds(mesh, each) for mesh in meshes(4) for each in layouts(costs.graph, mesh)]
    assert found.seconds == min(every)
    assert found.seconds <= costs.seconds((4,), {"sample": 0})
    fast = LayoutCosts(named(chain()), Speeds(machine(seed, faster=4.0), speeds(seed).costs))
    assert mesh_tensorflow(fast, 4).seconds <= found.seconds


def test_megatron_as_a_layout_sends_what_megatron_sends() -> None:
    layout = {"*.up": 0}
    costs = LayoutCosts(named(chain()), speeds())
    whole, cut = costs.seconds((4,), {}), costs.seconds((4,), layout)
    hidden = 4 * 4 * 8 * 4  # forward of the one layer, backward of the other
    sent = 4 * speeds().collective("all_reduce", 4, hidden)
    saved = sum((e.forward + e.backward) * 3 / 4 for e in chain() if "up" in e.name or "down" in e.name)
    update = 4 * (256 - 64) * 28 / speeds().machine.adam_bytes_per_second
    assert cut == pytest.approx(whole + sent - saved - update)


# -- GShard --------------------------------------------------------------------------------------------------


def kinds(annotations: dict[str, str]) -> list[list[tuple[str, str]]]:
    return [[(m.kind, m.why) for m in each.collectives] for each in gshard(chain(), annotations, 4)]


def test_annotated_inputs_make_data_parallelism() -> None:
    found = gshard(chain(), {"inputs": "split:sample"}, 4)
    assert all(dict(each.output) == {"sample": 4} for each in found)
    assert kinds({"inputs": "split:sample"})[1] == [("all_reduce", "gradients of parameters")]
    assert found[1].collectives[0].nbytes == 4 * 256


def test_annotated_weights_make_megatrons_pair() -> None:
    pair = {"0.up.weight": "split:channel", "0.down.weight": "split:reduced"}
    _, up, down, *_ = gshard(chain(), pair, 4)
    assert dict(up.output) == {"channel": 4}
    assert dict(down.output) == {}
    assert [m.kind for m in up.collectives] == ["all_reduce"]  # gradients of its input
    assert [(m.kind, m.why) for m in down.collectives] == [("all_reduce", "sums of input channels")]
    # A whole weight behind it needs the whole input.
    gathered = kinds({"0.up.weight": "split:channel"})[2]
    assert gathered[0] == ("all_gather", "the input")


def test_an_annotated_output_is_changed_to_what_it_says() -> None:
    found = gshard(chain(), {"inputs": "split:sample", "0.down": "replicate"}, 4)
    assert dict(found[2].output) == {}
    assert [m.kind for m in found[2].collectives][-1] == "all_gather"
    other = gshard(chain(), {"inputs": "split:sample", "0.down": "split:length"}, 4)
    assert [m.kind for m in other[2].collectives][-2:] == ["all_to_all"] * 2
    tiled = gshard(chain(), {"inputs": "shard:sample=2,length=2"}, 4)
    assert dict(tiled[5].output) == {"sample": 2, "length": 2}


def test_gshard_prices_data_parallelism_as_layouts_do() -> None:
    found = gshard(chain(), {"inputs": "split:sample"}, 4)
    layout = LayoutCosts(named(chain()), speeds()).seconds((4,), {"sample": 0})
    assert gshard_seconds(chain(), found, speeds()) == pytest.approx(layout)


@pytest.mark.parametrize(
    "annotations",
    [
        {"nothing": "replicate"},
        {"inputs": "scatter"},
        {"inputs": "split:"},
        {"inputs": "shard:sample=2"},
        {"inputs": "shard:sample=x"},
        {"inputs": "shard:sample=0,length=4"},
        {"0.up": "split:height"},
        {"0.up.weight": "split:sample"},
        {"tokens": "shard:sample=4,length=1,x=1000000000"},
    ],
)
def test_annotations_that_say_nothing_are_refused(annotations: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        gshard(chain(), annotations, 4)
    assert parse_annotation("replicate", 4) == {}


# -- the table -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["one-weird-trick", "optcnn", "flexflow", "mesh-tensorflow", "gshard"])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_plan_runs_or_says_why_not(name: str, seed: int) -> None:
    for kind in ("pictures", "net"):
        request = drawn(seed, kind)
        found = SYSTEMS[name].plan(request)
        assert found is not None
        assert found.step_seconds > 0
        assert (found.plan is not None) == (not found.differs)
        if found.plan is not None:
            plan = request.blocks.runnable(found.plan, request.model, "fp32")
            assert plan.world_size == 4
        assert found == SYSTEMS[name].plan(request)


def test_data_parallelism_of_pictures_runs() -> None:
    request = drawn(0)
    found = SYSTEMS["gshard"].plan(request)
    assert found is not None
    assert found.plan is not None
    plan = request.blocks.runnable(found.plan, request.model, "fp32")
    assert (plan.layout.dp, plan.begins, plan.recompute) == (4, (), ())
    with pytest.raises(ConfigError, match="no row of blocks"):
        SYSTEMS["galvatron"].plan(request)


def test_layouts_that_megatron_and_data_parallelism_make_run() -> None:
    with torch.device("meta"):
        model = _Cut((32, 64))
    request = replace(drawn(0, "net"), searching=Search(model, run_of, question(4, 8, 0)), model=model)
    graph = named(request.graph)
    strategy, reasons = _strategy_of(graph, {"sample": 0, "blocks.*.up": 1}, (2, 2))
    assert not reasons
    assert strategy == Strategy(tp=2, dp=2)
    assert _uniform(request, strategy)[0] is not None
    for layout, reason in (
        ({"length": 0}, "length must be whole"),
        ({"head": 0}, "blocks.*.up must be cut as head"),
    ):
        assert reason in _strategy_of(graph, layout, (4,))[1][0]
    # Of a net that no rule cuts, the executor says so.
    assert "no plan for Net" in _uniform(drawn(0, "net"), strategy)[1][0]


def test_queries_keys_and_values_have_one_name() -> None:
    dims = {"sample": 4, "length": 4, "channel": 8}
    three = [Layer(name, "linear", (0,), dims, 8, 64, 4, 1e-6, 1e-6) for name in ("q", "k", "v")]
    first = Layer("in", "linear", (), dims, 8, 64, 4, 1e-6, 1e-6)
    graph = named((first, *three, Layer("attention", "attention", (1, 2, 3), dims)))
    assert len({graph.outputs[at]["channel"] for at in range(1, 5)}) == 1
    assert graph.outputs[0]["channel"] != graph.outputs[1]["channel"]
