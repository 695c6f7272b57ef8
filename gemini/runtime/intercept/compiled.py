"""A model's blocks, the repeated parts that are compiled or recomputed as wholes; and compiled blocks: a
submodule that torch.compile took is one operator.

A compiler is shown plain tensors over the windows, never managed parameters. The whole call is pinned as one
operator, and so is the node that it leaves for backward. See docs/notes/interception.md.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as PlainTensors
from torch._C._functorch import peek_interpreter_stack as in_transform

from gemini.errors import ConfigError, StateError
from gemini.runtime.gate.gate import Gate
from gemini.runtime.intercept.backward import NodesSoFar, hook_backward, nodes_so_far
from gemini.runtime.intercept.nested import tensors_in
from gemini.runtime.intercept.tensors import (
    ManagedParameter,
    ManagedTensor,
    PlainViews,
    managed_places,
    operands_of,
    pinned,
)
from gemini.system.config import format_bytes

logger = logging.getLogger(__name__)


def find_blocks(module: nn.Module) -> Sequence[tuple[str, nn.Module]]:
    """Return the names and modules of a model's blocks: the outermost members of lists and sequences that
    have a like beside them, and children."""
    found: list[tuple[str, nn.Module]] = []
    inside: tuple[str, ...] = ()
    for name, container in module.named_modules():
        if not isinstance(container, (nn.ModuleList, nn.Sequential)):
            continue
        if name.startswith(inside) and inside:
            continue
        kinds = [type(member) for member in container]
        members = [
            (f"{name}.{key}" if name else key, member)
            for key, member in container.named_children()
            if kinds.count(type(member)) > 1 and next(member.children(), None) is not None
        ]
        found += members
        inside += tuple(f"{member_name}." for member_name, _ in members)
    return list({id(block): (name, block) for name, block in reversed(found)}.values())[::-1]


def is_compiled(module: nn.Module) -> bool:
    """Say whether calling ``module`` calls code of torch.compile: after ``module.compile()``, as what
    ``torch.compile(module)`` returned, or because its class has a compiled ``forward``."""
    if module._compiled_call_impl is not None:
        return True
    forward = module.forward
    return hasattr(forward, "_torchdynamo_orig_callable") and not hasattr(forward, "_torchdynamo_disable")


def num_compilations() -> int:
    """Return how many frames the compiler has taken up, none where nobody uses it."""
    used = sys.modules.get("torch._dynamo.utils")
    return 0 if used is None else int(sum(used.counters["frames"].values()))


_CUDA_GRAPHS = "torch._inductor.cudagraph_trees"  # loaded where anything was compiled into them


_FEW = 64  # members of a container
_ALL: weakref.WeakSet[CompiledBlocks] = weakref.WeakSet()  # what the compiler is told counts for all models


class CompiledBlock:
    """Stands in for the compiled call of a module: pins what it uses around it."""

    def __init__(self, gate: Gate, module: nn.Module, name: str) -> None:
        self._gate = gate
        self._module = module
        self.name = name
        self._before = module._compiled_call_impl
        self._call: Callable[..., Any] = module._call_impl if self._before is None else self._before
        module._compiled_call_impl = self

    def remove(self) -> None:
        """Have the module called as before, if nobody compiled it again since."""
        if self._module._compiled_call_impl is self:
            self._module._compiled_call_impl = self._before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled call with all parameters of the module on DEVICE.

        Raises:
            OutOfBudgetError: DEVICE cannot hold all of them at once.
        """
        if in_transform() is not None:  # whose levels take copies of parameters, operator by operator
            return self._module._call_impl(*args, **kwargs)
        places = managed_places(self._module)
        operands = operands_of(([param for *_, param in places], args), kwargs)
        if not operands:
            return self._call(*args, **kwargs)
        if any(operand._ref.manager is not self._gate for operand in operands):
            raise ConfigError(
                f"compiled block {self.name!r} uses parameters of another managed model; give it copies"
            )
        views = PlainViews(operands)
        num_graphs = _num_graphs()
        nodes = self._nodes_so_far(args, kwargs)
        with pinned(self._gate, operands):
            args, kwargs = arguments = views.plain((args, kwargs))
            try:
                with views.replacing(self._module):
                    out = self._call(*args, **kwargs)
            finally:
                views.managed(arguments)  # lists and the like, which the caller has
            if _num_graphs() != num_graphs and self._gate.is_followed:
                self._gate.abandon()  # the compiler took memory and time that no other step takes
            if nodes is not None:
                with PlainTensors():
                    self._hook_backward(out, nodes, operands, arguments)
            return views.managed(out)

    def _nodes_so_far(self, args: Any, kwargs: Any) -> NodesSoFar | None:
        """Return what tells the call's own nodes from older ones; None: they need no hooks. What the call
        uses comes as arguments or is held by the module."""
        if self._gate.resident or not torch.is_grad_enabled():
            return None
        with PlainTensors():
            return nodes_so_far([*tensors_in([args, kwargs]), *_held_tensors(self._module)])

    def _hook_backward(self, out: Any, nodes: NodesSoFar, operands: list[Any], arguments: Any) -> None:
        tensors = tuple(dict.fromkeys(tensor for operand in operands for tensor in operand._ref.tensors))
        seen: list[Any] = []
        returned = tensors_in(out)
        if not hook_backward(returned, nodes, self._gate, tensors, arguments, seen):
            # What the call may have left elsewhere than in what it returned.
            attributes = [vars(part) for part in self._module.modules()]
            hook_backward(attributes, nodes, self._gate, tensors, seen=seen)


