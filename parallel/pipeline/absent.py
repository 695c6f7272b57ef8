"""Stand-ins for modules that another stage has, and the forward pass of a stage, in which they take part."""

from __future__ import annotations

import copy
import inspect
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import is_dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.hooks import RemovableHandle

from gemini.errors import ConfigError
from gemini.parallel.pipeline.containers import (
    CONTEXT,
    Path,
    SharedContents,
    collections_in,
    containers_in_context,
    left_in,
    look_up,
    members_of,
    nested_in,
    plain_values,
    put,
    replace_tensors,
    restore_plain_values,
    tensors_in,
    worded,
)
from gemini.parallel.pipeline.numbers import Draws, drawn
from gemini.parallel.pipeline.placeholders import Placeholders

ARRIVED = "_gemini_arrived"  # an attribute of placeholders


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


class Taken(NamedTuple):
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


class Arrived(NamedTuple):
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


class Passage:
    """The forward pass of a stage: the received tensors, and whether it has reached its first block.

    Places number the values in a block's call, arguments and keywords flattened. The stages on both sides of
    a cut call the same block with the same number of values. The earlier stage sends the values at some
    places, and the later one puts them at these places, where it has placeholders.
    """

    def __init__(self, placeholders: Placeholders | None = None) -> None:
        """``placeholders``: creates the placeholders, shared by the stages of a model; None: the whole model,
        or a stage that a program has built, without absent modules.
        """
        self.placeholders = Placeholders() if placeholders is None else placeholders
        self._has_absent = placeholders is not None
        self.runs, self.has_entered, self.trains, self.is_training = False, False, False, True
        self._is_judged = False
        # Parameters of other stages that belong to modules around the blocks, each with its placeholder.
        self.own_parameters: list[tuple[nn.Module, str, torch.Tensor]] = []
        self.device = torch.device("cpu")  # the device of the batch
        # Modules around the blocks, and containers in any module, by name: tensors in them are sent between
        # stages.
        self.holders: dict[str, nn.Module] = {}
        self.containers: dict[tuple[str, str], Any] = {}
        # The tensors in context variables when the pass began, by id.
        self._held_before: dict[int, torch.Tensor] = {}
        self._takes: Taken | None = None
        self._gives = Taken()
        self._received: Sequence[torch.Tensor] = ()
        self._draws: Draws | None = None
        self._in_blocks: AbstractContextManager[None] | None = None  # sets the random numbers in the blocks
        # By the id of a placeholder: the placeholder, kept so that its id stays valid, and the received
        # tensor.
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def set_training(self, is_training: bool) -> None:
        """Set whether the model trains: modules of other stages run on ``meta`` in the same mode."""
        self.is_training = is_training

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
        return self.placeholders.watched() if self._has_absent else nullcontext()

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
            if not (kind is torch.Tensor and id(value) not in known) and kind not in _PLAIN_KINDS:
                return False
        return True

    def arrived_for(self, value: Any) -> Any:
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
                f"{name!r} is called with {len(values)} values behind the blocks before it, and with "
                f"{self._gives.among} on the stage that has it: have blocks return tensors and take them as "
                "arguments, or cut the model elsewhere (split=)"
            )
        given = [values[place] for place in self._gives.places]
        given += [self.arrived_for(self._held(name, path)) for path in self._gives.held]
        self._refuse_unknown_there(name, given)
        if any(map(self.placeholders.stands_for, given)):
            raise ConfigError(
                f"what {name!r} of the next stage is called with is made of something that a stage before "
                "this one has, and has not sent: what runs in front of the blocks, or a weight there, is "
                "used behind a block (only what one block after another is called with goes from stage to "
                "stage); have the blocks pass it on, or train without pp"
            )
        return tuple(given)

    def _refuse_unknown_there(self, name: str, given: Sequence[torch.Tensor]) -> None:
        """Raise ConfigError if blocks have put more tensors into context variables than the next stage found
        when it ran them on ``meta``.
        """
        known = {id(each) for each in given}
        for path, value in self._in_context():
            if id(value) in self._held_before or {id(value), id(self.arrived_for(value))} & known:
                continue
            raise ConfigError(
                f"{worded(path)} holds a tensor where {name!r} of the next stage begins, and that stage does "
                "not know of it: a block decides on values, and does not run on 'meta'. Have blocks return "
                "it and take it as an argument, or train without pp"
            )

    def _in_context(self) -> Iterator[tuple[Path, torch.Tensor]]:
        """Yield the tensors in context variables, at all their places."""
        for owner_and_key, value in containers_in_context().items():
            yield from tensors_in(value, owner_and_key, set(), once=False)

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
            yield from tensors_in(attributes, (owner,), seen, once=once)

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
                setattr(value, ARRIVED, Arrived(tensor, name, inside))
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
                f"model(...) gets to {name!r}, which another stage of the pipeline has; call "
                "booster.execute_pipeline(data_iter, model, criterion, optimizer), which runs all of them "
                "(where that was called: checkpoint() goes around one block, not around several)"
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
        leaves = () if isinstance(values, _LEAVES) else tree_leaves(values)
        values = [value for value in leaves if isinstance(value, torch.Tensor)]
    for value in cast("Sequence[object]", values):
        found = device_of(value)
        if found is not None:
            return found
    return None


