"""PreOp and PostOp of the backward pass: hooks on the autograd nodes that an operator made.

A node created by an operator may have saved a view of a managed weight. Hooks that run right before and right
after that node pin the operator's chunks for exactly as long as the node reads them. Nodes are found by
autograd's sequence number: those made since the operator began are its own, so composite operators, in-place
results and recomputation under checkpointing need no special case. Each thread counts for itself, and a GPU's
backward pass has a thread of its own: what an operator was given is known to be older, whatever its number.
See docs/notes/interception.md.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch.autograd import _get_sequence_nr, forward_ad  # type: ignore[attr-defined]

from gemini.losses.tiled_cross_entropy import TiledCrossEntropy
from gemini.memstats.trace import BACKWARD
from gemini.runtime.gate.gate import Gate, NodeHooks
from gemini.runtime.intercept.nested import map_tensors

# The number of the next node, and nodes that are older, whatever theirs.
NodesSoFar = tuple[int, list[Any]]

# A node that runs: its backward pass, what returns None once that is over, the number of the first node that
# it may make, what it reads.
_RunningNode = tuple[int, Callable[[], object], int, tuple[int, ...]]

# Nodes of these kinds keep no tensor of a weight's memory for their backward.
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
) | {f"{TiledCrossEntropy.__name__}Backward"}  # made its gradients with the loss

next_node_number: Callable[[], int] = _get_sequence_nr
current_pass: Callable[[], int] = torch._C._current_graph_task_id  # -1: none


class _PassEnd:
    """Queued in a backward pass, which alone keeps it alive: it is gone when the pass is over or raised."""

    def __call__(self) -> None:
        """Do nothing: autograd calls it at the end."""


class BackwardPins:
    """What autograd nodes keep pinned: the node that runs, those around it, and the one that ran last.

    The pin of the last node stays until the next PreOp, so that nodes of one operator share it. A node may
    call Python before it reads what it saved (recomputation under checkpointing, custom functions, a backward
    pass within): operators run meanwhile leave its pin alone. A node that raised runs no more once its
    backward pass is gone.
    """

    def __init__(self, gate: Gate) -> None:
        self.held: tuple[int, ...] | None = None  # by the outermost node that runs, or by the last one
        self._running: list[_RunningNode] = []  # outermost first
        self._pass = -1  # the backward pass seen last
        self._pass_thread = 0  # that it runs on
        self._pass_end: Callable[[], object] = _PassEnd()
        self._gate = gate
        gate.threads.watch_passes(self.other_thread)
        self._hooks: dict[tuple[int, ...], NodeHooks] = {}

    def hooks(self, tensors: tuple[int, ...]) -> NodeHooks:
        """Return the hooks that run before and after an autograd node that reads ``tensors``."""
        hooks = self._hooks.get(tensors)
        if hooks is None:
            hooks = self._hooks[tensors] = self._make_hooks(tensors)
        return hooks

    def settle(self) -> None:
        """End the pin of the node that ran last; called by every PreOp while there is one."""
        if self._running:
            self._forget_raised()
        if not self._running:
            held, self.held = self.held, None
            if held is not None:
                self._gate.chunks.release(held, dirty=False)

    def other_thread(self) -> int:
        """Return the thread that runs a backward pass of this model beside this one; 0: there is none, or it
        is one of autograd's own, which may still hold a pass that is over for the thread that called it."""
        other = self._pass_thread
        if self._pass_end() is None or other == threading.get_ident() or not _is_pythons(other):
            return 0
        return other if current_pass() == -1 or _is_pythons(threading.get_ident()) else 0

    def forget(self) -> None:
        """Drop the record of every pin; the caller unpins."""
        self.held = None
        self._running.clear()

    def _make_hooks(self, tensors: tuple[int, ...]) -> NodeHooks:
        gate, running = self._gate, self._running

        def before(_grad_outputs: object) -> None:
            current = current_pass()
            if current == self._pass:
                pin()
            else:
                if self._pass_end() is not None:
                    gate.threads.refuse_second_pass()
                with gate.threads.operators:  # one of another thread ends first, and none begins
                    pin()
                    self._watch(current)
            running.append((current, self._pass_end, next_node_number(), tensors))

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
                while running[-1][0] != current:  # of a pass within this node that raised
                    self._forget_last()
            first_node = running.pop()[2]
            if running:
                gate.post_op(tensors, False)
            if torch.is_grad_enabled():  # create_graph: what this node made reads the same weights
                grad_inputs, grad_outputs = map_tensors((grad_inputs, grad_outputs), _unbatched)
                hook_backward(grad_inputs, (first_node, _given_to_current(grad_outputs)), gate, tensors)

        return before, after

    def _watch(self, current: int) -> None:
        """See to it that ``_pass_end`` returns None once the current backward pass is over, or raised."""
        end = _PassEnd()
        torch.autograd.Variable._execution_engine.queue_callback(end)
        self._pass, self._pass_end, self._pass_thread = current, weakref.ref(end), threading.get_ident()

    def _forget_raised(self) -> None:
        """Unpin what nodes that raised left pinned: they count as running but their backward pass is over."""
        outside = current_pass() == -1
        while self._running and (outside or self._running[-1][1]() is None):
            self._forget_last()

    def _forget_last(self) -> None:
        """Unpin for the innermost node; the outermost one's pin is ``held``, which the next PreOp ends."""
        tensors = self._running.pop()[3]
        if self._running:
            self._gate.post_op(tensors, False)


