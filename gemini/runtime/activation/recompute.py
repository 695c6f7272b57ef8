"""Recompute: chooses blocks of a model that compute their activations again in backward, if that is faster.

See docs/notes/activations.md.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from gemini.errors import ConfigError
from gemini.memstats.trace import OPTIMIZER
from gemini.placement.recompute import NOTHING, BlockCall, RecomputeChoice, RecomputeReport, choose_blocks
from gemini.runtime.activation.repeatable import CannotRepeat, Given, Look, Repeat, training_modes
from gemini.runtime.activation.saved_tensors import Version
from gemini.runtime.intercept.compiled import find_blocks, is_compiled
from gemini.runtime.step.order import StepOrder

# The hooks that autograd would call now.
_innermost_hooks = torch._C._autograd._top_saved_tensors_default_hooks

_FASTEST_COPY = 1e10  # bytes per second; used if nothing was copied
_LONGEST_WATCH = 20  # steps; after that nothing is recomputed


class Block:
    """Replaces the ``forward`` of a module: decides at each call whether it is recomputed."""

    def __init__(self, owner: Recompute, name: str, module: nn.Module) -> None:
        self.name = name
        self.chosen = False
        self.refusal: str | None = None  # why it must not be recomputed; None: it may
        self.judged: set[tuple[bool, ...]] = set()  # training modes of calls that could be repeated
        self.__signature__ = inspect.signature(module.forward)
        self._owner = owner
        self._module = weakref.ref(module)  # weak: the module holds this object
        module.forward = self

    @property
    def module(self) -> nn.Module:
        """The module with this forward."""
        module = self._module()
        assert module is not None
        return module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        module = self.module
        return type(module).forward(module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, checkpointed if the block is chosen."""
        owner = self._owner
        if not owner.saves_activations():
            return self.forward(*args, **kwargs)
        if not owner.decided:
            return owner.watch(self, args, kwargs)
        if self.chosen and tuple(training_modes(self.module)) in self.judged:
            try:
                given = Given(args, kwargs)
            except CannotRepeat:
                return self.forward(*args, **kwargs)
            tensors = given.release()
            # Run to the end: a forward that stops early leaves its module half-changed.
            with set_checkpoint_early_stop(False):
                repeat = Repeat(self.name, self.module, self.forward, given)
                return checkpoint(repeat, *tensors, use_reentrant=False)
        return self.forward(*args, **kwargs)

    def remove(self) -> None:
        """Restore the module's own forward."""
        module = self._module()
        if module is not None and vars(module).get("forward") is self:
            del module.forward

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # Copies and pickles of the module have the forward of its class.
        return getattr, (self.module, "forward")


class _Watched(NamedTuple):
    """A call of a block, and the state that shows whether any of its inputs changes afterwards."""

    call: BlockCall
    versions: list[Version]
    look: Look | None  # None: the block is refused already


