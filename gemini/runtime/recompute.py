"""Recompute: blocks of a model that may compute their activations again in backward, if that is faster.

See docs/notes/activations.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gemini.placement.recompute import RecomputeChoice, RecomputeReport, choose_blocks
from gemini.placement.recomputed_trace import BlockCall
from gemini.runtime.phases import OPTIMIZER
from gemini.runtime.repeatable import Watched, outputs_again, why_not_given
from gemini.runtime.saved import Version

if TYPE_CHECKING:
    from gemini.runtime.gemini_mgr import GeminiManager

# The hooks that autograd would call now.
_innermost_hooks = torch._C._autograd._top_saved_tensors_default_hooks

_FASTEST_COPY = 1e10  # bytes per second; where nothing was copied


class Block:
    """Stands in for the ``forward`` of a module: decides at each call how it runs."""

    def __init__(self, owner: Recompute, index: int, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self.forward: Callable[..., Any] = module.forward
        self.chosen = False
        self.refusal: str | None = None  # why it must not be recomputed
        self.index = index
        self._owner = owner
        update_wrapper(self, self.forward)
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        owner = self._owner
        if not owner.saves_here():
            return self.forward(*args, **kwargs)
        if not owner.decided:
            return owner.watch(self, args, kwargs)
        if self.chosen and why_not_given(args, kwargs) is None:
            return checkpoint(partial(self.forward, **kwargs), *args, use_reentrant=False)
        return self.forward(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # Copies and pickles of the module have the forward of its class.
        return getattr, (self.module, "forward")


class Recompute:
    """The blocks of one model, and the choice among them.

    The first steps are watched until their times are known: which moments each call takes, and whether a
    block could be run again at all: once, it is.
    """

    def __init__(self, manager: GeminiManager, module: nn.Module) -> None:
        self._manager = manager
        self._pack: Callable[..., Any] | None = None  # the hook of the forward pass under way
        self.choice: RecomputeChoice | None = None
        self._calls: list[tuple[BlockCall, list[Version]]] = []
        self._copied: tuple[int, float] = (0, 0.0)  # bytes into chunks, and seconds
        self._tried: set[int] = set()
        self.blocks = [
            Block(self, index, name, block) for index, (name, block) in enumerate(find_blocks(module))
        ]

    @property
    def decided(self) -> bool:
        """Whether it is settled which blocks are recomputed."""
        return self.choice is not None

    def saves_here(self) -> bool:
        """Whether autograd saves for backward now, and with the model's own hooks: not where a block is
        recomputed already, by this or by the user's torch.utils.checkpoint."""
        if self._pack is None or not torch.is_grad_enabled():
            return False
        hooks = _innermost_hooks(True)
        return hooks is not None and hooks[0] == self._pack

    @contextmanager
    def forward(self, pack: Callable[..., Any]) -> Iterator[None]:
        """Run a forward pass that trains, with ``pack`` as its hook for what autograd saves; one that raises
        will be repeated, so its calls do not count."""
        count, before, self._pack = len(self._calls), self._pack, pack
        try:
            yield
        except BaseException:
            del self._calls[count:]
            raise
        finally:
            self._pack = before

    def note_copy(self, nbytes: int, seconds: float) -> None:
        """Count a copy into a chunk, of which the original's memory was given back."""
        self._copied = (self._copied[0] + nbytes, self._copied[1] + seconds)

    def watch(self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block, note which moments that takes, and find out whether it could be run again."""
        untried = block.index not in self._tried and self._manager.in_step
        watched = Watched(block.module, args, kwargs) if untried else None
        begin = self._moment()
        out = block.forward(*args, **kwargs)
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        input_bytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        call = BlockCall(block.index, begin, self._moment(), input_bytes)
        self._calls.append((call, [Version(tensor) for tensor in tensors]))
        if watched is not None:
            self._tried.add(block.index)
            block.refusal = watched.why_not(out)
            if block.refusal is None:
                with self._manager.forward_pass(training=False):  # of no order
                    block.refusal = outputs_again(block.forward, watched, out)
        return out

    def end_step(self, *, on_trace: bool) -> bool:
        """Choose, once the step that ends has followed a recorded order and its times are known. Return
        whether any block is recomputed from now on."""
        calls, self._calls = self._calls, []
        copied, self._copied = self._copied, (0, 0.0)
        if self.decided or not on_trace or not calls:
            return False
        order = self._manager.order
        measured = order.measured()
        if measured is None:
            return False
        for call, versions in calls:
            if not all(version.is_current for version in versions):
                self.blocks[call.block].refusal = "what it is given is written afterwards"
        usable = {index for index in self._tried if self.blocks[index].refusal is None}
        speed = copied[0] / copied[1] if copied[1] > 0 else _FASTEST_COPY
        self.choice = choose_blocks(
            measured,
            [call for call, _ in calls if call.block in usable],
            order.machine(measured),
            overlap=order.overlaps,
            copy_bytes_per_second=speed,
        )
        for block in self.blocks:
            block.chosen = block.index in self.choice.blocks
        return bool(self.choice.blocks)

    def report(self) -> RecomputeReport:
        """Return what became of the blocks."""
        return RecomputeReport(
            names=tuple(block.name for block in self.blocks if block.chosen),
            refused=tuple((block.name, block.refusal) for block in self.blocks if block.refusal is not None),
            num_blocks=len(self.blocks),
            choice=self.choice,
        )

    def _moment(self) -> int:
        """Return how many moments of forward and backward the step has had: the next one's place in the
        trace, where updates come last."""
        return sum(1 for phase, *_ in self._manager.order.log if phase != OPTIMIZER)


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
