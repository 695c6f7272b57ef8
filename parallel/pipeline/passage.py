"""What is under way in a stage of a pipeline: its forward pass, and what stands for what is not there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten

from gemini.errors import ConfigError
from gemini.parallel.pipeline.numbers import Draws, drawn

_ZERO = 0.5  # of rows
ARRIVED = "_gemini_arrived"  # an attribute of tensors


class EndOfStage(BaseException):  # a model that catches exceptions around its blocks lets it through
    """Leaves the model's forward pass where the next stage begins, with what that one is sent."""

    def __init__(self, outputs: tuple[torch.Tensor, ...]) -> None:
        super().__init__("the stage ends here")
        self.outputs = outputs


class FirstBlock(BaseException):
    """Leaves the forward pass at the first block of a stage, with the values that it is called with."""

    def __init__(self, name: str, values: Sequence[Any]) -> None:
        super().__init__("the stage begins here")
        self.name, self.values = name, values


class Taken(NamedTuple):
    """What a stage is sent: ``places`` of the values that its first block is called with, and how many those
    are."""

    places: tuple[int, ...] = ()
    among: int = 0


class Nothing:
    """What stands for tensors that another stage has: NaN, or zeros of a type without NaN, in one element of
    memory by type and device, or in whole tensors where the model writes to them (``is_written``). Within
    :meth:`at_random` it is other numbers: what changes with them is made of what is not there, although NaN
    may not show in it (masks, indices, branches)."""

    def __init__(self) -> None:
        self.is_written = False
        self._elements: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self._generator: torch.Generator | None = None
        self._has_zeros = False

    def __bool__(self) -> bool:
        return bool(self._elements)

    def expect_writes(self) -> None:
        """From now on give out whole tensors."""
        self.is_written = True

    @property
    def is_random(self) -> bool:
        """Whether it is random numbers now."""
        return self._generator is not None

    def like(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return what stands for ``tensor``, on ``device``."""
        if self._generator is not None:
            numbers = _numbers(tensor.shape, tensor.dtype, self._generator)
            if self._has_zeros and tensor.dim():
                rows = torch.rand(
                    tensor.shape[:-1], generator=self._generator, dtype=torch.float32, device="cpu"
                )
                numbers[rows < _ZERO] = 0
            return numbers.to(device)
        element = self._elements.get((tensor.dtype, device))
        if element is None:
            fill = torch.nan if tensor.is_floating_point() or tensor.is_complex() else 0
            element = torch.full((), fill, dtype=tensor.dtype, device=device)
            self._elements[tensor.dtype, device] = element
        whole = element.expand(tensor.shape)
        return whole.clone() if self.is_written else whole

    @contextmanager
    def at_random(self, seed: int, *, has_zeros: bool = False) -> Iterator[None]:
        """Have all of it be random numbers within the block, unseen by autograd; ``has_zeros``: some rows of
        zeros among them, as padding has."""
        self._generator, self._has_zeros = torch.Generator().manual_seed(seed), has_zeros
        before = [(element, element.clone()) for element in self._elements.values()]
        for element, _ in before:
            element.data.copy_(_numbers(element.shape, element.dtype, self._generator))
        try:
            yield
        finally:
            self._generator = None
            for element, values in before:
                element.data.copy_(values)


def _numbers(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Return random numbers on the CPU; whole ones are 0 and 1, which are in reach of most tables."""
    if dtype.is_floating_point or dtype.is_complex:
        numbers = torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu")
        return numbers.to(dtype)
    return torch.randint(2, tuple(shape), generator=generator, dtype=torch.int64, device="cpu").to(dtype)


class Arrived(NamedTuple):
    """What arrived for a tensor of nothing, noted on that for as long as it lives: checkpoint() calls a block
    with it again. ``inside``: the seed of random numbers in the blocks, of which ``first`` is the first."""

    tensor: torch.Tensor
    first: str
    inside: int | None


class Passage:
    """The forward pass of a stage that is under way: what it has received, and whether it got there.

    Places count the values that a block is called with, arguments and keywords flattened. Both stages at a
    cut call the same block with as many: the one before sends what is at some places, and the one behind,
    where nothing is there but NaN, puts it in.
    """

    def __init__(self, nothing: Nothing | None = None) -> None:
        """``nothing``: of what stand-ins are made, where stages share it."""
        self.nothing = Nothing() if nothing is None else nothing
        self.runs, self.has_entered, self.trains = False, False, False
        self.device = torch.device("cpu")  # of the batch
        self._takes: Sequence[int] | None = None
        self._gives = Taken()
        self._received: Sequence[torch.Tensor] = ()
        self._draws: Draws | None = None
        self._in_blocks = ExitStack()
        # By the id of a tensor of NaN, which is kept for that: what was received in its place.
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @contextmanager
    def begun(
        self,
        takes: Sequence[int] | None,
        batch: object,
        received: Sequence[torch.Tensor] = (),
        gives: Taken = Taken(),  # noqa: B008  # a tuple
        draws: Draws | None = None,
    ) -> Iterator[None]:
        """Run the stage on ``batch`` within the block: ``received`` comes in at the places ``takes`` of its
        first block, and what the next stage is to be given, ``gives``, goes out. ``takes`` None: it gets to
        its first block, and raises FirstBlock. ``draws`` None: random numbers are those of one process."""
        self._takes, self._received, self._gives = takes, received, gives
        self.has_entered, self.runs, self.trains = False, True, torch.is_grad_enabled()
        self.device, self._draws = device_of(batch) or self.device, draws
        try:
            with nullcontext() if draws is None else drawn(draws.around, self.device), ExitStack() as blocks:
                self._in_blocks = blocks
                yield
        finally:
            self._received, self.runs = (), False
            self._known.clear()

    def replaced(self, name: str, values: Sequence[Any]) -> list[Any]:
        """Return what the block ``name`` is called with: what was received in the place of what stands for
        it."""
        if not self.has_entered:
            self._enter(name, values)
        return [self._known[id(value)][1] if id(value) in self._known else value for value in values]

    def given(self, name: str, values: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """Return what of the ``values`` that ``name``, the next stage's first block, is called with goes
        there.

        Raises:
            ConfigError: there it is called with more or fewer.
        """
        if len(values) != self._gives.among:
            raise ConfigError(
                f"{name!r} is called with {len(values)} values behind the blocks before it, and with "
                f"{self._gives.among} on the stage that has it: blocks put tensors into a list or dict, "
                "which stays behind where the model is cut; have them return those tensors and take them as "
                "arguments, or cut the model elsewhere (split=)"
            )
        return tuple(values[place] for place in self._gives.places)

    def _enter(self, name: str, values: Sequence[Any]) -> None:
        self.has_entered = True
        if self._takes is None:
            raise FirstBlock(name, values)
        inside = self._draws.inside if self._draws is not None else None
        for place, tensor in zip(self._takes, self._received, strict=True):
            self._known[id(values[place])] = (values[place], tensor)
            if self.trains:
                setattr(values[place], ARRIVED, Arrived(tensor, name, inside))
        if self._draws is not None:
            self._in_blocks.enter_context(drawn(self._draws.inside, self.device))

    def leave_blocks(self) -> None:
        """Go on behind the last block of the stage."""
        self._in_blocks.close()

    def stands_for(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what stands for a tensor that another stage has."""
        return self.nothing.like(tensor, self.device)

    def refuse_others(self, name: str) -> None:
        """Raise ConfigError where the model is called, and not one of its stages."""
        if not self.runs:
            raise ConfigError(
                f"model(...) gets to {name!r}, which another stage of the pipeline has; call "
                "booster.execute_pipeline(data_iter, model, criterion, optimizer), which runs all of them "
                "(where that was called: checkpoint() goes around one block, not around several)"
            )


def device_of(values: object) -> torch.device | None:
    """Return the device of the first tensor that is on one; a model may bring its input to where the weights
    of another stage seem to be."""
    tensors = (value for value in tree_flatten(values)[0] if isinstance(value, torch.Tensor))
    return next((tensor.device for tensor in tensors if not tensor.is_meta), None)
