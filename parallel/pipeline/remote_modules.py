"""Stand-ins for the modules of other stages, and the wrapper of a stage's own blocks."""

from __future__ import annotations

import copy
import inspect
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import is_dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.hooks import RemovableHandle

from gemini.errors import ConfigError
from gemini.parallel.pipeline.containers import (
    SharedContents,
    collections_in,
    containers_in_context,
    left_in,
    members_of,
    nested_in,
    plain_values,
    replace_tensors,
    restore_plain_values,
)
from gemini.parallel.pipeline.numbers import drawn
from gemini.parallel.pipeline.stage_pass import PLAIN_KINDS, RECEIVED, EndOfStage, StagePass, device_of
from gemini.runtime.intercept.mixed_dtypes import SingleDtype

_KEPT_ANSWERS = 64  # one per form of arguments
_FLAT = (torch.Tensor, *PLAIN_KINDS)
# The attributes of a module with the hooks around its forward pass.
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


class _StandIn:
    """A stand-in that isinstance() takes for an object of the represented class during a forward pass."""

    is_stand_in: ClassVar = True
    _taken_for: type
    _pass: StagePass

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class for isinstance(), besides the true one."""
        state = self.__dict__
        return state["_taken_for"] if "_taken_for" in state and state["_pass"].shows else type(self)


def meta_copy_of(model: nn.Module, types: Mapping[int, torch.dtype] | None = None) -> nn.Module:
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


class RemoteModule(_StandIn, nn.Module):
    """Stands in for ``meta_copy``, a module on ``meta``, and has its attributes. Its forward returns
    placeholders of the right shapes, and puts placeholders into the containers that the module would put
    tensors into. ``pairs`` are these containers, each with that of the meta copy.
    """

    def __init__(
        self, name: str, meta_copy: nn.Module, stage_pass: StagePass, pairs: Sequence[tuple[Any, Any]] = ()
    ) -> None:
        super().__init__()
        self._pairs = tuple(pairs)
        self._held = (meta_copy,)  # in a tuple, so that it is no submodule
        self._name, self._pass, self._taken_for = name, stage_pass, type(meta_copy)
        self._answers: dict[tuple[object, ...], Any] = {}
        self._inner: dict[
            str, tuple[RemoteModule]
        ] = {}  # by name, each in a tuple, so that they are no submodules

    @property
    def meta_copy(self) -> nn.Module:
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
        if self._pass.runs and inspect.ismethod(value) and value.__self__ is self._held[0]:
            return lambda *args, **kwargs: self._answer(args, kwargs, name)
        shared = next((here for here, there in self._pairs if there is value), None)
        if shared is not None:
            return shared
        return tree_map(self._placeholder, value) if _holds_tensors(value) else value

    def _placeholder(self, value: Any) -> Any:
        return self._pass.stands_for(value) if isinstance(value, torch.Tensor) else value

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

    def _inside(self, name: str, module: nn.Module) -> RemoteModule:
        if name not in self._inner:
            self._inner[name] = (RemoteModule(f"{self._name}.{name}", module, self._pass, self._pairs),)
        return self._inner[name][0]

    def stand_ins(self) -> Iterator[RemoteModule]:
        """Yield this stand-in and those for modules inside it."""
        yield self
        for (inner,) in self._inner.values():
            yield from inner.stand_ins()

    def hooks(self) -> list[Any]:
        """Return the hooks registered on this stand-in, by kind."""
        return [self.__dict__[kind] for kind in _HOOKS]

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        """Add the hooks that a forward pass has registered on stand-ins to the modules of the meta copy, for
        the block. A model that collects the outputs of its modules registers hooks in the first pass. Several
        stages share a meta copy, each with its own hooks.
        """
        changed: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for inner in self.stand_ins():
                if inner is self or not inner._has_hooks():
                    continue
                for kind, own in zip(_HOOKS, inner.hooks(), strict=True):
                    place = inner.meta_copy.__dict__
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
        if "_held" not in self.__dict__ or not self._pass.shows:
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
        self._pass.refuse_others(self._name)
        if self._pass.has_entered:
            raise ConfigError(
                f"{self._name!r} is on another stage, because it is assumed to run in the order of "
                "registration, but the model calls it after a block of this stage; where you split the "
                f"model, pass behind=[{self._name!r}] if it runs after all blocks, or "
                f"before=[{self._name!r}] if it runs before the blocks of its parent module"
            )
        return self._answer(args, kwargs)

    def _answer(self, args: tuple[Any, ...], kwargs: dict[str, Any], method: str = "") -> Any:
        """Return placeholders with the shapes of the module's output, or of the result of a ``method``."""
        stage_pass, meta_copy = self._pass, self._held[0]
        if meta_copy.training != stage_pass.is_training:
            for module in meta_copy.modules():
                module.training = stage_pass.is_training
        key = (method, meta_copy.training, _form(args), _form(kwargs) if kwargs else None, _collectors())
        device = device_of(args) or (device_of(kwargs) if kwargs else None) or stage_pass.device
        answer = self._answers.get(key)
        if answer is None:
            answer, is_same_each_time = self._run_meta_copy(args, kwargs, method, device)
            if is_same_each_time and not any(inner._has_hooks() for inner in self.stand_ins()):
                if len(self._answers) >= _KEPT_ANSWERS:
                    self._answers.clear()
                self._answers[key] = answer
        if isinstance(answer, torch.Tensor):
            return stage_pass.placeholders.like(answer, device)
        return tree_map(lambda value: _of(stage_pass, value, device), answer)

    @torch.no_grad()
    def runs_on_meta(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether the module runs on ``meta``: then other stages know what it leaves in containers."""
        there_args, there_kwargs = tree_map(_on_meta, (args, kwargs))
        shared = SharedContents([*self._pairs, *_pairs_in_context()], _on_meta)
        counters = plain_values([self._held[0]])
        try:
            self._run(self._held[0], there_args, there_kwargs)
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            return False
        finally:
            shared.begin_again()
            shared.apply_changes(lambda value: value, lambda value: None)
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
    def _run_meta_copy(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], method: str, device: torch.device
    ) -> tuple[Any, bool]:
        """Run the meta copy. Return its output on ``meta``, and whether that is its only effect: it may also
        put tensors into containers, and then placeholders are put there.
        """
        for value in tree_leaves((args, kwargs)):
            if is_dataclass(value) and not isinstance(value, type):
                kind = type(value).__name__
                raise ConfigError(
                    f"{self._name!r} is called with a {kind}, and stages cannot find the tensors in it; let "
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
            output = self._run(call, there_args, there_kwargs)
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            output = self._assume(args, kwargs, error)
        placeholders = self._pass.placeholders
        has_written = shared.apply_changes(lambda value: _of(self._pass, value, device), placeholders.mark)
        has_counted = plain_values([self._held[0]]) != counters
        return tree_map(_on_meta, output), not (has_written or has_counted)

    def _run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the meta copy. Operators that torch refuses for their dtypes run as on the own stage."""
        with self._hooked(), SingleDtype():
            return call(*args, **kwargs)

    def _assume(self, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Any:
        """Return a substitute for the output if the module does not run on ``meta``."""
        raise ConfigError(
            f"{self._name!r} belongs to another stage, and running it on 'meta' to find the shape of its "
            f"output failed ({type(error).__name__}: {error}); make it the first of the blocks (blocks=)"
        ) from error

    def extra_repr(self) -> str:
        """Return the class name, and that another stage has the module."""
        return f"{type(self._held[0]).__name__} of another stage"


class RemoteBlock(RemoteModule):
    """Stands in for a block."""

    def _assume(self, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Any:
        """Return the first argument. Blocks with a forward pass that depends on values (routing) rarely
        change its shape, and nothing is computed from it.
        """
        first = _first(self._held[0].forward, args, kwargs)
        if not isinstance(first, torch.Tensor):
            return super()._assume(args, kwargs, error)
        self._pass.note_assumed(self._name, error)
        return first


def _is_readable_later(index: int, before: Any, after: Any) -> bool:
    """Return whether later stages read a changed value correctly, or get an error.

    That is so if nothing changed, or if a block stores a number in its own attributes (``index`` -1), which
    are placeholders on other stages. A tensor that requires a gradient is not accepted: it is a loss for
    others to read. An int is a counter.
    """
    if before is after:
        return True
    are_tensors = isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)
    return index == -1 and (type(after) is int or (are_tensors and not after.requires_grad))


class LocalBlock(_StandIn, nn.Module):
    """Wraps a block of this stage and calls it with the received tensors. It is outside of the block, so
    recomputing the block in backward does not run it, unless the model calls checkpoint() around it. During a
    pass it shows the block's children as its own, and a hook registered on it goes to the block.
    """

    block: nn.Module

    def __init__(
        self,
        name: str,
        block: nn.Module,
        stage_pass: StagePass,
        *,
        is_last: bool,
        elsewhere: RemoteModule | None = None,
    ) -> None:
        """``is_last``: the block is the stage's last. ``elsewhere``: its stand-in on later stages."""
        super().__init__()
        self.__dict__["block"] = block
        self._name, self._pass, self._is_last, self._taken_for = name, stage_pass, is_last, type(block)
        self._elsewhere = (elsewhere,)  # in a tuple, so that it is no submodule
        self._is_known_elsewhere: dict[bool, bool] = {}  # by whether the block trains
        self._num_received: dict[int, int] = {}  # by the number of values in a call: how many were replaced

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
        if "block" in self.__dict__ and self._pass.shows:
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
        stage_pass = self._pass
        if not stage_pass.runs:
            return self._run_again(args, kwargs)
        if stage_pass.takes_as_is(args, kwargs):
            self._num_received[len(args) + len(kwargs)] = 0
        else:
            before = _leaves_of(args, kwargs)
            args, kwargs, values = _really(self._name, stage_pass, args, kwargs, before)
            self._num_received[len(values)] = [*map(operator.is_, values, before)].count(False)
        if stage_pass.trains and not torch.is_grad_enabled():
            self._refuse_without_gradients(_leaves_of(args, kwargs))
        placeholders = stage_pass.placeholders
        watched = placeholders.begin_block()
        try:
            if self._leaves_what_others_know(args, kwargs):
                output = self.block(*args, **kwargs)
            else:
                output = self._run_and_compare(args, kwargs)
        finally:
            placeholders.end_block(watched)
        if self._is_last:
            stage_pass.leave_blocks()
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
        changed = [name for name, pair in pairs.items() if not _is_readable_later(name[0], *pair)]
        if changed:
            raise ConfigError(
                f"{self._name!r} leaves something in {changed[0][1]} in its forward pass that later stages "
                "may read, but they cannot compute it: the block's work depends on values, so it does not "
                "run on 'meta'; let blocks return it and take it as an argument, or train without pp"
            )
        return output

    def _refuse_without_gradients(self, values: Sequence[Any]) -> None:
        if any(isinstance(each, torch.Tensor) and each.requires_grad for each in values) or any(
            param.requires_grad for param in self.block.parameters()
        ):
            raise ConfigError(
                f"{self._name!r} is trained in stages but runs without gradients, so earlier stages would "
                "get none from it: checkpoint(..., use_reentrant=True) or torch.no_grad() is around the "
                "block; set use_reentrant=False, or freeze the weights under torch.no_grad()"
            )

    def _run_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the block in backward, for a checkpoint() around it, with the tensors received in forward."""
        values, form = tree_flatten((args, kwargs))
        found = [getattr(value, RECEIVED, None) for value in values]
        received = [each for each in found if each is not None]
        if len(received) < self._num_received.get(len(values), 0):
            raise ConfigError(
                f"checkpoint() around {self._name!r} recomputes more in backward than the block, from "
                "tensors that another stage sent; pass it only the block and the block's arguments, "
                "checkpoint(block, x, use_reentrant=False)"
            )
        if received:
            values = [old if new is None else new.tensor for old, new in zip(values, found, strict=True)]
            args, kwargs = tree_unflatten(values, form)
        is_first = bool(received) and received[0].first == self._name and received[0].inside is not None
        with drawn(received[0].inside, self._pass.device) if is_first else nullcontext():
            return self.block(*args, **kwargs)


class NextStageBlock(RemoteModule):
    """Stands in for the first block of the next stage: the forward pass ends where it would be called."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise EndOfStage with the tensors for the next stage. Raises ConfigError as :class:`LocalBlock`."""
        self._pass.refuse_others(self._name)
        *_, values = _really(self._name, self._pass, args, kwargs, _leaves_of(args, kwargs))
        raise EndOfStage(self._pass.given(self._name, values))


def _really(
    name: str, stage_pass: StagePass, args: tuple[Any, ...], kwargs: dict[str, Any], values: Sequence[Any]
) -> tuple[tuple[Any, ...], dict[str, Any], list[Any]]:
    """Return the arguments of a block with received tensors instead of their placeholders: args, kwargs and
    flattened. ``values`` are the original arguments, flattened.

    Raises:
        ConfigError: another argument is a placeholder, which was not sent.
    """
    replaced = stage_pass.replaced(name, values)
    if not all(map(operator.is_, replaced, values)):
        args, kwargs = replace_tensors((args, kwargs), stage_pass.received_for)
    if any(map(stage_pass.placeholders.stands_for, replaced)):
        named = {f"argument {index}": value for index, value in enumerate(args)} | kwargs
        absent = stage_pass.placeholders.stands_for
        label = next(key for key, value in named.items() if any(map(absent, tree_leaves(value))))
        raise ConfigError(
            f"{name!r} is called with {label!r}, which code between the blocks computes from a value that "
            "only another stage has: only the arguments of one block after another pass from stage to "
            "stage, unchanged; cut the model elsewhere (split=), let the blocks compute it, or, if it uses "
            "a weight that runs before the blocks of its module, name that weight in before="
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


def _of(stage_pass: StagePass, value: Any, device: torch.device) -> Any:
    return stage_pass.placeholders.like(value, device) if isinstance(value, torch.Tensor) else value


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (
        isinstance(value, (list, dict, tuple))
        and any(isinstance(v, torch.Tensor) for v in tree_leaves(value))
    )


def _form(value: Any) -> object:
    """Return a cache key for arguments: calls with equal keys have outputs of equal shapes."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.device
    if isinstance(value, PLAIN_KINDS):
        return type(value), value
    if type(value) is dict:
        return dict, tuple(value), tuple(map(_form, value.values()))
    if type(value) in (list, tuple):
        return type(value), tuple(map(_form, value))
    values, form = tree_flatten(value)
    if len(values) == 1 and values[0] is value:
        return type(value).__name__
    return str(form), tuple(map(_form, values))
