"""PreOp and PostOp of the backward pass: hooks on the autograd nodes that an operator made.

A node may have saved a view of a managed weight. Hooks right before and after the node pin the operator's
chunks for exactly as long as the node reads them. Nodes are found by autograd's sequence number: those made
since the operator began are its own. So composite operators, in-place results and recomputation under
checkpointing need no special case. Each thread has its own sequence numbers, and backward on a GPU runs on a
thread of its own; therefore the nodes of an operator's inputs are excluded explicitly, whatever their
numbers. See docs/notes/interception.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch.autograd import _get_sequence_nr, forward_ad  # type: ignore[attr-defined]

from gemini.losses.tiled_cross_entropy import TiledCrossEntropy
from gemini.memstats.trace import BACKWARD
from gemini.runtime.gate.gate import Gate, NodeHooks
from gemini.runtime.gate.guards import current_pass
from gemini.runtime.intercept.nested import map_tensors

# The sequence number of the next node, and the nodes of the inputs, which are older whatever their numbers.
NodesSoFar = tuple[int, list[Any]]

# A running node: the id of its backward pass; a function that returns None once that pass is over; the number
# of the first node that it may make; the tensors that it reads.
_RunningNode = tuple[int, Callable[[], object], int, tuple[int, ...]]

# Nodes of these kinds save no view of a weight.
_SAVES_NO_WEIGHT = frozenset(
    f"{name}Backward0"
    for name in [
        "T",
        "Transpose",
        "Permute",
        "View",
        "UnsafeView",
        "ReshapeAlias",
        "Alias",
        "Expand",
        "Select",
        "Slice",
        "Split",
        "SplitWithSizes",
        "Unbind",
        "Squeeze",
        "Unsqueeze",
        "Clone",
        "ToCopy",
        "Add",
        "Sub",
        "Neg",
        "Sum",
        "Mean",
        "Embedding",
        "Cat",
        "Stack",
        "AsStrided",
        "Detach",
    ]
) | {f"{TiledCrossEntropy.__name__}Backward"}  # computes its gradients in forward

next_node_number: Callable[[], int] = _get_sequence_nr


class BackwardPins:
    """The pins of autograd nodes: of the running node, of the nodes around it, and of the one that ran last.

    The pin of the last node stays until the next PreOp, so that nodes of one operator share it. A node may
    call Python before it reads its saved tensors (recomputation under checkpointing, custom functions, a
    nested backward pass): operators that run meanwhile do not end its pin. A node that raised is no longer
    running once its backward pass is gone.
    """

    def __init__(self, gate: Gate) -> None:
        self.held: tuple[int, ...] | None = None  # pins of the outermost running node, or of the last node
        self._running: list[_RunningNode] = []  # outermost first
        self._gate = gate
        self._hooks: dict[tuple[int, ...], NodeHooks] = {}

    def hooks(self, tensors: tuple[int, ...]) -> NodeHooks:
        """Return the hooks that run before and after an autograd node that reads ``tensors``."""
        hooks = self._hooks.get(tensors)
        if hooks is None:
            hooks = self._hooks[tensors] = self._make_hooks(tensors)
        return hooks

    def settle(self) -> None:
        """Unpin the tensors of the node that ran last; called by every PreOp while there are any."""
        if self._running:
            self._forget_raised()
        if not self._running:
            held, self.held = self.held, None
            if held is not None:
                self._gate.chunks.release(held, dirty=False)

    def forget(self) -> None:
        """Drop the record of every pin; the caller unpins."""
        self.held = None
        self._running.clear()

    def _make_hooks(self, tensors: tuple[int, ...]) -> NodeHooks:
        gate, running, latest = self._gate, self._running, self._gate.threads.latest_pass

        def before(_grad_outputs: object) -> None:
            current = current_pass()
            if current == latest.number:
                pin()
            else:
                if latest.end() is not None:
                    gate.threads.refuse_second_pass()
                with gate.threads.operators:  # wait for another thread's operator, and block new ones
                    pin()
                    latest.begin(current)
            running.append((current, latest.end, next_node_number(), tensors))

        def pin() -> None:
            gate.enter(BACKWARD)
            if running:
                self._forget_raised()
            if running:
                gate.pre_op(tensors)
            elif self.held != tensors:
                gate.pre_op(tensors)
                self.held = tensors

        def after(grad_inputs: object, grad_outputs: object) -> None:
            if len(running) > 1:
                current = current_pass()
                while running[-1][0] != current:  # left by a nested pass that raised
                    self._forget_last()
            first_node = running.pop()[2]
            if running:
                gate.post_op(tensors, False)
            if torch.is_grad_enabled():  # create_graph: the new nodes read the same weights
                grad_inputs, grad_outputs = map_tensors((grad_inputs, grad_outputs), _unbatched)
                hook_backward(grad_inputs, (first_node, _given_to_current(grad_outputs)), gate, tensors)

        return before, after

    def _forget_raised(self) -> None:
        """Unpin the tensors of nodes that raised: they count as running, but their backward pass is over."""
        outside = current_pass() == -1
        while self._running and (outside or self._running[-1][1]() is None):
            self._forget_last()

    def _forget_last(self) -> None:
        """Drop the innermost node and unpin its tensors. The pin of the outermost node is ``held``; the next
        PreOp ends it."""
        tensors = self._running.pop()[3]
        if self._running:
            self._gate.post_op(tensors, False)


def nodes_so_far(arguments: Any) -> NodesSoFar:
    """Return what distinguishes the nodes of an operator that is about to run from existing ones: the number
    of its first node, and the nodes of its ``arguments``."""
    given: list[Any] = []
    _note_nodes(arguments, given)
    return next_node_number(), given


def node_of(tensor: torch.Tensor) -> Any:
    """Return the node that made a tensor; None if there is none, or if autograd refuses to tell. It refuses
    for a view with a base that was written without being recorded; no operator can use such a view in
    backward either."""
    try:
        if type(tensor) is torch.Tensor:
            return tensor.grad_fn
        with torch._C.DisableTorchFunctionSubclass():  # subclasses may handle the attribute
            return tensor.grad_fn
    except RuntimeError:
        return None


def _note_nodes(values: Any, found: list[Any]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            node = node_of(value)
            if node is not None:
                found.append(node)
        elif isinstance(value, (list, tuple)):
            _note_nodes(value, found)
        elif isinstance(value, dict):
            _note_nodes(value.values(), found)


def _given_to_current(grad_outputs: Any) -> list[Any]:
    """Return the nodes of the running node's inputs, and of tensors that it may have saved."""
    node: Any = torch._C._current_autograd_node()
    found = [node, *(child for child, _ in node.next_functions)]
    _note_nodes(grad_outputs, found)
    return found


