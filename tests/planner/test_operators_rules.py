"""Every strategy of every operator gives, from parts, the parts of what the whole gives."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from operator_models import (
    Language,
    Pictures,
    language_batch,
    language_loss,
    picture_batch,
    picture_loss,
)
from simulated_ranks import OneOf
from torch import fx, nn

from gemini.planner.operators.capture import capture
from gemini.planner.operators.conversions import OperatorLayout, Step, convert_parts, coordinates, part_of
from gemini.planner.operators.local import local_call, tensors_of
from gemini.planner.operators.rules import Rules, Strategy, values_of


def _parts(whole: torch.Tensor, layout: OperatorLayout, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return what each rank has; summands are of the size of the whole."""
    counts = [sizes[axis] for axis in layout.partial]
    if not counts:
        return [part_of(whole, layout, sizes, place).contiguous() for place in coordinates(sizes)]
    draw = torch.Generator().manual_seed(2)
    summands = torch.randn(*counts, *whole.shape, generator=draw, dtype=whole.dtype) * whole.abs().mean()
    flat = summands.view(-1, *whole.shape)
    flat[-1] = whole - flat[:-1].sum(0)
    return [
        part_of(summands[tuple(place[axis] for axis in layout.partial)], layout, sizes, place).contiguous()
        for place in coordinates(sizes)
    ]


def _joined(parts: list[torch.Tensor], layout: OperatorLayout, sizes: Sequence[int]) -> list[torch.Tensor]:
    steps = [Step("all_reduce", axis) for axis in layout.partial]
    steps += [
        Step("all_gather", axis, dim) for dim, axes in enumerate(layout.dims) for axis in reversed(axes)
    ]
    return convert_parts(parts, steps, sizes)


def _run(node: fx.Node, env: dict[fx.Node, Any], strategy: Strategy, sizes: Sequence[int]) -> list[Any]:
    """Return what each rank makes of its parts."""
    call = local_call(node, strategy.inputs, strategy.outputs, sizes, values_of(node))
    wholes = [env[each].detach() for each in tensors_of(node)]
    parts = [_parts(each, layout, sizes) for each, layout in zip(wholes, strategy.inputs, strict=True)]
    given: dict[Any, torch.Tensor] = {}
    for _ in range(2):
        outs, said = [], {}
        for number, place in enumerate(coordinates(sizes)):
            rank = OneOf(place, sizes, given)
            own = iter([each[number] for each in parts])
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda _, own=own: next(own))
            torch.manual_seed(5)
            out = call(rank, *args, **kwargs)
            outs.append(out if isinstance(out, (tuple, list)) else (out,))
            if rank.own is not None:
                said[place] = rank.own
        given = said
    return outs


def _check(node: fx.Node, env: dict[fx.Node, Any], strategy: Strategy, sizes: Sequence[int]) -> None:
    whole = env[node] if isinstance(env[node], (tuple, list)) else (env[node],)
    outs = _run(node, env, strategy, sizes)
    for number, (layout, want) in enumerate(zip(strategy.outputs, whole, strict=True)):
        if layout is None:
            continue
        parts = [out[number] * strategy.scale if strategy.scale != 1 else out[number] for out in outs]
        for got in _joined(parts, layout, sizes):
            torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9, msg=f"{node.target}: {strategy}")


class _Mixed(nn.Module):
    """Operators that models have beside those of a plain language model."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.gate, self.out = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def forward(self, batch: Any) -> torch.Tensor:
        ids, _ = batch["ids"], None
        x = self.table(ids)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        x = self.out(nn.functional.silu(self.gate(x)) + torch.cat((x, -x), -1))
        halves = x.split(4, -1)
        return (
            (halves[0] * halves[1].softmax(-1)).sum() + x[:, 1:].var() + torch.where(x > 0, x, 0.1 * x).mean()
        )


CASES = {
    "language": (lambda: Language(dropout=0.25), language_batch, language_loss),
    "pictures": (Pictures, picture_batch, picture_loss),
    "mixed": (
        _Mixed,
        lambda: ({"batch": {"ids": torch.arange(32).view(4, 8) % 16}},),
        lambda out, _: out,
    ),
}


@pytest.mark.parametrize("sizes", [(2,), (2, 2)])
@pytest.mark.parametrize("case", CASES)
def test_parts_make_the_parts_of_the_whole(case: str, sizes: tuple[int, ...]) -> None:
    make, batch_of, loss_of = CASES[case]
    torch.manual_seed(0)
    model, batch = make().double(), batch_of()
    batch = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda each: each.double() if each.is_floating_point() else each, batch
    )
    captured = capture(model, batch, loss_of)
    values = iter(
        [*(p.detach() for p in model.parameters()), *model.buffers(), *captured.form.tensors(batch)]
    )
    env: dict[fx.Node, Any] = {}
    rules, seen, checked = Rules(sizes), set(), 0
    for node in captured.nodes:
        if node.op == "placeholder":
            env[node] = next(values)
            continue
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda each: env[each])
        torch.manual_seed(5)
        env[node] = node.target(*args, **kwargs)
        if node.target is operator.getitem:
            continue
        strategies, _ = rules.strategies(node)
        if id(strategies) in seen or "empty" in str(node.target):
            continue
        seen.add(id(strategies))
        # Of a mesh of two axes some: each axis follows a rule of one axis, and those are all tried.
        for strategy in strategies if len(sizes) == 1 else strategies[1::7]:
            _check(node, env, strategy, sizes)
            checked += 1
    assert checked > 25


def test_what_no_rule_covers_runs_whole_and_is_said() -> None:
    captured = capture(Pictures(), picture_batch(), picture_loss)
    rules, unknown = Rules((2,)), []
    for node in captured.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        strategies, is_known = rules.strategies(node)
        if not is_known:
            unknown.append(str(node.target))
            assert [each.axes for each in strategies] == [frozenset()]
    assert len(unknown) == 2
    assert all("batch_norm" in name for name in unknown)