class Recompute:
    """The blocks of one model, and the choice among them.

    Steps are watched until their times are known: which moments each call takes, and whether it could be
    repeated at all. The very first step is recorded again, because the heap grows in it, and its memory is
    not typical.
    """

    def __init__(self, order: StepOrder, module: nn.Module) -> None:
        self._order = order
        self._pack: Callable[..., Any] | None = None  # the pack hook of the current forward pass
        self._calls: list[_Watched] = []
        self._copied: tuple[int, float] = (0, 0.0)  # bytes copied into chunks, and seconds
        self._num_steps = 0  # watched
        self._watching = False  # inside a watched block
        self._why_none = "no step would be shorter for it"
        self.blocks: list[Block] = []
        self.choice: RecomputeChoice | None = None
        self.begin(module)

    def begin(self, module: nn.Module) -> None:
        """Watch the blocks that ``module`` has now, to choose among them."""
        for block in self.blocks:
            block.remove()
        found = [(name, block) for name, block in find_blocks(module) if _can_stand_in(block)]
        self.blocks = [Block(self, name, block) for name, block in found]
        self.choice = None if self.blocks else NOTHING
        self._calls.clear()
        self._num_steps = 0

    @property
    def decided(self) -> bool:
        """Whether the choice of blocks is final."""
        return self.choice is not None

    def saves_activations(self) -> bool:
        """Whether autograd saves tensors now, with the model's own hooks. Not inside a block that is already
        recomputed, by this class or by the user's torch.utils.checkpoint."""
        if self._pack is None or self._watching or not torch.is_grad_enabled():
            return False
        hooks = _innermost_hooks(True)
        return hooks is not None and hooks[0] == self._pack

    @contextmanager
    def forward(self, pack: Callable[..., Any]) -> Iterator[None]:
        """Context of a training pass with ``pack`` as its hook for saved tensors. Calls of a pass that raised
        do not count, because it will be repeated."""
        count, before, self._pack = len(self._calls), self._pack, pack
        try:
            yield
        except BaseException:
            del self._calls[count:]
            raise
        finally:
            self._pack = before

    def note_copy(self, nbytes: int, seconds: float) -> None:
        """Count a copy into a chunk; the original's memory was freed."""
        self._copied = (self._copied[0] + nbytes, self._copied[1] + seconds)

    def watch(self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block, record its moments, and find out whether it could be repeated."""
        look, versions, nbytes = None, [], 0
        if block.refusal is None:
            try:
                tensors = Given(args, kwargs).tensors
                look = Look(block.module)
                versions = [Version(tensor) for tensor in tensors]
                nbytes = sum(tensor.nbytes for tensor in tensors)
            except CannotRepeat as refusal:
                block.refusal = str(refusal)
        begin, self._watching = self._moment(), True
        try:
            out = block.forward(*args, **kwargs)
        finally:
            self._watching = False
        if look is not None:
            try:
                look.require_unchanged(versions, out)
                block.judged.add(tuple(training_modes(block.module)))
            except CannotRepeat as refusal:
                block.refusal = str(refusal)
        call = BlockCall(self.blocks.index(block), begin, self._moment(), nbytes)
        self._calls.append(_Watched(call, versions, look))
        return out

    def end_step(self, *, on_trace: bool) -> bool:
        """Choose the blocks, once a step has followed a recorded order and its times are known. Returns
        whether steps must be recorded again: after the first one, and if any block is chosen."""
        calls, self._calls = self._calls, []
        copied, self._copied = self._copied, (0, 0.0)
        if self.decided:
            return False
        self._refuse_changed(calls)
        self._num_steps += 1
        if self._num_steps == 1:
            return True
        order = self._order
        measured = order.measured() if on_trace else None
        if measured is None:
            if self._num_steps >= _LONGEST_WATCH:
                self._why_none, self.choice = "steps are not alike", NOTHING
            return False
        if not calls:
            self._why_none, self.choice = "none saves anything that comes here", NOTHING
            return False
        try:
            self.choice = choose_blocks(
                measured,
                [one.call for one in calls if self.blocks[one.call.block].refusal is None],
                order.machine(measured),
                overlap=order.overlaps,
                copy_bytes_per_second=copied[0] / copied[1] if copied[1] > 0 else _FASTEST_COPY,
            )
        except ConfigError as error:  # the speed of a link is unknown
            self._why_none, self.choice = str(error), NOTHING
        for index, block in enumerate(self.blocks):
            block.chosen = index in self.choice.blocks
        return bool(self.choice.blocks)

    def report(self) -> RecomputeReport:
        """Return the decisions about the blocks."""
        return RecomputeReport(
            names=tuple(block.name for block in self.blocks if block.chosen),
            refused=tuple((block.name, block.refusal) for block in self.blocks if block.refusal is not None),
            num_blocks=len(self.blocks),
            choice=self.choice,
            why_none=self._why_none,
        )

    def _refuse_changed(self, calls: Sequence[_Watched]) -> None:
        """Refuse blocks if their inputs or state changed between forward and the end of the step."""
        for call, versions, look in calls:
            block = self.blocks[call.block]
            if block.refusal is not None or look is None:
                continue
            if not all(version.is_current for version in versions):
                block.refusal = "what it is given is written afterwards"
            elif not look.holds:
                block.refusal = "its attributes or buffers are changed afterwards"

    def _moment(self) -> int:
        """Return the number of forward and backward moments of the step so far. This is the next one's place
        in the trace, where updates come last."""
        phases = self._order.log.phases
        return len(phases) - phases.count(OPTIMIZER)


def _can_stand_in(module: nn.Module) -> bool:
    """Say whether a :class:`Block` can replace a module's forward, which must be a function of its class.
    Compiled modules choose themselves what to recompute."""
    own = "forward" in vars(module) or isinstance(module, torch.jit.ScriptModule)
    is_function = isinstance(inspect.getattr_static(type(module), "forward", None), types.FunctionType)
    return is_function and not own and not is_compiled(module)
