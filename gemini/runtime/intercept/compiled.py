"""Finds a model's blocks, the repeated submodules that are compiled or recomputed as wholes, and runs a
compiled block as one operator.

torch.compile sees plain tensors over the windows, never managed parameters. The whole call is pinned as one
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
    have children and another member of the same class beside them."""
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
    """Say whether a call of ``module`` runs code of torch.compile: after ``module.compile()``, if it was
    returned by ``torch.compile(module)``, or if its class has a compiled ``forward``."""
    if module._compiled_call_impl is not None:
        return True
    forward = module.forward
    return hasattr(forward, "_torchdynamo_orig_callable") and not hasattr(forward, "_torchdynamo_disable")


def num_compilations() -> int:
    """Return the number of frames that torch.compile has traced; 0 if it is not in use."""
    used = sys.modules.get("torch._dynamo.utils")
    return 0 if used is None else int(sum(used.counters["frames"].values()))


_CUDA_GRAPHS = "torch._inductor.cudagraph_trees"  # loaded if anything was compiled with CUDA graphs


_FEW = 64  # the most members of a container that is searched
_ALL: weakref.WeakSet[CompiledBlocks] = weakref.WeakSet()  # the compiler has one state for all models


class CompiledBlock:
    """Replaces the compiled call of a module: pins the module's parameters around it."""

    def __init__(self, gate: Gate, module: nn.Module, name: str) -> None:
        self._gate = gate
        self._module = module
        self.name = name
        self._before = module._compiled_call_impl
        self._call: Callable[..., Any] = module._call_impl if self._before is None else self._before
        module._compiled_call_impl = self

    def remove(self) -> None:
        """Restore the module's previous call, unless it was compiled again since."""
        if self._module._compiled_call_impl is self:
            self._module._compiled_call_impl = self._before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled call with all parameters of the module on DEVICE.

        Raises:
            OutOfBudgetError: DEVICE cannot hold all of them at once.
        """
        if in_transform() is not None:  # inside torch.func transforms operators run one by one on copies
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
                views.managed(arguments)  # restores containers that the caller owns
            if _num_graphs() != num_graphs and self._gate.is_followed:
                self._gate.abandon()  # compilation took memory and time that other steps do not
            if nodes is not None:
                with PlainTensors():
                    self._hook_backward(out, nodes, operands, arguments)
            return views.managed(out)

    def _nodes_so_far(self, args: Any, kwargs: Any) -> NodesSoFar | None:
        """Return what distinguishes the call's own nodes from older ones; None if they need no hooks. The
        call's inputs are its arguments and tensors held by the module."""
        if self._gate.resident or not torch.is_grad_enabled():
            return None
        with PlainTensors():
            return nodes_so_far([*tensors_in([args, kwargs]), *_held_tensors(self._module)])

    def _hook_backward(self, out: Any, nodes: NodesSoFar, operands: list[Any], arguments: Any) -> None:
        tensors = tuple(dict.fromkeys(tensor for operand in operands for tensor in operand._ref.tensors))
        seen: list[Any] = []
        returned = tensors_in(out)
        if not hook_backward(returned, nodes, self._gate, tensors, arguments, seen):
            # Results that the call may have left in attributes of the module.
            attributes = [vars(part) for part in self._module.modules()]
            hook_backward(attributes, nodes, self._gate, tensors, seen=seen)


def _held_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors in attributes of a module and its submodules, and in short containers there. Long
    containers hold data and are skipped."""
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, torch.Tensor):
                yield value
            elif type(value) in (list, tuple, dict) and 0 < len(value) <= _FEW:
                members = value.values() if type(value) is dict else value
                yield from (member for member in members if isinstance(member, torch.Tensor))


class CompiledBlocks:
    """The known compiled blocks of one model."""

    def __init__(self, gate: Gate, module: nn.Module) -> None:
        self._gate = gate
        self._module = module
        self._named = list(module.named_modules())
        self._blocks: list[CompiledBlock] = []
        self.warned = False  # whether it warned that the model was compiled as a whole
        self._num_gradients = -1  # number of gradients when the last training pass began
        self.run_uncompiled = _outside_compiler()  # not a bound method, which would be a reference cycle
        _keep_from_tracing()
        _ALL.add(self)
        self._find()

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile every block of the model, or the whole model if it has no blocks, with torch.compile's
        options."""
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
        """The names of the outermost compiled modules of the model."""
        self.refresh()
        return tuple(block.name for block in self._blocks)

    def close(self) -> None:
        """Stop waiting for backward passes: the model is closed."""
        _ALL.discard(self)

    def release(self) -> None:
        """Restore the previous call of every block: the model is an ordinary one again."""
        self.close()
        while self._blocks:
            self._blocks.pop().remove()

    def new_buffers(self) -> Iterator[torch.Tensor]:
        """Yield the buffers of submodules that were added since the last search."""
        known = {id(module) for _, module in self._named}
        for part in self._module.modules():
            if id(part) not in known:
                yield from part.buffers(recurse=False)

    def look_again(self) -> None:
        """Search the current submodules for compiled blocks."""
        self._named = list(self._module.named_modules())
        self._find()

    def refresh(self) -> None:
        """Search again if a module was compiled since the last search; called before every forward pass."""
        if self._calls() != self._seen:
            self._find()

    def begin_pass(self, *, training: bool) -> None:
        """Mark the beginning of a forward pass for CUDA graphs. If each block has CUDA graphs of its own, the
        compiler takes every call of a block for a new pass and frees the outputs of the previous one, until
        passes are marked. A pass is not marked while a training pass of any model has produced no gradient
        yet: its backward may still need the outputs.

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
        """Put a :class:`CompiledBlock` around every outermost compiled module."""
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
        """Return the attributes that show that a module is compiled; they can be set at any time."""
        return [(module._compiled_call_impl, vars(module).get("forward")) for _, module in self._named]


@functools.cache
def _outside_compiler() -> Callable[..., Any]:
    """Return :func:`_run_uncompiled` as a function that torch.compile does not trace into."""
    return torch.compiler.disable(_run_uncompiled)  # type: ignore[no-any-return]


def _run_uncompiled(blocks: CompiledBlocks, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run ``call``, the forward pass of a model that is being traced as a whole; warn once."""
    if not blocks.warned:
        blocks.warned = True
        logger.warning(
            "torch.compile has no effect on a managed model, because its parameters are not all on "
            "DEVICE at once; use model.compile(), which compiles each block"
        )
    return call(*args, **kwargs)


@functools.cache
def _keep_from_tracing() -> None:
    """Keep torch.compile from tracing managed tensors that it meets elsewhere, and the code that runs
    operators on them."""
    import torch._dynamo.config as settings
    from torch._dynamo import trace_rules

    settings.nontraceable_tensor_subclasses.update((ManagedParameter, ManagedTensor))
    for package in ("chunk", "memstats", "offload", "optim", "placement", "runtime", "sharding", "timeline"):
        trace_rules.add(f"gemini.{package}")


def _num_graphs() -> int:
    """Return the number of graphs compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