def _held_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors that attributes of a module and of its parts are, or that short containers there
    have: long ones hold data."""
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, torch.Tensor):
                yield value
            elif type(value) in (list, tuple, dict) and 0 < len(value) <= _FEW:
                members = value.values() if type(value) is dict else value
                yield from (member for member in members if isinstance(member, torch.Tensor))


class CompiledBlocks:
    """The compiled blocks of one model, as far as they are known."""

    def __init__(self, gate: Gate, module: nn.Module) -> None:
        self._gate = gate
        self._module = module
        self._named = list(module.named_modules())
        self._blocks: list[CompiledBlock] = []
        self.warned = False  # that the model was compiled as a whole
        self._num_gradients = -1  # there had been when the last pass that trains began
        self.run_uncompiled = _outside_compiler()  # not bound to this: that would be a cycle
        _keep_from_tracing()
        _ALL.add(self)
        self._find()

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile every block of the model, or all of it where it has none; with torch.compile's options."""
        blocks = find_blocks(self._module)
        if not blocks:
            nbytes = sum(param.numel() * param.element_size() for param in self._module.parameters())
            logger.warning(
                "model.compile() found no blocks (members of an nn.ModuleList or nn.Sequential, alike "
                "and with parts): the whole model is compiled as one operator, whose parameters of %s are on "
                "DEVICE all at once; put what repeats into an nn.ModuleList, or call compile() of the parts",
                format_bytes(nbytes),
            )
        for _, block in blocks or [("", self._module)]:
            block.compile(*args, **options)
        self._find()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the outermost parts of the model that are compiled."""
        self.refresh()
        return tuple(block.name for block in self._blocks)

    def close(self) -> None:
        """Await nothing any more: the model is closed."""
        _ALL.discard(self)

    def release(self) -> None:
        """Have every block called as before: the model is an ordinary one again."""
        self.close()
        while self._blocks:
            self._blocks.pop().remove()

    def new_buffers(self) -> Iterator[torch.Tensor]:
        """Yield the buffers of parts that were not there when it looked last."""
        known = {id(module) for _, module in self._named}
        for part in self._module.modules():
            if id(part) not in known:
                yield from part.buffers(recurse=False)

    def look_again(self) -> None:
        """Look for blocks in what the module consists of now."""
        self._named = list(self._module.named_modules())
        self._find()

    def refresh(self) -> None:
        """Look for modules that were compiled since the last time; called before every forward pass."""
        if self._calls() != self._seen:
            self._find()

    def begin_pass(self, *, training: bool) -> None:
        """Say that a forward pass begins: where each block has CUDA graphs of its own, the compiler takes
        every call of one for a new pass, in which nobody needs what was returned in those before, until it is
        told. While a pass that trains, of any model, has had no gradient, it may still need it.

        Raises:
            StateError: the pass would be recorded into a CUDA graph.
        """
        device = self._gate.chunks.device
        if device.has_own_memory and device.is_capturing():
            raise StateError(
                "forward: a managed model cannot be captured into a CUDA graph: replaying one would move no "
                "chunk. Call it outside of torch.cuda.graph() and make_graphed_callables(), and have blocks "
                "compiled with torch.compile(block, mode='reduce-overhead'), which captures each for itself"
            )
        if self._blocks and _CUDA_GRAPHS in sys.modules and not any(one._awaits_backward for one in _ALL):
            torch.compiler.cudagraph_mark_step_begin()
        if training:
            self._num_gradients = self._gate.num_gradients

    @property
    def _awaits_backward(self) -> bool:
        has_pass = self._blocks and self._gate.num_gradients == self._num_gradients
        return bool(has_pass) and any(param.requires_grad for param in self._module.parameters())

    def _find(self) -> None:
        """Have a :class:`CompiledBlock` around every outermost compiled module."""
        while self._blocks:
            self._blocks.pop().remove()
        inside: tuple[str, ...] = ()
        for name, module in self._named:
            if is_compiled(module) and not (inside and name.startswith(inside)):
                self._blocks.append(CompiledBlock(self._gate, module, name))
                inside += (f"{name}." if name else "",)
        self._seen = self._calls()
        device = self._gate.chunks.device
        self._gate.lend_gradients(bool(self._blocks) and device.has_own_memory)

    def _calls(self) -> list[Any]:
        """Return what may say of a module that it is compiled, and can be set at any time."""
        return [(module._compiled_call_impl, vars(module).get("forward")) for _, module in self._named]


@functools.cache
def _outside_compiler() -> Callable[..., Any]:
    """Return :func:`_run_uncompiled` as what the compiler calls and does not look into."""
    return torch.compiler.disable(_run_uncompiled)  # type: ignore[no-any-return]


def _run_uncompiled(blocks: CompiledBlocks, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run ``call``, the forward pass of a model that somebody has the compiler trace."""
    if not blocks.warned:
        blocks.warned = True
        logger.warning(
            "torch.compile leaves a managed model as it is, since its parameters are not all there at once; "
            "model.compile() compiles each of its blocks"
        )
    return call(*args, **kwargs)


@functools.cache
def _keep_from_tracing() -> None:
    """Have the compiler leave alone the managed tensors that it meets elsewhere, and the code that runs when
    operators are given them."""
    import torch._dynamo.config as settings
    from torch._dynamo import trace_rules

    settings.nontraceable_tensor_subclasses.update((ManagedParameter, ManagedTensor))
    for package in ("chunk", "memstats", "offload", "optim", "placement", "runtime", "sharding", "timeline"):
        trace_rules.add(f"gemini.{package}")


def _num_graphs() -> int:
    """Return how many graphs were compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
