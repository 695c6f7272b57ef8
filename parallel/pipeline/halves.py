"""The halves of a backward pass: gradients of a stage's input first, those of its weights later."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge


@dataclass
class Group:
    """Weights, by their nodes of autograd, and where they meet what depends on inputs: by node, the gradients
    that come to it."""

    weights: set[Any]
    meets: dict[Any, tuple[torch.Tensor | None, ...]]


@dataclass
class Unfinished:
    """Where the weights' half begins: ``groups``, and outputs that no input leads to, whose whole backward
    pass it is."""

    groups: list[Group]
    outputs: list[torch.Tensor]
    grads: list[torch.Tensor]


def backward_input(
    outputs: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    received: Sequence[torch.Tensor],
    weights: Iterable[nn.Parameter],
) -> tuple[list[torch.Tensor | None], Unfinished]:
    """Return the gradients of ``received``, None: nothing depends on it, and what :func:`backward_weights`
    needs. ``outputs`` may have what was received in it, as it is."""
    # Not at the top: it takes a second to import, and gemini.parallel is used without pipelines.
    from torch.distributed.pipelining._backward import stage_backward_input

    handed_on = [
        [grad for output, grad in zip(outputs, grads, strict=True) if output is each] for each in received
    ]
    computed = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.grad_fn is not None]
    leads = _led_to([output for output, _ in computed], received)
    through = [pair for pair, is_led_to in zip(computed, leads, strict=True) if is_led_to]
    apart = [pair for pair, is_led_to in zip(computed, leads, strict=True) if not is_led_to]
    found: list[torch.Tensor | None] = [None] * len(received)
    groups: list[Group] = []
    if through:
        try:
            given, rest = stage_backward_input(
                _own([output for output, _ in through]),
                [grad for _, grad in through],
                list(received),
                iter(list(weights)),
            )
        except RuntimeError as error:
            raise error.__cause__ or error from None  # torch wraps it in a description of the tensors
        found, groups = list(given), _disjoint(rest)
    for index, more in enumerate(handed_on):
        received[index].grad = None
        for grad in more:
            here = found[index]
            found[index] = grad if here is None else here + grad
    return found, Unfinished(groups, [output for output, _ in apart], [grad for _, grad in apart])


def _own(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return what torch may detach in place: no views, and nothing that another output is computed of."""
    with torch.enable_grad():
        return [each.clone() if each._is_view() or len(outputs) > 1 else each for each in outputs]


def _disjoint(found: Iterable[dict[str, Any]]) -> list[Group]:
    """Return torch's groups, those that have a weight in common as one: it puts a weight into two where it
    meets inputs at nodes at which others meet them apart."""
    groups: list[Group] = []
    for each in found:
        nodes = each["intermediates"]
        meets = dict(zip(nodes, each.get("grads") or (), strict=False))
        group = Group(
            set(each["params"]), {node: grads for node, grads in meets.items() if grads is not None}
        )
        for other in [other for other in groups if other.weights & group.weights]:
            groups.remove(other)
            group = Group(group.weights | other.weights, group.meets | other.meets)
        groups.append(group)
        each.clear()  # hooks that have been removed refer to it, and it to their nodes
    return groups


def _led_to(outputs: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> list[bool]:
    """Say of each output whether it depends on something that was received."""
    sources = {get_gradient_edge(tensor).node for tensor in received}
    known: dict[Any, bool] = {node: True for node in sources}
    return [_reaches(output.grad_fn, known) for output in outputs]


def _reaches(root: Any, known: dict[Any, bool]) -> bool:
    """Return whether ``root`` leads to a node that is ``known`` to, and note what was found on the way. The
    first way to one ends the search."""
    path = [(root, iter(root.next_functions))] if root not in known else []
    while path:
        node, rest = path[-1]
        following = next((each for each, _ in rest if each is not None), None)
        if following is None:
            known[node] = False
            path.pop()
        elif known.get(following):
            known.update((each, True) for each, _ in path)
            return True
        elif following not in known:
            path.append((following, iter(following.next_functions)))
    return known[root]


def backward_weights(unfinished: Unfinished) -> None:
    """Run the other half. It goes through autograd's accumulators, so that hooks of gradients are called."""
    groups = unfinished.groups
    # Nodes may be of several parts: those that no input leads to, and those between two of a group's.
    retains = bool(unfinished.outputs) or any(len(group.meets) > 1 for group in groups)
    if unfinished.outputs:
        torch.autograd.backward(unfinished.outputs, unfinished.grads, retain_graph=bool(groups))
    while groups:
        group = groups.pop()
        edges = [
            (GradientEdge(node, index), grad)
            for node, incoming in group.meets.items()
            for index, grad in enumerate(incoming)
            if grad is not None
        ]
        if not edges:
            continue
        with ExitStack() as hooks:
            if len(group.meets) > 1:
                # One of them may lie behind another: what flows into it is in its own gradient already.
                for node, incoming in group.meets.items():
                    hooks.callback(node.register_prehook(lambda _, own=incoming: own).remove)
            torch.autograd.backward(
                [edge for edge, _ in edges],
                [grad for _, grad in edges],
                retain_graph=retains,
                inputs=tuple(GradientEdge(node, 0) for node in group.weights),
            )