def _is_pythons(ident: int) -> bool:
    """Say whether Python has started a thread, not autograd."""
    started = (t.ident for t in threading.enumerate() if not isinstance(t, threading._DummyThread))
    return ident in started


def nodes_so_far(arguments: Any) -> NodesSoFar:
    """Return what tells the nodes that an operator is about to make from those that there are: the number of
    its first one, and the nodes that made its ``arguments``."""
    given: list[Any] = []
    _note_nodes(arguments, given)
    return next_node_number(), given


def node_of(tensor: torch.Tensor) -> Any:
    """Return the node that made a tensor; None: there is none, or autograd refuses to say, as of a view whose
    base was written where nobody recorded it, which no operator can use for backward either."""
    try:
        if type(tensor) is torch.Tensor:
            return tensor.grad_fn
        with torch._C.DisableTorchFunctionSubclass():  # others may answer for themselves
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
    """Return the nodes that made what the node that runs was given, and what it may have saved."""
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
    """Hook every node made since ``before`` that ``out`` depends on so that it runs with ``tensors`` pinned.
    Return whether those are all that were made.

    ``arguments`` are the operator's: some write to theirs in place and return nothing. The graph of tangents
    counts. ``seen``: nodes that are hooked already; those hooked now are added.
    """
    (first_node, older), behind = before, next_node_number()
    if behind == first_node:
        return True
    stack = [out.grad_fn] if type(out) is torch.Tensor else [tensor.grad_fn for tensor in tensors_in(out)]
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
    """Return all of a batch where a backward pass runs once for several gradients (``vmap``,
    ``is_grads_batched``): the graph is of that."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    if not is_legacy_batchedtensor(tensor):
        return tensor
    return torch._remove_batch_dim(tensor, 1, 1, 0)  # of level 1: nothing nests them


def _nodes_of_written(_out: Any, arguments: Any) -> list[Any]:
    return [tensor.grad_fn for tensor in tensors_in(arguments) if tensor.requires_grad]


def _nodes_of_tangents(out: Any, arguments: Any) -> list[Any]:
    """Return the nodes that made tangents, of forward-mode AD, of results and of what was written: tangents
    have a graph of their own beside that of what they belong to."""
    if forward_ad._current_level < 0:
        return []
    tangents = [forward_ad.unpack_dual(tensor).tangent for tensor in tensors_in((out, arguments))]
    return [tangent.grad_fn for tangent in tangents if tangent is not None]


def tensors_in(out: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a result, or in arguments."""
    if isinstance(out, torch.Tensor):
        yield out
    elif isinstance(out, (list, tuple)):
        for item in out:
            yield from tensors_in(item)
    elif isinstance(out, dict):
        yield from tensors_in(tuple(out.values()))
