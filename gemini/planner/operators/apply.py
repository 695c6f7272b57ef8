"""Runs an operator plan: the captured graph over this rank's parts of the parameters, with conversions
inserted between its operators."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from gemini.errors import ConfigError, StateError
from gemini.parallel.layout import Layout
from gemini.parallel.mesh import AXES, Axis, Mesh
from gemini.planner.operators.conversions import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    MASK,
    REDUCE_SCATTER,
    SHARD,
    OperatorLayout,
    Step,
    part_of,
)
from gemini.planner.operators.integer_problem import GRADIENT, StepProblem
from gemini.planner.operators.local import local_call
from gemini.planner.operators.plan import OperatorPlan, conversion
from gemini.planner.operators.rules import Strategy, values_of


class MeshRank:
    """This process on a mesh of ranks: its coordinates, and the collectives along each axis."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """Join the mesh. Collective. Raises ConfigError if the number of ranks is not that of the mesh."""
        names = AXES[len(AXES) - len(sizes) :]
        self.sizes = tuple(sizes)
        self._mesh: Mesh | None = None
        self.axes: list[Axis | None] = [None] * len(sizes)
        self.everyone: Axis | None = None
        if math.prod(sizes) > 1:
            named: dict[str, Any] = dict(zip(names, sizes, strict=True))
            self._mesh = Mesh(Layout(**named))
            self.axes = [self._mesh.axis(name) for name in names]
            self.everyone = self._mesh.axis(*names)
        self.place = tuple(0 if axis is None else axis.rank for axis in self.axes)

    def add_up(self, tensor: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
        """Return the sum of ``tensor`` over the ranks along these axes."""
        for number in axes:
            tensor = self.convert(tensor, [Step(ALL_REDUCE, number)])
        return tensor

    def convert(self, tensor: torch.Tensor, steps: Iterable[Step]) -> torch.Tensor:
        """Return this rank's part after ``steps``. Collective along the axes of the steps."""
        for step in steps:
            axis = self.axes[step.axis]
            if axis is not None:
                tensor = _converted(tensor, step, axis)
        return tensor

    def leave(self, why: str = "ended") -> None:
        """Tell the other ranks that this rank takes part in no further collectives."""
        if self._mesh is not None:
            self._mesh.leave(why)


def _converted(tensor: torch.Tensor, step: Step, axis: Axis) -> torch.Tensor:
    if tensor.dtype is torch.bool and step.kind not in (SHARD, MASK):
        return _converted(tensor.view(torch.uint8), step, axis).view(torch.bool)
    if step.kind == ALL_GATHER:
        return torch.cat(axis.all_gather(tensor), step.dim)
    if step.kind == ALL_TO_ALL:
        parts = tensor.chunk(axis.size, step.to)
        return torch.cat(axis.all_to_all(parts, [parts[0].shape] * axis.size), step.dim)
    if step.kind == ALL_REDUCE:
        total = tensor.clone(memory_format=torch.contiguous_format)
        axis.all_reduce(total)
        return total
    if step.kind == REDUCE_SCATTER:
        return axis.reduce_scatter(list(tensor.chunk(axis.size, step.to)))
    if step.kind == SHARD:  # a copy: a view would keep the whole tensor alive
        part = tensor.chunk(axis.size, step.to)[axis.rank]
        return part.clone(memory_format=torch.contiguous_format)
    return tensor if axis.rank == 0 else torch.zeros_like(tensor)


class _Conversion:
    """A graph node that converts a tensor to another layout."""

    def __init__(self, rank: MeshRank, steps: Sequence[Step]) -> None:
        self._rank, self._steps = rank, steps

    @property
    def __name__(self) -> str:
        return "_then_".join(f"{step.kind}_{step.axis}" for step in self._steps)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._rank.convert(tensor, self._steps)


