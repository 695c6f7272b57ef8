"""Split backward: first the gradients of a stage's input, later those of its weights.

A stage with blocks that call ``torch.utils.checkpoint`` does not split: autograd would compute these blocks
again for the input's half and for each group of weights, and keep all the results until the graph is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import checkpoint


@dataclass
class Group:
    """A set of weights, by their autograd nodes, and the nodes where their graph meets the graph of the
    inputs, each with its incoming gradients.
    """

    weights: set[Any]
    meets: dict[Any, tuple[torch.Tensor | None, ...]]


@dataclass
class PendingWeights:
    """The start of the weights' half: ``groups``, and outputs without inputs, for a whole backward pass."""

    groups: list[Group]
    outputs: list[torch.Tensor]
    grads: list[torch.Tensor]


@contextmanager
def checkpoints_noted(note: Callable[[], object]) -> Iterator[None]:
    """Call ``note`` for every call of ``torch.utils.checkpoint`` inside the block."""
    plain: Any = checkpoint._checkpoint_hook

    class Noted(plain):  # type: ignore[misc]
        def __init__(self, frame: Any) -> None:
            note()
            super().__init__(frame)

    checkpoint._checkpoint_hook = Noted  # type: ignore[misc]
    try:
        yield
    finally:
        checkpoint._checkpoint_hook = plain  # type: ignore[misc]


def backward_input(
    outputs: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    received: Sequence[torch.Tensor],
    weights: Iterable[nn.Parameter],
) -> tuple[list[torch.Tensor | None], PendingWeights]:
    """Return the gradients of ``received`` (None if nothing depends on a tensor), and the state for
    :func:`backward_weights`. ``outputs`` may contain received tensors unchanged.
    """
    # Not imported at the top: it takes a second, and gemini.parallel is used without pipelines.
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
    return found, PendingWeights(groups, [output for output, _ in apart], [grad for _, grad in apart])


def _own(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors that torch may detach in place: no views, and none that another output depends on."""
    with torch.enable_grad():
        return [each.clone() if each._is_view() or len(outputs) > 1 else each for each in outputs]


def _disjoint(found: Iterable[dict[str, Any]]) -> list[Group]:
    """Convert torch's groups, merging those with a common weight: torch puts a weight into two groups if it
    meets inputs at nodes where others meet them separately.
    """
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
        each.clear()  # removed hooks refer to it, and it to their nodes: break the cycle
    return groups


def _led_to(outputs: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> list[bool]:
    """Return for each output whether it depends on a received tensor."""
    sources = {get_gradient_edge(tensor).node for tensor in received}
    known: dict[Any, bool] = {node: True for node in sources}
    return [_reaches(output.grad_fn, known) for output in outputs]


def _reaches(root: Any, known: dict[Any, bool]) -> bool:
    """Return whether ``root`` leads to a node known to lead to a received tensor, and record the result for
    the nodes visited. The search ends at the first path.
    """
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


def backward_weights(pending: PendingWeights) -> None:
    """Run the weights' half. It uses autograd's accumulators, so hooks of gradients are called."""
    groups = pending.groups
    # Nodes may be in several parts: those that depend on no input, and those between two meeting nodes.
    retains = bool(pending.outputs) or any(len(group.meets) > 1 for group in groups)
    if pending.outputs:
        torch.autograd.backward(pending.outputs, pending.grads, retain_graph=bool(groups))
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
                # One node may be behind another: the gradient that flows into it is in its own gradient
                # already.
                for node, incoming in group.meets.items():
                    hooks.callback(node.register_prehook(lambda _, own=incoming: own).remove)
            torch.autograd.backward(
                [edge for edge, _ in edges],
                [grad for _, grad in edges],
                retain_graph=retains,
                inputs=tuple(GradientEdge(node, 0) for node in group.weights),
            )
