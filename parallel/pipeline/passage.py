"""What is under way in a stage of a pipeline: its forward pass, and what stands for what is not there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from gemini.errors import ConfigError
from gemini.parallel.pipeline.containers import Path, look_up, put, tensors_in, worded
from gemini.parallel.pipeline.numbers import Draws, drawn
from gemini.parallel.pipeline.placeholders import Placeholders

ARRIVED = "_gemini_arrived"  # an attribute of tensors


class EndOfStage(BaseException):  # a model that catches exceptions around its blocks lets it through
    """Leaves the model's forward pass where the next stage begins, with what that one is sent."""

    def __init__(self, outputs: tuple[torch.Tensor, ...]) -> None:
        super().__init__("the stage ends here")
        self.outputs = outputs


class FirstBlock(BaseException):
    """Leaves the forward pass at the first block of a stage, with the values that it is called with, and with
    what the model's attributes hold then."""

    def __init__(self, name: str, values: Sequence[Any], held: Mapping[Path, torch.Tensor]) -> None:
        super().__init__("the stage begins here")
        self.name, self.values, self.held = name, values, held


class Taken(NamedTuple):
    """What a stage is sent: ``places`` of the values that its first block is called with, and how many those
    are; and tensors in attributes of the model, which blocks leave there (``held``)."""

    places: tuple[int, ...] = ()
    among: int = 0
    held: tuple[Path, ...] = ()

    @property
    def num_tensors(self) -> int:
        """How many tensors these are."""
        return len(self.places) + len(self.held)


class Arrived(NamedTuple):
    """What arrived for a placeholder, noted on that for as long as it lives: checkpoint() calls a block with
    it again. ``inside``: the seed of random numbers in the blocks, of which ``first`` is the first."""

    tensor: torch.Tensor
    first: str
    inside: int | None