class _PartNode:
    """A graph node that runs an operator on this rank's parts."""

    def __init__(self, rank: MeshRank, call: Any, scale: float) -> None:
        self._rank, self._call, self._scale = rank, call, scale

    @property
    def __name__(self) -> str:
        return str(self._call.__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self._call(self._rank, *args, **kwargs)
        if self._scale == 1:
            return out
        if isinstance(out, torch.Tensor):
            return out * self._scale
        return tuple(each * self._scale for each in out)


class _GraphBuilder:
    """Builds the graph that one rank runs."""

    def __init__(self, problem: StepProblem, plan: OperatorPlan, rank: MeshRank) -> None:
        self._problem, self._rank = problem, rank
        self._chosen = [each[choice] for each, choice in zip(problem.choices, plan.choices, strict=True)]
        self._graph = fx.Graph()
        self._made: dict[fx.Node, fx.Node] = {}
        self._converted: dict[Any, fx.Node] = {}
        self._constants: dict[str, Any] = {}

    def build(self, *, with_gradients: bool) -> fx.GraphModule:
        """Return the graph. Its outputs are the loss, the gradients if requested, changed buffers, and
        truth values."""
        problem, captured = self._problem, self._problem.captured
        receivers = {node: name for name, node in captured.gradients.items()} if with_gradients else {}
        takers: dict[fx.Node, fx.Node] = {}
        for node in captured.nodes:
            is_backward = problem.position(node) >= captured.backward_begins
            if is_backward and not with_gradients and node.op != "placeholder":
                continue
            self._made[node] = self._copy(node)
            if node in receivers:  # convert at once, so that the gradient's old layout is freed
                layout = self._chosen[problem.parameters[receivers[node]]].outputs[0]
                assert layout is not None
                takers[node] = self._in(node, layout, GRADIENT)
        results = [self._in_whole(captured.loss)]
        if with_gradients:
            results += [takers[node] for node in captured.gradients.values()]
        results += [self._in_whole(node) for node in captured.changed.values()]
        results += [self._in_whole(each.node) for each in captured.truth_values if each.node in self._made]
        self._graph.output(tuple(results))
        self._graph.eliminate_dead_code()
        self._graph.lint()
        return fx.GraphModule(self._constants, self._graph)

    def _copy(self, node: fx.Node) -> fx.Node:
        if node.op == "placeholder":
            return self._graph.placeholder(node.name)
        if node.op == "get_attr":
            name = str(node.target)
            self._constants[name] = getattr(self._problem.captured.module, name)
            return self._graph.get_attr(name)
        if node.target is operator.getitem:
            source, number = node.args
            assert isinstance(source, fx.Node)
            return self._graph.call_function(operator.getitem, (self._made[source], number))
        at = self._problem.index[node]
        strategy: Strategy = self._chosen[at]
        layouts = iter(strategy.inputs)
        phase = self._problem.phase(at)
        args, kwargs = fx.map_arg(
            (node.args, dict(node.kwargs)), lambda each: self._in(each, next(layouts), phase)
        )
        call = local_call(node, strategy.inputs, strategy.outputs, self._problem.sizes, values_of(node))
        return self._graph.call_function(_PartNode(self._rank, call, strategy.scale), args, kwargs)

    def _layout(self, value: fx.Node) -> OperatorLayout:
        at, out = self._problem.made(value)
        layout = self._chosen[at].outputs[out]
        assert layout is not None
        return layout

    def _in(self, value: fx.Node, layout: OperatorLayout, phase: int) -> fx.Node:
        """Return a value in a layout. All users in a phase that need the same layout share one conversion."""
        steps = [step for step, _ in conversion(self._problem, value, self._layout(value), layout).steps]
        if not steps:
            return self._made[value]
        key = (*self._problem.made(value), layout, phase)
        if key not in self._converted:
            call = _Conversion(self._rank, steps)
            self._converted[key] = self._graph.call_function(call, (self._made[value],))
        return self._converted[key]

    def _in_whole(self, value: fx.Node) -> fx.Node:
        return self._in(value, OperatorLayout.whole(len(self._layout(value).dims)), -1)


class OperatorParallel(nn.Module):
    """A model with this rank's parts of the parameters. It computes its loss as a plan says::

        loss = model(batch)     # the whole batch, the same on all ranks; the loss of the whole batch
        loss.backward()         # gradients of the parts
        optimizer.step()        # any element-wise optimizer, over this rank's parts

    ``graph`` is what this rank runs: ``print(model.graph.code)``. Under ``no_grad``, ``forward`` computes
    only the loss.
    """

    def __init__(self, model: nn.Module, problem: StepProblem, plan: OperatorPlan, rank: MeshRank) -> None:
        """Cut the parameters of ``model``, which stays unchanged. Collective.

        Parameters and buffers get rank 0's values. Raises ConfigError if a parameter of ``model`` is on meta.
        """
        super().__init__()
        self.plan = plan
        self.rank = rank
        self._captured = problem.captured
        self._layouts: dict[str, OperatorLayout] = {}
        self._parts: dict[str, nn.Parameter] = {}
        for name, param in model.named_parameters():
            if param.is_meta:
                raise ConfigError(
                    f"{name} has no values (it is on meta): give the model values, then shard it"
                )
            layout = problem.choices[problem.parameters[name]][
                plan.choices[problem.parameters[name]]
            ].outputs[0]
            assert layout is not None
            self._layouts[name] = layout
            whole = self._as_rank_0(param)
            part = part_of(whole, layout, rank.sizes, rank.place).clone(memory_format=torch.contiguous_format)
            self._parts[name] = nn.Parameter(part, param.requires_grad)
            _container(self, name).register_parameter(name.rpartition(".")[2], self._parts[name])
        for name, buffer in model.named_buffers():
            _container(self, name).register_buffer(name.rpartition(".")[2], self._as_rank_0(buffer))
        self.graph = _GraphBuilder(problem, plan, rank).build(with_gradients=True)
        self._loss_alone = _GraphBuilder(problem, plan, rank).build(with_gradients=False)

    def _as_rank_0(self, tensor: torch.Tensor) -> torch.Tensor:
        value = tensor.detach().clone(memory_format=torch.contiguous_format)
        if self.rank.everyone is not None:
            raw = value.view(torch.uint8) if value.dtype is torch.bool else value
            self.rank.everyone.broadcast_from(raw, 0)
        return value

    def forward(self, batch: Any) -> torch.Tensor:
        """Return the loss of a batch. Raises ConfigError if its form differs from the captured batch."""
        tensors = self._captured.form.tensors(batch)
        parts = [self._parts[name] for name in self._captured.parameters]
        if not torch.is_grad_enabled():
            loss, *rest = self._loss_alone(*parts, *self._values(), *tensors)
            self._change(rest)
        else:
            loss = _BothPasses.apply(self, tensors, *parts)  # type: ignore[no-untyped-call]
        found: torch.Tensor = loss
        return found

    def _values(self) -> list[torch.Tensor]:
        return [self.get_buffer(name) for name in self._captured.buffers]

    def _change(self, values: Sequence[torch.Tensor]) -> None:
        """Check the truth values at the end of ``values``, then update the buffers."""
        changed = self._captured.changed
        for truth, found in zip(self._captured.truth_values, values[len(changed) :], strict=False):
            truth.check(
                found
            )  # truth values of backward are last; they are missing if only the loss was computed
        for name, value in zip(changed, values, strict=False):
            self.get_buffer(name).copy_(value)

    def run(self, parts: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> tuple[Any, list[Any]]:
        """Run forward and backward, and update buffers. Return the loss and one gradient per parameter; None
        for parameters without a gradient."""
        loss, *rest = self.graph(*parts, *self._values(), *tensors)
        grads = dict(zip(self._captured.gradients, rest, strict=False))
        self._change(rest[len(grads) :])
        return loss, [grads.get(name) for name in self._captured.parameters]

    def whole_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the whole value of each parameter, one at a time. Collective."""
        for name, part in self._parts.items():
            yield name, self.rank.convert(part.detach(), _gathering(self._layouts[name]))

    def load_whole(self, values: Mapping[str, torch.Tensor]) -> None:
        """Load parameters from whole values, which every rank has. Raises ConfigError if one is missing or
        has another shape."""
        for name, part in self._parts.items():
            if name not in values:
                raise ConfigError(f"{name} is missing among the {len(values)} values to load")
            own = part_of(values[name], self._layouts[name], self.rank.sizes, self.rank.place)
            if own.shape != part.shape:
                raise ConfigError(f"{name} has the shape {tuple(values[name].shape)}, and another one here")
            with torch.no_grad():
                part.copy_(own)


def _gathering(layout: OperatorLayout) -> list[Step]:
    return [Step(ALL_GATHER, axis, dim) for dim, axes in enumerate(layout.dims) for axis in reversed(axes)]


def _container(module: nn.Module, name: str) -> nn.Module:
    """Return the submodule that owns the parameter ``name``; create missing submodules."""
    for part in name.split(".")[:-1]:
        child = module._modules.get(part)
        if child is None:
            child = nn.Module()
            module.add_module(part, child)
        module = child
    return module


class _BothPasses(torch.autograd.Function):
    """Autograd function around a graph that computes forward and backward at once. Forward keeps the
    gradients until ``loss.backward()``."""

    @staticmethod
    def forward(ctx: Any, model: OperatorParallel, tensors: Any, *parts: torch.Tensor) -> torch.Tensor:
        loss, ctx.gradients = model.run([part.detach() for part in parts], tensors)
        return loss  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if ctx.gradients is None:
            raise StateError("backward() ran twice for one loss; its gradients are gone: compute it again")
        scale = float(grads[0])
        found = [each if each is None or scale == 1 else each * scale for each in ctx.gradients]
        ctx.gradients = None
        return (None, None, *found)
