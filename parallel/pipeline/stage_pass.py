"""StagePass: the forward pass of one stage of a pipeline, with the tensors that earlier stages sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from gemini.errors import ConfigError
from gemini.parallel.pipeline.containers import (
    CONTEXT,
    Path,
    containers_in_context,
    look_up,
    put,
    tensor_paths,
    worded,
)
from gemini.parallel.pipeline.numbers import Draws, drawn
from gemini.parallel.pipeline.placeholders import Placeholders

RECEIVED = "_gemini_received"  # an attribute of placeholders
PLAIN_KINDS = (bool, int, float, str, type(None))  # plain values among arguments
_PLAIN_SET = frozenset(PLAIN_KINDS)


class EndOfStage(BaseException):  # a model that catches Exception around its blocks lets it through
    """Ends the model's forward pass at the next stage's first block, and carries the tensors to send."""

    def __init__(self, outputs: tuple[torch.Tensor, ...]) -> None:
        super().__init__("the stage ends here")
        self.outputs = outputs


class FirstBlock(BaseException):
    """Ends the forward pass at the first block of a stage. Carries the arguments of the block, and the
    tensors in the model's attributes at that time.
    """

    def __init__(self, name: str, values: Sequence[Any], held: Mapping[Path, torch.Tensor]) -> None:
        super().__init__("the stage begins here")
        self.name, self.values, self.held = name, values, held


class StageInputs(NamedTuple):
    """The inputs of a stage from earlier stages.

    Attributes:
        places: which values among the arguments of its first block are received.
        among: the number of these arguments.
        held: paths to received tensors in attributes of the model and in context variables, where blocks
            leave them.
    """

    places: tuple[int, ...] = ()
    among: int = 0
    held: tuple[Path, ...] = ()

    @property
    def num_tensors(self) -> int:
        """The number of received tensors."""
        return len(self.places) + len(self.held)


class Received(NamedTuple):
    """The tensor received for a placeholder, stored on the placeholder: checkpoint() calls a block with it
    again.

    Attributes:
        tensor: the received tensor.
        first: the name of the stage's first block.
        inside: the seed of random numbers in the stage's blocks.
    """

    tensor: torch.Tensor
    first: str
    inside: int | None


class StagePass:
    """The forward pass of a stage: the received tensors, and whether it has reached its first block.

    Places number the values in a block's call, arguments and keywords flattened. The stages on both sides of
    a cut call the same block with the same number of values. The earlier stage sends the values at some
    places, and the later one puts them at these places, where it has placeholders.
    """

    def __init__(self, placeholders: Placeholders | None = None) -> None:
        """``placeholders``: creates the placeholders, shared by the stages of a model; None: the whole model,
        or a stage that a program has built, without modules of other stages.
        """
        self.placeholders = Placeholders() if placeholders is None else placeholders
        self._has_remote = placeholders is not None
        self.runs, self.has_entered, self.trains, self.is_training = False, False, False, True
        self._is_judged = False
        # Parameters of other stages that belong to modules around the blocks, each with its placeholder.
        self.own_parameters: list[tuple[nn.Module, str, torch.Tensor]] = []
        self.device = torch.device("cpu")  # the device of the batch
        # The first block of another stage with an assumed output, and why it did not run on ``meta``.
        self.assumed: tuple[str, Exception] | None = None
        # Modules around the blocks, and containers in any module, by name: tensors in them are sent between
        # stages.
        self.holders: dict[str, nn.Module] = {}
        self.containers: dict[tuple[str, str], Any] = {}
        # The tensors in context variables when the pass began, by id.
        self._held_before: dict[int, torch.Tensor] = {}
        self._takes: StageInputs | None = None
        self._gives = StageInputs()
        self._received: Sequence[torch.Tensor] = ()
        self._draws: Draws | None = None
        self._in_blocks: AbstractContextManager[None] | None = None  # sets the random numbers in the blocks
        # By the id of a placeholder: the placeholder, kept so that its id stays valid, and the received
        # tensor.
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def set_training(self, is_training: bool) -> None:
        """Set whether the model trains: modules of other stages run on ``meta`` in the same mode."""
        self.is_training = is_training

    def note_assumed(self, name: str, error: Exception) -> None:
        """Note that the output of block ``name`` is taken for its input, because of ``error``."""
        self.assumed = self.assumed or (name, error)

    @property
    def shows(self) -> bool:
        """Whether modules and parameters of other stages are visible, as stand-ins and placeholders."""
        return self.runs or self._is_judged

    @contextmanager
    def judged(self) -> Iterator[None]:
        """Show the parameters of other stages to a criterion, which may sum over all weights."""
        self._is_judged = True
        try:
            with self._with_own_parameters():
                yield
        finally:
            self._is_judged = False

    def watched(self) -> AbstractContextManager[object]:
        """Return a context that detects writes to placeholders. It intercepts every operator, so it does
        nothing if there can be no placeholder.
        """
        return self.placeholders.watched() if self._has_remote else nullcontext()

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
        takes: StageInputs | None,
        batch: object,
        received: Sequence[torch.Tensor] = (),
        gives: StageInputs = StageInputs(),  # noqa: B008  # a tuple
        draws: Draws | None = None,
    ) -> Iterator[None]:
        """Run the stage on ``batch`` inside the block.

        Args:
            takes: where the first block gets the ``received`` tensors. None: run to the first block only,
                which raises FirstBlock.
            gives: which tensors the next stage gets.
            draws: the seeds of random numbers; None: random numbers as in one process.
        """
        self.placeholders.forget_writes()
        self._takes, self._received, self._gives = takes, received, gives
        self.has_entered, self.runs, self.trains = False, True, torch.is_grad_enabled()
        self.device, self._draws = device_of(batch) or self.device, draws
        self._held_before = {id(value): value for _, value in self._in_context()}
        around = nullcontext() if draws is None else drawn(draws.around, self.device)
        own_parameters = self._with_own_parameters() if self.own_parameters else nullcontext()
        try:
            with around, self.watched(), own_parameters:
                yield
        finally:
            self.leave_blocks()
            self._received, self.runs = (), False
            self._known.clear()
            self._held_before.clear()

    def replaced(self, name: str, values: Sequence[Any]) -> list[Any]:
        """Return the arguments for the block ``name``, with received tensors instead of placeholders."""
        if not self.has_entered:
            self._enter(name, values)
        known = self._known
        if not known:
            return list(values)
        return [known[id(value)][1] if id(value) in known else value for value in values]

    def takes_as_is(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return whether none of a block's arguments must be replaced or refused. Called for every block; for
        most blocks after the first the answer is True.
        """
        if not self.has_entered or self.placeholders.has_written:
            return False
        known = self._known
        for value in (*args, *kwargs.values()) if kwargs else args:
            kind = type(value)
            if not (kind is torch.Tensor and id(value) not in known) and kind not in _PLAIN_SET:
                return False
        return True

    def received_for(self, value: Any) -> Any:
        """Return the tensor received for the placeholder ``value``; any other value unchanged."""
        return self._known[id(value)][1] if id(value) in self._known else value

    def given(self, name: str, values: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """Return the tensors for the next stage: some of the ``values`` of the call of its first block
        ``name``, and some from attributes of the model.

        Raises:
            ConfigError: the next stage calls that block with another number of values, or a tensor to send is
                not on this stage.
        """
        if len(values) != self._gives.among:
            raise ConfigError(
                f"{name!r} is called with {len(values)} values on the stage before it, but with "
                f"{self._gives.among} on its own stage; let blocks return tensors and take them as "
                "arguments, or cut the model elsewhere (split=)"
            )
        given = [values[place] for place in self._gives.places]
        given += [self.received_for(self._held(name, path)) for path in self._gives.held]
        self._refuse_unknown_there(name, given)
        if any(map(self.placeholders.stands_for, given)):
            raise ConfigError(
                f"an argument of {name!r} of the next stage depends on a value that an earlier stage has and "
                "did not send: code in front of the blocks, or a weight there, is used after a block; only "
                "the arguments of one block after another pass from stage to stage; let the blocks pass it "
                "on, or train without pp"
            )
        return tuple(given)

    def _refuse_unknown_there(self, name: str, given: Sequence[torch.Tensor]) -> None:
        """Raise ConfigError if blocks have put more tensors into context variables than the next stage found
        when it ran them on ``meta``.
        """
        known = {id(each) for each in given}
        for path, value in self._in_context():
            if id(value) in self._held_before or {id(value), id(self.received_for(value))} & known:
                continue
            raise ConfigError(
                f"{worded(path)} holds a tensor where {name!r} of the next stage begins, but that stage does "
                "not know it: the work of a block depends on values, so it does not run on 'meta'; let "
                "blocks return the tensor and take it as an argument, or train without pp"
            )

    def _in_context(self) -> Iterator[tuple[Path, torch.Tensor]]:
        """Yield the tensors in context variables, at all their places."""
        for owner_and_key, value in containers_in_context().items():
            yield from tensor_paths(value, owner_and_key, set(), once=False)

    def _held(self, name: str, path: Path) -> torch.Tensor:
        value = look_up(self._holder(path), path)
        if not isinstance(value, torch.Tensor):
            raise ConfigError(
                f"{worded(path)} holds a tensor when the stage of {name!r} begins, but not after the blocks "
                "before it: stages must find there what one process would find; empty it at the beginning "
                "of the model's forward(), or let blocks return the tensors"
            )
        return value

    def _holder(self, path: Path) -> Any:
        owner, key = str(path[0]), str(path[1])
        if owner in self.holders:
            return self.holders[owner].__dict__
        containers = containers_in_context() if owner == CONTEXT else self.containers
        return {key: containers.get((owner, key))}

    def held(self) -> dict[Path, torch.Tensor]:
        """Return the placeholders in attributes of the model, and the tensors that the pass has put into
        context variables, by path.
        """
        found: dict[Path, torch.Tensor] = {}
        for path, value in self._in_attributes(once=True):
            if self.placeholders.stands_for(value):
                found[path] = value
        known = {id(value) for value in found.values()}
        for path, value in self._in_context():
            if id(value) not in self._held_before and id(value) not in known:
                known.add(id(value))
                found[path] = value
        return found

    def _in_attributes(self, *, once: bool) -> Iterator[tuple[Path, torch.Tensor]]:
        """Yield the tensors in attributes of the model, and in containers there."""
        seen: set[int] = set()
        roots = [(name, here.__dict__) for name, here in self.holders.items()]
        roots += [(owner, {key: value}) for (owner, key), value in self.containers.items()]
        for owner, attributes in roots:
            yield from tensor_paths(attributes, (owner,), seen, once=once)

    def _enter(self, name: str, values: Sequence[Any]) -> None:
        self.has_entered = True
        if self._takes is None:
            raise FirstBlock(name, values, self.held())
        inside = self._draws.inside if self._draws is not None else None
        stands = [values[place] for place in self._takes.places]
        stands += [self._held(name, path) for path in self._takes.held]
        for value, tensor in zip(stands, self._received, strict=True):
            self._known[id(value)] = (value, tensor)
            if self.trains:
                setattr(value, RECEIVED, Received(tensor, name, inside))
        for path, value in [*self._in_attributes(once=False), *self._in_context()]:
            if id(value) in self._known:
                put(self._holder(path), path, self._known[id(value)][1])
        if self._draws is not None:
            self._in_blocks = drawn(self._draws.inside, self.device)
            self._in_blocks.__enter__()

    def leave_blocks(self) -> None:
        """Leave the blocks: random numbers are those of the modules around them again."""
        in_blocks, self._in_blocks = self._in_blocks, None
        if in_blocks is not None:
            in_blocks.__exit__(None, None, None)

    def stands_for(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a placeholder for a tensor that another stage has."""
        return self.placeholders.like(tensor, self.device)

    def refuse_others(self, name: str) -> None:
        """Raise ConfigError if the model is called directly, instead of one of its stages."""
        if not self.runs:
            raise ConfigError(
                f"model(...) reached {name!r}, which is on another stage of the pipeline; call "
                "booster.execute_pipeline(data_iter, model, criterion, optimizer), which runs all stages "
                "(if you did call it: put checkpoint() around one block, not around several)"
            )


def device_of(values: object) -> torch.device | None:
    """Return the device of the first tensor that is not on ``meta``. A model may move its input to the device
    of a weight, which can be another stage's.
    """
    if isinstance(values, torch.Tensor):
        return None if values.is_meta else values.device
    if type(values) is dict:
        values = list(values.values())
    elif not isinstance(values, (list, tuple)):
        leaves = () if isinstance(values, PLAIN_KINDS) else tree_leaves(values)
        values = [value for value in leaves if isinstance(value, torch.Tensor)]
    for value in cast("Sequence[object]", values):
        found = device_of(value)
        if found is not None:
            return found
    return None