def hook_backward(
    out: Any,
    before: NodesSoFar,
    gate: Gate,
    tensors: tuple[int, ...],
    arguments: Any = (),
    seen: list[Any] | None = None,
) -> bool:
    """Hook every node made since ``before`` that ``out`` depends on, so that it runs with ``tensors`` pinned.
    Returns whether all new nodes were found.

    ``arguments``: the operator's, because some operators write to them in place and return nothing. Graphs of
    forward-mode tangents are searched as well. ``seen``: nodes that are hooked already; newly hooked ones are
    added.
    """
    (first_node, older), behind = before, next_node_number()
    if behind == first_node:
        return True
    stack = (
        [out.grad_fn] if type(out) is torch.Tensor else [tensor.grad_fn for tensor in tensors_of_result(out)]
    )
    seen = [] if seen is None else seen  # few: the nodes of one operator
    for further in (_nodes_of_written, _nodes_of_tangents, None):
        while stack:
            node = stack.pop()
            if node is None or not first_node <= node._sequence_nr() < behind:
                continue
            if node in seen or node in older:
                continue
            seen.append(node)
            if type(node).__name__ not in _SAVES_NO_WEIGHT:
                pin, unpin = gate.backward_pins.hooks(tensors)
                node.register_prehook(pin)
                node.register_hook(unpin)
            if len(seen) == behind - first_node:
                return True
            for child, _ in node.next_functions:
                stack.append(child)
        if further is not None:
            stack = further(out, arguments)
    return len(seen) >= behind - first_node


def _unbatched(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole batch if a backward pass runs once for several gradients (``vmap``,
    ``is_grads_batched``), because the graph belongs to the batch."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    if not is_legacy_batchedtensor(tensor):
        return tensor
    return torch._remove_batch_dim(tensor, 1, 1, 0)  # level 1: batches are never nested here


def _nodes_of_written(_out: Any, arguments: Any) -> list[Any]:
    return [tensor.grad_fn for tensor in tensors_of_result(arguments) if tensor.requires_grad]


def _nodes_of_tangents(out: Any, arguments: Any) -> list[Any]:
    """Return the nodes of forward-mode tangents of results and written arguments. Tangents have a graph of
    their own beside that of their primals."""
    if forward_ad._current_level < 0:
        return []
    tangents = [forward_ad.unpack_dual(tensor).tangent for tensor in tensors_of_result((out, arguments))]
    return [tangent.grad_fn for tangent in tangents if tangent is not None]


def tensors_of_result(out: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a result, or in arguments."""
    if isinstance(out, torch.Tensor):
        yield out
    elif isinstance(out, (list, tuple)):
        for item in out:
            yield from tensors_of_result(item)
    elif isinstance(out, dict):
        yield from tensors_of_result(tuple(out.values()))
