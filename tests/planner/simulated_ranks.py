"""All ranks of a mesh in one process: the graph of a plan runs operator by operator, on the parts of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx, nn

from gemini.planner.operators.apply import _Conversion, _gathering, _GraphBuilder
from gemini.planner.operators.conversions import Step, convert_parts, coordinates, part_of
from gemini.planner.operators.integer_problem import StepProblem


class OneOf:
    """A rank of several that run one after another: sums are of what all gave in the round before."""

    everyone = None

    def __init__(
        self, place: tuple[int, ...], sizes: Sequence[int], given: dict[Any, torch.Tensor] | None = None
    ) -> None:
        self.place, self.sizes, self.given = place, tuple(sizes), given or {}
        self.own: torch.Tensor | None = None

    def add_up(self, tensor: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
        """Return the sum of what the ranks along these axes gave in the round before."""
        self.own = tensor
        group = [
            each
            for place, each in self.given.items()
            if all(place[axis] == self.place[axis] for axis in range(len(self.sizes)) if axis not in axes)
        ]
        return torch.stack(group).sum(0) if group else tensor


@dataclass
class SimulatedRanks:
    """The ranks of a mesh that run the plan of these ``choices``."""

    problem: StepProblem
    choices: Sequence[int]
    _rank: OneOf = field(init=False)

    def __post_init__(self) -> None:
        sizes = self.problem.sizes
        self._rank = OneOf((0,) * len(sizes), sizes)
        self._places = coordinates(sizes)
        plan: Any = SimpleNamespace(choices=self.choices)
        rank: Any = self._rank
        self._module = _GraphBuilder(self.problem, plan, rank).build(with_gradients=True)

    def gradients(self, model: nn.Module, batch: Any) -> list[dict[str, torch.Tensor]]:
        """Return for each rank the whole gradients of a step, and the loss as ``""``."""
        captured, sizes = self.problem.captured, self.problem.sizes
        named, layouts = dict(model.named_parameters()), {}
        inputs = []
        for name in captured.parameters:
            at = self.problem.parameters[name]
            layouts[name] = layout = self.problem.choices[at][self.choices[at]].outputs[0]
            assert layout is not None
            inputs.append(
                [part_of(named[name].detach(), layout, sizes, each).clone() for each in self._places]
            )
        others = [*model.buffers(), *captured.form.tensors(batch)]
        loss, *rest = self._run([*inputs, *([each] * len(self._places) for each in others)])
        found = [{"": each} for each in loss]
        for name, parts in zip(captured.gradients, rest, strict=False):
            layout = layouts[name]
            assert layout is not None
            for each, whole in zip(found, _converted(parts, _gathering(layout), sizes), strict=True):
                each[name] = whole
        return found

    def _run(self, inputs: Sequence[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        env: dict[fx.Node, list[Any]] = {}
        waiting = iter(inputs)
        for node in self._module.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(waiting)
            elif node.op == "get_attr":
                env[node] = [getattr(self._module, node.target)] * len(self._places)
            elif node.op == "output":
                return [env[each] for each in node.args[0]]
            elif isinstance(node.target, _Conversion):
                env[node] = _converted(env[node.args[0]], node.target._steps, self.problem.sizes)
            else:
                env[node] = self._called(node, env)
        raise AssertionError("a graph ends with its output")

    def _called(self, node: fx.Node, env: dict[fx.Node, list[Any]]) -> list[Any]:
        """Return what each rank makes; all draw the same random numbers."""
        state, function = torch.get_rng_state(), node.target
        assert callable(function)
        self._rank.given = {}
        for _ in range(2):
            outs, said = [], {}
            for number, place in enumerate(self._places):
                torch.set_rng_state(state)
                self._rank.place, self._rank.own = place, None
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each, at=number: env[each][at])
                outs.append(function(*args, **kwargs))
                if self._rank.own is not None:
                    said[place] = self._rank.own
            self._rank.given = said
            if not said:
                break
        return outs


def _converted(parts: list[torch.Tensor], steps: Sequence[Step], sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return contiguous parts, as ranks have them: backward of a layer norm ignores strides of its mean."""
    is_bool = parts[0].dtype is torch.bool
    made = convert_parts([each.to(torch.uint8) for each in parts] if is_bool else parts, steps, sizes)
    return [(each.bool() if is_bool else each).clone(memory_format=torch.contiguous_format) for each in made]
