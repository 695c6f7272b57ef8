"""Turns a captured step into an integer program: possible layouts, the cost of operators, conversions and
updates, and the memory at every moment."""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import fx

from gemini.forecast.machine import MachineSpeeds
from gemini.forecast.meter import Meter, Operation, OperationCosts
from gemini.planner.operators.axes import Axes
from gemini.planner.operators.capture import Captured, is_view
from gemini.planner.operators.conversions import Converter, OperatorLayout
from gemini.planner.operators.local import tensors_of
from gemini.planner.operators.program import Group, Hold, IntegerProgram
from gemini.planner.operators.rules import Rules, Strategy, values_of

# Passes of an update over a parameter: it reads weight, gradient and two moments, and writes three of them.
_UPDATE_PASSES = 7
_STATE_BYTES = 8  # per element: two moments in fp32
_LINKED_NODES = 2500  # in a step with more nodes, equal blocks get the same choices
_ROUNDS = 10  # distance in the graph up to which the surroundings of nodes are compared
_BANDS = 4  # parts of the depth in which equal blocks may have different choices
FORWARD, BACKWARD, GRADIENT = range(3)  # the phase in which a value is used; GRADIENT: by its parameter


class OperatorSeconds:
    """The seconds of a graph's operators on a machine."""

    def __init__(self, machine: MachineSpeeds, costs: OperationCosts | None = None) -> None:
        self.machine = machine
        self._costs = costs or OperationCosts(machine)
        self._known: dict[Any, Operation | None] = {}

    def operation(self, node: fx.Node) -> Operation | None:
        """Return the operation of a node; None if it moves no data."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), _without_memory)
        kwargs = {name: "meta" if name == "device" else value for name, value in kwargs.items()}
        key = (node.target, _shapes((args, kwargs)))
        if key not in self._known:
            self._known[key] = _metered(node, args, kwargs)
        return self._known[key]

    def seconds(self, node: fx.Node) -> float:
        """Return the seconds of a node on a rank that has all of its tensors."""
        found = self.operation(node)
        return 0.0 if found is None else self._costs.seconds(found)


def _metered(node: fx.Node, args: Any, kwargs: Any) -> Operation | None:
    target: Any = node.target
    with Meter() as meter, torch.no_grad():
        meter.open_period()
        target(*args, **kwargs)
    return next(iter(meter.periods[-1].operations), None)


def _without_memory(node: fx.Node) -> Any:
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return [each for each in value]


def _shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), tuple(value.stride()), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(_shapes(each) for each in value)
    if isinstance(value, dict):
        return tuple((name, _shapes(each)) for name, each in sorted(value.items()))
    return value if isinstance(value, (int, float, str, bool, type(None))) else repr(value)


@dataclass(frozen=True)
class ValueUse:
    """A tensor argument: output ``out`` of node ``source`` is input ``at`` of node ``target``."""

    source: int
    out: int
    target: int
    at: int


class StepProblem:
    """The nodes of a captured step, the strategies of each node, and the integer program over them."""

    def __init__(
        self, captured: Captured, rules: Rules, converter: Converter, times: OperatorSeconds
    ) -> None:
        self.captured, self.converter, self.times = captured, converter, times
        self.sizes = rules.sizes
        every = captured.nodes
        self._position = {node: at for at, node in enumerate(every)}
        self.nodes = [node for node in every if node.target is not operator.getitem]
        self.index = {node: at for at, node in enumerate(self.nodes)}
        self._of_parameters = {node: name for name, node in captured.placeholders()[0].items()}
        self.parameters = {name: self.index[node] for node, name in self._of_parameters.items()}
        self.uncovered: dict[str, int] = {}
        self.choices: list[tuple[Strategy, ...]] = [self._choices(node, rules) for node in self.nodes]
        self._whole = self._returned()

    def made(self, node: fx.Node) -> tuple[int, int]:
        """Return (index of the node that makes a value, number of its output)."""
        if node.target is operator.getitem:
            source, number = node.args
            assert isinstance(source, fx.Node)
            assert isinstance(number, int)
            return self.index[source], number
        return self.index[node], 0

    def _choices(self, node: fx.Node, rules: Rules) -> tuple[Strategy, ...]:
        if node in self._of_parameters:
            shape = node.meta["val"].shape
            placements = range(-1, len(shape))
            found = []
            for chosen in product(placements, repeat=len(self.sizes)):
                dims = tuple(
                    tuple(axis for axis, dim in enumerate(chosen) if dim == each)
                    for each in range(len(shape))
                )
                layout = OperatorLayout(dims)
                if layout.fits(shape, self.sizes):
                    found.append(Strategy((layout,), ()))
            return tuple(found)
        if node.op != "call_function":
            return (Strategy((OperatorLayout.whole(node.meta["val"].ndim),), ()),)
        strategies, is_known = rules.strategies(node)
        if not is_known:
            name = str(node.target).removeprefix("aten.")
            self.uncovered[name] = self.uncovered.get(name, 0) + 1
        return strategies

    def _returned(self) -> set[int]:
        """Return the nodes that every rank must have whole at the end: loss, changed buffers, truth
        values. Strategies that cannot be converted to whole are removed."""
        captured, whole = self.captured, set()
        truth_values = (each.node for each in captured.truth_values)
        for node in (captured.loss, *captured.changed.values(), *truth_values):
            at, out = self.made(node)
            whole.add(at)
            self.choices[at] = tuple(
                each for each in self.choices[at] if math.isfinite(self._to_whole(at, out, each))
            )
        return whole

    def _to_whole(self, at: int, out: int, strategy: Strategy) -> float:
        layout, value = strategy.outputs[out], values_of(self.nodes[at])[out]
        assert layout is not None
        assert value is not None
        target = OperatorLayout.whole(len(layout.dims))
        return self.converter.seconds(layout, target, value.shape, value.element_size())

    # -- seconds -----------------------------------------------------------------------------------

    def _node_seconds(self, at: int) -> np.ndarray:
        node = self.nodes[at]
        if node in self._of_parameters:
            name = self._of_parameters[node]
            value = node.meta["val"]
            passes = _UPDATE_PASSES if name in self.captured.gradients else 0
            whole = passes * value.numel() * value.element_size() / self.times.machine.adam_bytes_per_second
        else:
            whole = self.times.seconds(node) if node.op == "call_function" else 0.0
        found = []
        for each in self.choices[at]:
            layout = each.outputs[0]
            parts = each.shards(self.sizes)
            seconds = whole / parts
            if at in self._whole and layout is not None:
                seconds += self._to_whole(at, 0, each)
            found.append(seconds)
        return np.array(found)

    # -- uses of values ----------------------------------------------------------------------------

    @cached_property
    def uses(self) -> list[ValueUse]:
        """All tensor arguments."""
        found = []
        for at, node in enumerate(self.nodes):
            for number, each in enumerate(tensors_of(node)):
                source, out = self.made(each)
                found.append(ValueUse(source, out, at, number))
        return found

    def position(self, node: fx.Node) -> int:
        """Return the moment at which a node runs."""
        return self._position[node]

    def phase(self, at: int) -> int:
        """Return the phase in which a node runs, FORWARD or BACKWARD."""
        is_forward = self._position[self.nodes[at]] < self.captured.backward_begins
        return FORWARD if is_forward else BACKWARD

    def _grouped(self) -> dict[tuple[int, int, int], list[tuple[int, int]]]:
        """Return the (target, input) pairs by value and phase. Input -1 is a parameter that receives its
        gradient."""
        found: dict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)
        for use in self.uses:
            found[use.source, use.out, self.phase(use.target)].append((use.target, use.at))
        for name, node in self.captured.gradients.items():
            source, out = self.made(node)
            found[source, out, GRADIENT].append((self.parameters[name], -1))
        return found

    def _group(self, source: int, out: int, targets: Sequence[tuple[int, int]]) -> tuple[Group, list[Any]]:
        """Return a group of flows, and the layouts that its state numbers stand for."""
        layouts: dict[OperatorLayout, int] = {}

        def number(layout: OperatorLayout | None) -> int:
            assert layout is not None
            return layouts.setdefault(layout, len(layouts))

        states = tuple(number(each.outputs[out]) for each in self.choices[source])
        needed = tuple(
            (
                target,
                tuple(
                    number(each.outputs[0] if at < 0 else each.inputs[at]) for each in self.choices[target]
                ),
            )
            for target, at in targets
        )
        value = values_of(self.nodes[source])[out]
        assert value is not None
        seconds = np.array(
            [
                [self.converter.seconds(a, b, value.shape, value.element_size()) for b in layouts]
                for a in layouts
            ]
        )
        return Group(source, states, needed, seconds), list(layouts)

    # -- memory ------------------------------------------------------------------------------------

    def _last_uses(self) -> dict[tuple[int, int], int]:
        """Return the moment of the last use of each value, including uses of its views."""
        positions = [self._position[node] for node in self.nodes]
        end = len(self._position)
        last: dict[tuple[int, int], int] = defaultdict(int)
        for at in self._whole:
            last[at, 0] = end
        for use in sorted(self.uses, key=lambda each: -each.target):
            found = positions[use.target]
            if use.at == 0 and is_view(self.nodes[use.target]):
                outs = range(len(values_of(self.nodes[use.target])))
                found = max([found, *(last[use.target, out] for out in outs)])
            last[use.source, use.out] = max(last[use.source, use.out], found)
        return last

    def _part_bytes(self, value: torch.Tensor, layout: OperatorLayout | None) -> float:
        assert layout is not None
        return value.numel() * value.element_size() / layout.shards(self.sizes)

    def _holds(self, groups: Sequence[Group], keys: Sequence[Any], layouts: Sequence[Any]) -> list[Hold]:
        last, end = self._last_uses(), len(self._position)
        holds = []
        for at, node in enumerate(self.nodes):
            begin = self._position[node]
            if node in self._of_parameters:
                holds += self._parameter_holds(at, end)
            elif node.op == "call_function" and not is_view(node):
                for out, value in enumerate(values_of(node)):
                    if value is not None:
                        nbytes = [self._part_bytes(value, each.outputs[out]) for each in self.choices[at]]
                        holds.append(Hold(np.array(nbytes), begin, max(last[at, out], begin), at))
        for number, (group, key, known) in enumerate(zip(groups, keys, layouts, strict=True)):
            source, out, phase = key
            if phase == GRADIENT:
                continue  # the gradient itself is counted with its parameter
            value = values_of(self.nodes[source])[out]
            assert value is not None
            row = np.array([self._part_bytes(value, each) for each in known])
            moved = np.where(np.eye(len(known), dtype=bool), 0.0, row[np.newaxis, :])
            spans = [self._span(target, last) for target, _ in group.targets]
            begin, until = min(each[0] for each in spans), max(each[1] for each in spans)
            holds.append(Hold(moved, begin, until, group=number))
        return holds

    def _span(self, target: int, last: dict[tuple[int, int], int]) -> tuple[int, int]:
        node = self.nodes[target]
        begin = self._position[node]
        if not is_view(node):
            return begin, begin
        return begin, max([begin, *(last[target, out] for out in range(len(values_of(node))))])

    def _parameter_holds(self, at: int, end: int) -> list[Hold]:
        """Return the memory of a parameter: itself and its states during the whole step, its gradient from
        its node to the end."""
        value, name = self.nodes[at].meta["val"], self._of_parameters[self.nodes[at]]
        parts = np.array([each.outputs[0].shards(self.sizes) for each in self.choices[at]])  # type: ignore[union-attr]
        gradient = self.captured.gradients.get(name)
        states = 0 if gradient is None else _STATE_BYTES
        holds = [Hold(value.numel() * (value.element_size() + states) / parts, 0, end, at)]
        if gradient is not None:
            begin = self._position[gradient]
            holds.append(Hold(value.numel() * value.element_size() / parts, begin, end, at))
        return holds

    # -- the program -------------------------------------------------------------------------------

    @cached_property
    def program(self) -> IntegerProgram:
        """The step as an integer program."""
        grouped = self._grouped()
        made = [self._group(source, out, targets) for (source, out, _), targets in grouped.items()]
        groups = [group for group, _ in made]
        constant = sum(
            node.meta["val"].numel() * node.meta["val"].element_size()
            for node in self.nodes
            if node.op != "call_function" and node not in self._of_parameters
        )
        return IntegerProgram(
            tuple(self._node_seconds(at) for at in range(len(self.nodes))),
            tuple(groups),
            tuple(self._holds(groups, list(grouped), [layouts for _, layouts in made])),
            len(self._position) + 1,
            float(constant),
            tuple(self._alike()),
            (self.captured.backward_begins - 1, len(self._position)),
        )

    @cached_property
    def axes(self) -> Axes:
        """The effect of the choices along each axis of the mesh."""
        return Axes.of(self.sizes, self.choices)

    def _alike(self) -> list[int]:
        """Return a class number for each node; nodes of one class get the same choice. In a long step,
        corresponding nodes of equal blocks share a class, within each band of the depth."""
        if len(self.nodes) <= _LINKED_NODES:
            return list(range(len(self.nodes)))
        marks = self._marks()
        members: dict[int, list[int]] = defaultdict(list)
        for at, mark in enumerate(marks):
            members[mark].append(at)
        numbers: dict[tuple[int, int], int] = {}
        found = [0] * len(self.nodes)
        for mark, every in members.items():
            for rank, at in enumerate(every):
                depth = rank if self.phase(at) == FORWARD else len(every) - 1 - rank
                key = (mark, depth * _BANDS // len(every))
                found[at] = numbers.setdefault(key, len(numbers))
        return found

    def _marks(self) -> list[int]:
        """Return a hash for each node that is equal for nodes with equal surroundings, up to ``_ROUNDS``
        edges away in both directions."""
        marks = [
            hash((str(node.target) if node.op == "call_function" else node.op, self.choices[at]))
            for at, node in enumerate(self.nodes)
        ]
        edges: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for use in self.uses:
            edges[use.target].append((0, use.at, use.source))
            edges[use.source].append((1, use.at, use.target))
        for name, node in self.captured.gradients.items():
            edges[self.parameters[name]].append((2, 0, self.made(node)[0]))
        for _ in range(_ROUNDS):
            marks = [
                hash(
                    (
                        marks[at],
                        tuple(sorted((kind, number, marks[other]) for kind, number, other in edges[at])),
                    )
                )
                for at in range(len(self.nodes))
            ]
        return marks