_KEPT_ANSWERS = 64  # one per form of arguments
_LEAVES = (bool, int, float, str, type(None))  # plain values among arguments
_PLAIN_KINDS = frozenset(_LEAVES)
_FLAT = (torch.Tensor, *_LEAVES)
# The attributes of a module with the hooks around its forward pass.
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


class _OfKind:
    """A stand-in that isinstance() takes for an object of the represented class during a forward pass."""

    _taken_for: type
    _passage: Passage

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class for isinstance(), besides the true one."""
        state = self.__dict__
        return state["_taken_for"] if "_taken_for" in state and state["_passage"].shows else type(self)


def outline_of(model: nn.Module, types: Mapping[int, torch.dtype] | None = None) -> nn.Module:
    """Return a copy of ``model`` on ``meta``, which takes no memory. ``types``: the dtypes in which its
    parameters will compute, by their ids.
    """
    memo: dict[int, Any] = {}
    for param in model.parameters():
        dtype = (types or {}).get(id(param), param.dtype) if param.is_floating_point() else param.dtype
        values = torch.empty_like(param, dtype=dtype, device="meta", requires_grad=False)
        memo[id(param)] = nn.Parameter(values, requires_grad=False)
    memo.update((id(buffer), torch.empty_like(buffer, device="meta")) for buffer in model.buffers())
    return copy.deepcopy(model, memo)


def _pairs_in_context() -> list[tuple[Any, Any]]:
    """Return the containers in context variables as pairs: each is its own copy."""
    return [(each, each) for value in containers_in_context().values() for each in nested_in(value)]


def _collectors() -> str:
    """Return a key of the containers in context variables: it differs if passes collect other values."""
    held = containers_in_context().items()
    found = [(name, list(value) if isinstance(value, dict) else None) for (_, name), value in held]
    return str(sorted(found, key=str)) if found else ""


def _keep_own(name: str) -> Callable[[Any, Any], None]:
    def keep(module: nn.Module, value: Any) -> None:
        module.__dict__[f"own{name}"] = value

    return keep


class Absent(_OfKind, nn.Module):
    """Stands in for ``outline``, a module on ``meta``, and has its attributes. Its forward returns
    placeholders of the right shapes, and puts placeholders into the containers that the module would put
    tensors into. ``pairs`` are these containers, each with that of the outline.
    """

    def __init__(
        self, name: str, outline: nn.Module, passage: Passage, pairs: Sequence[tuple[Any, Any]] = ()
    ) -> None:
        super().__init__()
        self._pairs = tuple(pairs)
        self._held = (outline,)  # in a tuple, so that it is no submodule
        self._name, self._passage, self._taken_for = name, passage, type(outline)
        self._answers: dict[tuple[object, ...], Any] = {}
        self._inner: dict[str, tuple[Absent]] = {}  # by name, each in a tuple, so that they are no submodules

    @property
    def outline(self) -> nn.Module:
        """The module on ``meta``."""
        return self._held[0]

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module: a stand-in for a module, and placeholders for tensors."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_held" not in self.__dict__:
                raise
        value = getattr(self._held[0], name)
        if isinstance(value, nn.Module):
            return self._inside(name, value)
        if self._passage.runs and inspect.ismethod(value) and value.__self__ is self._held[0]:
            return lambda *args, **kwargs: self._answer(args, kwargs, name)
        shared = next((here for here, there in self._pairs if there is value), None)
        if shared is not None:
            return shared
        return tree_map(self._placeholder, value) if _holds_tensors(value) else value

    def _placeholder(self, value: Any) -> Any:
        return self._passage.stands_for(value) if isinstance(value, torch.Tensor) else value

    def __getitem__(self, key: Any) -> Any:
        """Return the stand-in for a member of a list or dict of modules."""
        held: Any = self._held[0]
        return self._inside(str(key), held[key])

    def __iter__(self) -> Iterator[Any]:
        """Yield the stand-ins for the members of a list of modules, or the keys of a dict."""
        held: Any = self._held[0]
        for index, value in enumerate(held):
            yield self._inside(str(index), value) if isinstance(value, nn.Module) else value

    def __len__(self) -> int:
        """Return the number of members of a list or dict of modules."""
        held: Any = self._held[0]
        return len(held)

    def __bool__(self) -> bool:
        """The truth value of the module."""
        return bool(self._held[0])

    def _inside(self, name: str, module: nn.Module) -> Absent:
        if name not in self._inner:
            self._inner[name] = (Absent(f"{self._name}.{name}", module, self._passage, self._pairs),)
        return self._inner[name][0]

    def stand_ins(self) -> Iterator[Absent]:
        """Yield this stand-in and those for modules inside it."""
        yield self
        for (inner,) in self._inner.values():
            yield from inner.stand_ins()

    def hooks(self) -> list[Any]:
        """Return the hooks registered on this stand-in, by kind."""
        return [self.__dict__[kind] for kind in _HOOKS]

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        """Add the hooks that a forward pass has registered on stand-ins to the modules of the outline, for
        the block. A model that collects the outputs of its modules registers hooks in the first pass. Several
        stages share an outline, each with its own hooks.
        """
        changed: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for inner in self.stand_ins():
                if inner is self or not inner._has_hooks():
                    continue
                for kind, own in zip(_HOOKS, inner.hooks(), strict=True):
                    place = inner.outline.__dict__
                    changed.append((place, kind, place[kind]))
                    place[kind] = OrderedDict({**place[kind], **own})
            yield
        finally:
            for place, kind, before in changed:
                place[kind] = before

    def _has_hooks(self) -> bool:
        return any(self.hooks())

    def _shown(self, name: str) -> dict[str, Any]:
        """Return the stand-ins for the module's own modules, parameters or buffers during a forward pass and
        a criterion, which may sum over all weights; nothing at other times.
        """
        found: dict[str, Any] = {}
        if "_held" not in self.__dict__ or not self._passage.shows:
            own: dict[str, Any] = self.__dict__.get(f"own{name}", found)
            return own
        for key, value in getattr(self._held[0], name).items():
            is_module = isinstance(value, nn.Module)
            found[key] = self._inside(key, value) if is_module else self._placeholder(value)
        return found

    # These are read by torch's modules() and parameters().
    _modules = property(partial(_shown, name="_modules"), _keep_own("_modules"))
    _parameters = property(partial(_shown, name="_parameters"), _keep_own("_parameters"))
    _buffers = property(partial(_shown, name="_buffers"), _keep_own("_buffers"))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return placeholders with the shapes of the module's output.

        Raises:
            ConfigError: the module runs behind a block, but was assumed to run before it.
        """
        self._passage.refuse_others(self._name)
        if self._passage.has_entered:
            raise ConfigError(
                f"{self._name!r} is on another stage, for it counts as running where it is registered, and "
                f"it is called behind a block of this one; where the model is split, say "
                f"behind=[{self._name!r}] if it runs behind all blocks, before=[{self._name!r}] if before "
                "those of the module that it is in"
            )
        return self._answer(args, kwargs)

    def _answer(self, args: tuple[Any, ...], kwargs: dict[str, Any], method: str = "") -> Any:
        """Return placeholders with the shapes of the module's output, or of the result of a ``method``."""
        passage, outline = self._passage, self._held[0]
        if outline.training != passage.is_training:
            for module in outline.modules():
                module.training = passage.is_training
        key = (method, outline.training, _form(args), _form(kwargs) if kwargs else None, _collectors())
        device = device_of(args) or (device_of(kwargs) if kwargs else None) or passage.device
        answer = self._answers.get(key)
        if answer is None:
            answer, is_same_each_time = self._run_outline(args, kwargs, method, device)
            if is_same_each_time and not any(inner._has_hooks() for inner in self.stand_ins()):
                if len(self._answers) >= _KEPT_ANSWERS:
                    self._answers.clear()
                self._answers[key] = answer
        if isinstance(answer, torch.Tensor):
            return passage.placeholders.like(answer, device)
        return tree_map(lambda value: _of(passage, value, device), answer)

    @torch.no_grad()
    def runs_on_meta(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether the module runs on ``meta``: then other stages know what it leaves in containers."""
        there_args, there_kwargs = tree_map(_on_meta, (args, kwargs))
        shared = SharedContents([*self._pairs, *_pairs_in_context()], _on_meta)
        counters = plain_values([self._held[0]])
        try:
            self._run(self._held[0], there_args, there_kwargs, shared)
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            return False
        finally:
            shared.begin_again()
            shared.take_over(lambda value: value, lambda value: None)
            restore_plain_values([self._held[0]], counters)
        return True

    def left(self, module: nn.Module) -> dict[tuple[int, str], Any]:
        """Return the values that ``module``, which this represents, has left in attributes and containers."""
        found = {
            (-1, f"its attribute {f'{name}.{key}'.lstrip('.')!r}"): value
            for name, inner in module.named_modules()
            for key, value in left_in(inner)
        }
        for index, (here, _) in enumerate(self._pairs):
            kind = type(here).__name__
            members = members_of(here).items()
            found |= {(index, f"a {kind} of the model, at {key!r}"): value for key, value in members}
        for index, (here, _) in enumerate(_pairs_in_context()):
            for key, value in members_of(here).items():
                if not isinstance(value, torch.Tensor):  # tensors are compared where the stage ends
                    found[len(self._pairs) + index, f"a context variable, at {key!r}"] = value
        return found

    @torch.no_grad()
    def _run_outline(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], method: str, device: torch.device
    ) -> tuple[Any, bool]:
        """Run the outline. Return its output on ``meta``, and whether that is its only effect: it may also
        put tensors into containers, and then placeholders are put there.
        """
        for value in tree_leaves((args, kwargs)):
            if is_dataclass(value) and not isinstance(value, type):
                kind = type(value).__name__
                raise ConfigError(
                    f"{self._name!r} is called with a {kind}, in which stages do not see tensors: have "
                    "blocks take and return tensors, or lists, tuples and dicts of them, or call "
                    f"torch.utils._pytree.register_dataclass({kind}) before the model is boosted"
                )
        there_args, there_kwargs = tree_map(_on_meta, (args, kwargs))
        given = zip(collections_in((args, kwargs)), collections_in((there_args, there_kwargs)), strict=True)
        shared = SharedContents([*self._pairs, *_pairs_in_context(), *given], _on_meta)
        shared.note(tree_leaves((args, kwargs)), tree_leaves((there_args, there_kwargs)))
        call = getattr(self._held[0], method) if method else self._held[0]
        counters = plain_values([self._held[0]])
        try:
            output = self._run(call, there_args, there_kwargs, shared)
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            output = self._assume(args, kwargs, error)
        placeholders = self._passage.placeholders
        has_written = shared.take_over(lambda value: _of(self._passage, value, device), placeholders.mark)
        has_counted = plain_values([self._held[0]]) != counters
        return tree_map(_on_meta, output), not (has_written or has_counted)

    def _run(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], shared: SharedContents
    ) -> Any:
        """Run the outline. If its parameters have another dtype, retry with inputs cast to it."""
        with self._hooked():
            try:
                return call(*args, **kwargs)
            except RuntimeError:
                dtype = next((p.dtype for p in self._held[0].parameters() if p.is_floating_point()), None)
                if dtype is None:
                    raise
                shared.begin_again()
                args, kwargs = replace_tensors((args, kwargs), lambda value: _cast(value, dtype))
                return call(*args, **kwargs)

    def _assume(self, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Any:
        """Return a substitute for the output if the module does not run on ``meta``."""
        raise ConfigError(
            f"{self._name!r} is of another stage, and what shape it returns cannot be found by running it on "
            f"'meta' ({type(error).__name__}: {error}); make it the first of the blocks (blocks=)"
        ) from error

    def extra_repr(self) -> str:
        """Return the class name, and that another stage has the module."""
        return f"{type(self._held[0]).__name__} of another stage"


class AbsentBlock(Absent):
    """Stands in for a block."""

    def _assume(self, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Any:
        """Return the first argument. Blocks with a forward pass that depends on values (routing) rarely
        change its shape, and nothing is computed from it.
        """
        first = _first(self._held[0].forward, args, kwargs)
        return first if isinstance(first, torch.Tensor) else super()._assume(args, kwargs, error)


def _is_told_when_read(index: int, before: Any, after: Any) -> bool:
    """Return whether later stages read a changed value correctly, or get an error.

    That is so if nothing changed, or if a block stores a number in its own attributes (``index`` -1), which
    are placeholders on other stages. A tensor that requires a gradient is not accepted: it is a loss for
    others to read. An int is a counter.
    """
    if before is after:
        return True
    are_tensors = isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)
    return index == -1 and (type(after) is int or (are_tensors and not after.requires_grad))


class Present(_OfKind, nn.Module):
    """Wraps a block of this stage and calls it with the received tensors. It is outside of the block, so
    recomputing the block in backward does not run it, unless the model calls checkpoint() around it. During a
    pass it shows the block's children as its own, and a hook registered on it goes to the block.
    """

    block: nn.Module

    def __init__(
        self, name: str, block: nn.Module, passage: Passage, *, is_last: bool, elsewhere: Absent | None = None
    ) -> None:
        """``is_last``: the block is the stage's last. ``elsewhere``: its stand-in on later stages."""
        super().__init__()
        self.__dict__["block"] = block
        self._name, self._passage, self._is_last, self._taken_for = name, passage, is_last, type(block)
        self._elsewhere = (elsewhere,)  # in a tuple, so that it is no submodule
        self._is_known_elsewhere: dict[bool, bool] = {}  # by whether the block trains
        self._arrived: dict[int, int] = {}  # by the number of values in a call: how many were replaced

    def __getattr__(self, name: str) -> Any:
        """Look up an attribute of the block."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "block" not in self.__dict__:
                raise
        return getattr(self.block, name)

    def _shown(self, name: str) -> dict[str, Any]:
        """Return the block as the only submodule; during a pass, the block's own members."""
        if "block" in self.__dict__ and self._passage.shows:
            return dict(getattr(self.block, name))
        return {"block": self.block} if name == "_modules" and "block" in self.__dict__ else {}

    # These are read by torch's modules() and parameters().
    _modules = property(partial(_shown, name="_modules"), _keep_own("_modules"))
    _parameters = property(partial(_shown, name="_parameters"), _keep_own("_parameters"))
    _buffers = property(partial(_shown, name="_buffers"), _keep_own("_buffers"))

    def register_forward_hook(self, *args: Any, **options: Any) -> RemovableHandle:
        """Register a hook on the block, which is called with the received tensors."""
        return self.block.register_forward_hook(*args, **options)

    def register_forward_pre_hook(self, *args: Any, **options: Any) -> RemovableHandle:
        """See :meth:`register_forward_hook`."""
        return self.block.register_forward_pre_hook(*args, **options)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block.

        Raises:
            ConfigError: an argument is on no stage before this one, or earlier stages would get no gradient
                of the tensors that they sent.
        """
        passage = self._passage
        if not passage.runs:
            return self._run_again(args, kwargs)
        if passage.takes_as_is(args, kwargs):
            self._arrived[len(args) + len(kwargs)] = 0
        else:
            before = _leaves_of(args, kwargs)
            args, kwargs, values = _really(self._name, passage, args, kwargs, before)
            self._arrived[len(values)] = [*map(operator.is_, values, before)].count(False)
        if passage.trains and not torch.is_grad_enabled():
            self._refuse_without_gradients(_leaves_of(args, kwargs))
        placeholders = passage.placeholders
        watched = placeholders.begin_block()
        try:
            if self._leaves_what_others_know(args, kwargs):
                output = self.block(*args, **kwargs)
            else:
                output = self._run_and_compare(args, kwargs)
        finally:
            placeholders.end_block(watched)
        if self._is_last:
            passage.leave_blocks()
        return output

    def _leaves_what_others_know(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        elsewhere, training = self._elsewhere[0], self.block.training
        if elsewhere is None:
            return True
        if training not in self._is_known_elsewhere:
            self._is_known_elsewhere[training] = elsewhere.runs_on_meta(args, kwargs)
        return self._is_known_elsewhere[training]

    def _run_and_compare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block that does not run on ``meta``; it must leave nothing but its output."""
        elsewhere = self._elsewhere[0]
        assert elsewhere is not None
        before = elsewhere.left(self.block)
        output = self.block(*args, **kwargs)
        after = elsewhere.left(self.block)
        pairs = {name: (before.get(name), after.get(name)) for name in {**before, **after}}
        changed = [name for name, pair in pairs.items() if not _is_told_when_read(name[0], *pair)]
        if changed:
            raise ConfigError(
                f"{self._name!r} leaves something in {changed[0][1]} in its forward pass, which stages "
                "behind this one may read, and they cannot find what it is: the block decides on values, and "
                "does not run on 'meta'. Have blocks return it and take it as an argument, or train without "
                "pp"
            )
        return output

    def _refuse_without_gradients(self, values: Sequence[Any]) -> None:
        if any(isinstance(each, torch.Tensor) and each.requires_grad for each in values) or any(
            param.requires_grad for param in self.block.parameters()
        ):
            raise ConfigError(
                f"{self._name!r} is trained in stages and runs without gradients: of "
                "checkpoint(..., use_reentrant=True) around a block the stages before would get none; set "
                "use_reentrant=False, or freeze what torch.no_grad() is around"
            )

    def _run_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the block in backward, for a checkpoint() around it, with the tensors received in forward."""
        values, form = tree_flatten((args, kwargs))
        found = [getattr(value, ARRIVED, None) for value in values]
        arrived = [each for each in found if each is not None]
        if len(arrived) < self._arrived.get(len(values), 0):
            raise ConfigError(
                f"checkpoint() around {self._name!r} computes more than the block in backward, of what "
                "another stage has sent: call it with the block and what that takes, "
                "checkpoint(block, x, use_reentrant=False)"
            )
        if arrived:
            values = [old if new is None else new.tensor for old, new in zip(values, found, strict=True)]
            args, kwargs = tree_unflatten(values, form)
        is_first = bool(arrived) and arrived[0].first == self._name and arrived[0].inside is not None
        with drawn(arrived[0].inside, self._passage.device) if is_first else nullcontext():
            return self.block(*args, **kwargs)


class Exit(Absent):
    """Stands in for the first block of the next stage: the forward pass ends where it would be called."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise EndOfStage with the tensors for the next stage. Raises ConfigError as :class:`Present`."""
        self._passage.refuse_others(self._name)
        *_, values = _really(self._name, self._passage, args, kwargs, _leaves_of(args, kwargs))
        raise EndOfStage(self._passage.given(self._name, values))


def _really(
    name: str, passage: Passage, args: tuple[Any, ...], kwargs: dict[str, Any], values: Sequence[Any]
) -> tuple[tuple[Any, ...], dict[str, Any], list[Any]]:
    """Return the arguments of a block with received tensors instead of their placeholders: args, kwargs and
    flattened. ``values`` are the original arguments, flattened.

    Raises:
        ConfigError: another argument is a placeholder, which was not sent.
    """
    replaced = passage.replaced(name, values)
    if not all(map(operator.is_, replaced, values)):
        args, kwargs = replace_tensors((args, kwargs), passage.arrived_for)
    if any(map(passage.placeholders.stands_for, replaced)):
        named = {f"argument {index}": value for index, value in enumerate(args)} | kwargs
        absent = passage.placeholders.stands_for
        label = next(key for key, value in named.items() if any(map(absent, tree_leaves(value))))
        raise ConfigError(
            f"{name!r} is called with {label!r}, which what comes between the blocks makes of something that "
            "another stage has (only what one block after another is called with goes from stage to stage, "
            "as it is); cut the model elsewhere (split=), have the blocks do that themselves or, where it is "
            "a weight that is used before the blocks of its module, name that in before="
        )
    return args, kwargs, replaced


def _leaves_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments of a call flattened, in the order of pytree; fast if they are flat."""
    values = [*args, *kwargs.values()]
    for value in values:
        if not isinstance(value, _FLAT):
            return tree_leaves((args, kwargs))
    return values


def _first(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the first argument of a call, positional or keyword."""
    return args[0] if args else kwargs.get(_first_name(forward))


def _first_name(forward: Callable[..., Any]) -> str:
    return next(iter(inspect.signature(forward).parameters), "")


def _on_meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or (value.is_meta and type(value) is torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _of(passage: Passage, value: Any, device: torch.device) -> Any:
    return passage.placeholders.like(value, device) if isinstance(value, torch.Tensor) else value


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (
        isinstance(value, (list, dict, tuple))
        and any(isinstance(v, torch.Tensor) for v in tree_leaves(value))
    )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _form(value: Any) -> object:
    """Return a cache key for arguments: calls with equal keys have outputs of equal shapes."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.device
    if isinstance(value, _LEAVES):
        return type(value), value
    if type(value) is dict:
        return dict, tuple(value), tuple(map(_form, value.values()))
    if type(value) in (list, tuple):
        return type(value), tuple(map(_form, value))
    values, form = tree_flatten(value)
    if len(values) == 1 and values[0] is value:
        return type(value).__name__
    return str(form), tuple(map(_form, values))
