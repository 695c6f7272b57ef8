"""PreOp and PostOp of the backward pass: hooks on the autograd nodes that an operator made.

A node created by an operator may have saved a view of a managed weight. A hook that runs right before that
node pins the operator's chunks until the next PreOp behind it. Nodes are found by autograd's sequence number:
those made since the operator began are its own, so composite operators, in-place results and recomputation
under checkpointing need no special case. Each thread counts for itself, and a GPU's backward pass has one of
its own: what an operator was given is known to be older, whatever its number.
See docs/notes/interception.md.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch.autograd import _get_sequence_nr, forward_ad  # type: ignore[attr-defined]
from torch.utils.hooks import RemovableHandle

from gemini.memstats.trace import BACKWARD
from gemini.runtime.gate.gate import Gate, NodeHooks
from gemini.runtime.intercept.nested import map_tensors

# The number of the next node, and nodes that are older, whatever theirs.
NodesSoFar = tuple[int, list[Any]]

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
)

next_node_number: Callable[[], int] = _get_sequence_nr
current_pass: Callable[[], int] = torch._C._current_graph_task_id  # -1: none
current_node: Callable[[], Any] = torch._C._current_autograd_node


class _Lender(threading.local):
    """A tensor whose hooks nodes come to share: one dict for all that read the same, where every hook that is
    registered makes objects that the garbage collector follows."""

    def __init__(self) -> None:
        self._tensor = torch.empty(0, dtype=torch.float32, device="cpu")

    def give(self, node: Any, hooks: NodeHooks) -> None:
        """Have autograd call ``hooks`` before ``node`` runs."""
        tensor: Any = self._tensor
        tensor._backward_hooks = hooks
        node._register_hook_dict(tensor)
        tensor._backward_hooks = None


_lender = _Lender()


class _PassEnd:
    """Queued in a backward pass, which alone keeps it alive: it is gone when the pass is over or raised."""

    def __call__(self) -> None:
        """Do nothing: autograd calls it at the end."""


class _RunningNode(NamedTuple):
    """A node that has begun: it runs until another of its pass does, or its pass is over."""

    pass_number: int
    pass_end: Callable[[], object]  # returns None once the pass is over
    number: int
    tensors: tuple[int, ...]  # what it reads
    makes_graph: RemovableHandle | None  # of what is called behind it


class BackwardPins:
    """What autograd nodes keep pinned: the node that runs, those around it, and the one that ran last.

    The pin of the last node stays until the next PreOp, so that nodes of one operator share it. A node may
    call Python before it reads what it saved (recomputation under checkpointing, custom functions, a backward
    pass within): operators run meanwhile leave its pin alone. Nothing says that a node has ended: it has once
    autograd runs another one of its pass, and all have where no pass runs.
    """

    def __init__(self, gate: Gate) -> None:
        self.held: tuple[int, ...] | None = None  # by the outermost node that runs, or by the last one
        self._running: list[_RunningNode] = []  # outermost first; the last one may be over
        self._pass = -1  # the backward pass seen last
        self._pass_thread = 0  # that it runs on
        self._pass_end: Callable[[], object] = _PassEnd()
        self._gate = gate
        gate.threads.watch_passes(self.other_thread)
        self._begins = self._begin  # one method object for all hooks
        self._hooks: dict[tuple[int, ...], NodeHooks] = {}

    def hooks(self, tensors: tuple[int, ...]) -> NodeHooks:
        """Return what autograd is to call before a node that reads ``tensors``, as the hooks of a tensor."""
        hooks = self._hooks.get(tensors)
        if hooks is None:
            hooks = self._hooks[tensors] = {0: partial(self._begins, tensors)}
        return hooks

    def settle(self) -> None:
        """End the pins of nodes that are over; called by every PreOp while there is one."""
        if self._running:
            self._forget_ended()
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

    def _begin(self, tensors: tuple[int, ...], _grad: object) -> None:
        current = current_pass()
        if current == self._pass:
            self._pin(tensors)
        else:
            if self._pass_end() is not None:
                self._gate.threads.refuse_second_pass()
            with self._gate.threads.operators:  # one of another thread ends first, and none begins
                self._pin(tensors)
                self._watch(current)
        node = current_node()
        behind = None
        if torch.is_grad_enabled():  # create_graph: what this node makes reads the same weights
            behind = node.register_hook(partial(self._hook_made, tensors, next_node_number()))
        running = _RunningNode(current, self._pass_end, node._sequence_nr(), tensors, behind)
        self._running.append(running)

    def _pin(self, tensors: tuple[int, ...]) -> None:
        self._gate.enter(BACKWARD)
        if self._running:
            self._forget_ended()
        if self._running:
            self._gate.pre_op(tensors)
        elif self.held != tensors:
            self._gate.pre_op(tensors)
            self.held = tensors

    def _hook_made(
        self, tensors: tuple[int, ...], first_node: int, grad_inputs: object, grad_outputs: object
    ) -> None:
        grad_inputs, grad_outputs = map_tensors((grad_inputs, grad_outputs), _unbatched)
        hook_backward(grad_inputs, (first_node, _given_to_current(grad_outputs)), self._gate, tensors)

    def _watch(self, current: int) -> None:
        """See to it that ``_pass_end`` returns None once the current backward pass is over, or raised."""
        end = _PassEnd()
        torch.autograd.Variable._execution_engine.queue_callback(end)
        self._pass, self._pass_end, self._pass_thread = current, weakref.ref(end), threading.get_ident()

    def _forget_ended(self) -> None:
        """Unpin what nodes that are over, or raised, left pinned; stop at one that runs, or around whose
        pass this is."""
        current = current_pass()
        while self._running:
            last = self._running[-1]
            if last.pass_number == current:
                node = current_node()
                if node is not None and node._sequence_nr() == last.number:
                    return
            elif current != -1 and last.pass_end() is not None and not self._runs_in(current):
                return
            self._forget_last()

    def _runs_in(self, pass_number: int) -> bool:
        return any(each.pass_number == pass_number for each in self._running)

    def _forget_last(self) -> None:
        """Unpin for the innermost node; the outermost one's pin is ``held``, which the next PreOp ends."""
        last = self._running.pop()
        if last.makes_graph is not None:
            last.makes_graph.remove()
        if self._running:
            self._gate.post_op(last.tensors, False)


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
    node: Any = current_node()
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
    stack = [out.grad_fn] if type(out) is torch.Tensor else [tensor.grad_fn for tensor in _tensors(out)]
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
                _lender.give(node, gate.backward_pins.hooks(tensors))
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
    return [tensor.grad_fn for tensor in _tensors(arguments) if tensor.requires_grad]


def _nodes_of_tangents(out: Any, arguments: Any) -> list[Any]:
    """Return the nodes that made tangents, of forward-mode AD, of results and of what was written: tangents
    have a graph of their own beside that of what they belong to."""
    if forward_ad._current_level < 0:
        return []
    tangents = [forward_ad.unpack_dual(tensor).tangent for tensor in _tensors((out, arguments))]
    return [tangent.grad_fn for tangent in tangents if tangent is not None]


def _tensors(out: Any) -> Iterator[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        yield out
    elif isinstance(out, (list, tuple)):
        for item in out:
            yield from _tensors(item)
    elif isinstance(out, dict):
        yield from _tensors(tuple(out.values()))