class Passage:
    """The forward pass of a stage that is under way: what it has received, and whether it got there.

    Places count the values that a block is called with, arguments and keywords flattened. Both stages at a
    cut call the same block with as many: the one before sends what is at some places, and the one behind,
    where placeholders are, puts it in.
    """

    def __init__(self, placeholders: Placeholders | None = None) -> None:
        """``placeholders``: of which stand-ins are made, where stages share them."""
        self.placeholders = Placeholders() if placeholders is None else placeholders
        self.runs, self.has_entered, self.trains, self.is_training = False, False, False, True
        self._is_judged = False
        # Parameters of other stages that modules around the blocks have themselves, and what stands for each.
        self.own_parameters: list[tuple[nn.Module, str, torch.Tensor]] = []
        self.device = torch.device("cpu")  # of the batch
        # Modules around the blocks, and lists and the like in any module, by names: tensors in them travel.
        self.holders: dict[str, nn.Module] = {}
        self.containers: dict[tuple[str, str], Any] = {}
        self._takes: Taken | None = None
        self._gives = Taken()
        self._received: Sequence[torch.Tensor] = ()
        self._draws: Draws | None = None
        self._in_blocks = ExitStack()
        # By the id of a placeholder, which is kept for that: what was received in its place.
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def set_training(self, is_training: bool) -> None:
        """Say whether the model trains: modules of other stages are run on ``meta`` as it does."""
        self.is_training = is_training

    @property
    def shows(self) -> bool:
        """Whether the modules and parameters of other stages are to be seen, in the shape of placeholders."""
        return self.runs or self._is_judged

    @contextmanager
    def judged(self) -> Iterator[None]:
        """Show what other stages have to a criterion, which may add up all weights."""
        self._is_judged = True
        try:
            with self._with_own_parameters():
                yield
        finally:
            self._is_judged = False

    @contextmanager
    def _with_own_parameters(self) -> Iterator[None]:
        for owner, key, placeholder in self.own_parameters:
            owner._parameters[key] = placeholder  # type: ignore[assignment]
        try:
            yield
        finally:
            for owner, key, _ in self.own_parameters:
                del owner._parameters[key]

    @contextmanager
    def begun(
        self,
        takes: Taken | None,
        batch: object,
        received: Sequence[torch.Tensor] = (),
        gives: Taken = Taken(),  # noqa: B008  # a tuple
        draws: Draws | None = None,
    ) -> Iterator[None]:
        """Run the stage on ``batch`` within the block: ``received`` comes in as its first block ``takes`` it,
        and what the next stage is to be given, ``gives``, goes out. ``takes`` None: it gets to its first
        block, and raises FirstBlock. ``draws`` None: random numbers are those of one process."""
        self.placeholders.forget_writes()
        self._takes, self._received, self._gives = takes, received, gives
        self.has_entered, self.runs, self.trains = False, True, torch.is_grad_enabled()
        self.device, self._draws = device_of(batch) or self.device, draws
        try:
            with (
                nullcontext() if draws is None else drawn(draws.around, self.device),
                self.placeholders.watched(),
                self._with_own_parameters(),
                ExitStack() as blocks,
            ):
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
        return [self.arrived_for(value) for value in values]

    def arrived_for(self, value: Any) -> Any:
        """Return the value that arrived for the placeholder ``value``; any other value as it is."""
        return self._known[id(value)][1] if id(value) in self._known else value

    def given(self, name: str, values: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """Return the tensors that the next stage gets: some of ``values``, with which its first block
        ``name`` is called, and some from attributes of the model.

        Raises:
            ConfigError: there it is called with more or fewer, or what goes there is not here.
        """
        if len(values) != self._gives.among:
            raise ConfigError(
                f"{name!r} is called with {len(values)} values behind the blocks before it, and with "
                f"{self._gives.among} on the stage that has it: have blocks return tensors and take them as "
                "arguments, or cut the model elsewhere (split=)"
            )
        given = [values[place] for place in self._gives.places]
        given += [self.arrived_for(self._held(name, path)) for path in self._gives.held]
        if any(map(self.placeholders.stands_for, given)):
            raise ConfigError(
                f"what {name!r} of the next stage is called with is made of something that a stage before "
                "this one has, and has not sent: what runs in front of the blocks, or a weight there, is "
                "used behind a block (only what one block after another is called with goes from stage to "
                "stage); have the blocks pass it on, or train without pp"
            )
        return tuple(given)

    def _held(self, name: str, path: Path) -> torch.Tensor:
        value = look_up(self._holder(path), path)
        if not isinstance(value, torch.Tensor):
            raise ConfigError(
                f"{worded(path)} holds a tensor where the stage of {name!r} begins, and not so behind the "
                "blocks before it: stages have to find as much there as one process; empty it at the "
                "beginning of the model's forward(), or have blocks return the tensors"
            )
        return value

    def _holder(self, path: Path) -> Any:
        owner, key = str(path[0]), str(path[1])
        if owner in self.holders:
            return self.holders[owner].__dict__
        return {key: self.containers.get((owner, key))}

    def held(self) -> dict[Path, torch.Tensor]:
        """Return the placeholders in attributes of the model, by where they are."""
        seen: set[int] = set()
        found: dict[Path, torch.Tensor] = {}
        roots = [(name, here.__dict__) for name, here in self.holders.items()]
        roots += [(owner, {key: value}) for (owner, key), value in self.containers.items()]
        for owner, attributes in roots:
            for path, value in tensors_in(attributes, (owner,), seen):
                if self.placeholders.stands_for(value):
                    found[path] = value
        return found

    def _enter(self, name: str, values: Sequence[Any]) -> None:
        self.has_entered = True
        if self._takes is None:
            raise FirstBlock(name, values, self.held())
        inside = self._draws.inside if self._draws is not None else None
        count = len(self._takes.places)
        stands = [values[place] for place in self._takes.places]
        stands += [self._held(name, path) for path in self._takes.held]
        for index, (value, tensor) in enumerate(zip(stands, self._received, strict=True)):
            self._known[id(value)] = (value, tensor)
            if self.trains:
                setattr(value, ARRIVED, Arrived(tensor, name, inside))
            if index >= count:
                path = self._takes.held[index - count]
                put(self._holder(path), path, tensor)
        if self._draws is not None:
            self._in_blocks.enter_context(drawn(self._draws.inside, self.device))

    def leave_blocks(self) -> None:
        """Go on behind the last block of the stage."""
        self._in_blocks.close()

    def stands_for(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what stands for a tensor that another stage has."""
        return self.placeholders.like(tensor, self.device)

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
