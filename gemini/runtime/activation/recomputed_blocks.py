"""Blocks that recompute their activations in every backward pass, as named by a plan or a program.

:mod:`gemini.runtime.activation.recompute` chooses by itself which blocks of one process are worth it.
"""

from __future__ import annotations

import inspect
import operator
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gemini.errors import ConfigError
from gemini.runtime.activation.block_groups import BlockGroup, Names, flat_names
from gemini.runtime.activation.repeatable import CannotRepeat, Digest, digest_of, set_training, training_modes
from gemini.runtime.intercept.compiled import is_compiled

_COLLECTIONS = (list, dict, set)
_LARGEST_BYTES = 2**23  # larger tensors are assumed to be tables that forward only reads
_LEFT_OUT = frozenset(("_parameters", "_buffers", "_modules", "forward", "training"))
_ABSENT = object()


class Place(NamedTuple):
    """A buffer or an attribute of the ``part``-th module of a block."""

    part: int
    is_buffer: bool
    name: str


Places = frozenset[Place]


class _State:
    """The state of a block that may differ between calls: training modes, buffers, attributes, and the
    generators of Python and numpy. Lists, dicts and sets are copied, and buffers of up to 8 MiB.

    ``places``: the places to look at, as :meth:`changed` returns them; None: all.
    """

    def __init__(self, module: nn.Module, places: Places | None = None) -> None:
        self._module, self._parts = module, list(module.modules())
        self._training = training_modes(module)
        self._random = _random_states()
        looked_at = _all_places(self._parts) if places is None else places
        self.held = {place: _copied(self._holder(place).get(place.name, _ABSENT)) for place in looked_at}
        self._seen = {place: self._holder(place).get(place.name) for place in self.held if places is None}
        self._versions = {place: _version(value) for place, value in self._seen.items()}

    def changed(self) -> Places:
        """Return the places that have changed. If one buffer of a module changed, all of its buffers count:
        batch norm writes to its statistics, and only its counter shows the write."""
        found = {place for place, value in self.held.items() if self._differs(place, value)}
        parts = {place.part for place in found if place.is_buffer}
        found |= {place for place in self.held if place.is_buffer and place.part in parts}
        found |= {place for place in _all_places(self._parts) if place not in self.held}
        return frozenset(found)

    def keep_only(self, places: Places) -> None:
        """Keep only these places; places without a value are removed again in :meth:`put_back`."""
        self.held = {place: self.held.get(place, _ABSENT) for place in places}
        self._seen.clear()

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Restore the recorded state of the block for the ``with`` block, and the current state
        afterwards."""
        now = {place: self._holder(place).get(place.name, _ABSENT) for place in self.held}
        modes, states = training_modes(self._module), _random_states()
        # Copies, so that a second backward through the graph finds the same state.
        self._install({place: _copied(value) for place, value in self.held.items()}, self._training)
        _set_random_states(self._random)
        try:
            yield
        finally:
            self._install(now, modes)
            _set_random_states(states)

    def _install(self, values: dict[Place, Any], modes: list[bool]) -> None:
        for place, value in values.items():
            if value is _ABSENT:
                self._holder(place).pop(place.name, None)
            else:
                self._holder(place)[place.name] = value
        set_training(self._module, modes)

    def _holder(self, place: Place) -> dict[str, Any]:
        part = self._parts[place.part]
        return part._buffers if place.is_buffer else vars(part)

    def _differs(self, place: Place, value: Any) -> bool:
        now = self._holder(place).get(place.name, _ABSENT)
        if _is_small(value):
            is_same = now is self._seen[place] and _version(now) == self._versions[place]
            return not (is_same and torch.equal(value, now))
        if type(value) in _COLLECTIONS:
            return type(now) is not type(value) or len(now) != len(value) or not _same_members(value, now)
        return now is not value


class RecomputedBlock:
    """Replaces the ``forward`` of a module: backward runs it again with the same state and random numbers,
    and then restores the current state.

    The first call finds which attributes of the module change from call to call.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.__signature__ = inspect.signature(module.forward)
        self._module = weakref.ref(module)  # weak: the module holds this object
        self._changes: dict[tuple[bool, ...], Places] = {}  # by training modes of it and its submodules
        module.forward = self

    @property
    def module(self) -> nn.Module:
        """The module with this forward."""
        module = self._module()
        assert module is not None
        return module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward; if autograd saves for backward, save only the call's inputs.

        Raises:
            ConfigError: the module changes state that cannot be restored.
        """
        module = self.module
        forward = partial(type(module).forward, module)
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        modes = tuple(training_modes(module))
        is_known, has_run = modes in self._changes, False
        digest = None if is_known else _digest(module)
        before = _State(module, self._changes.get(modes))

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal has_run
            with before.put_back() if has_run else nullcontext():
                has_run = True
                return forward(*args, **kwargs)

        out = self._computed(run, args, kwargs)
        if not is_known:
            changes = before.changed()
            if not changes and digest is not None and _digest(module) != digest:
                raise ConfigError(
                    f"block {self.name!r} cannot be recomputed in backward: its forward pass changes "
                    "its attributes, and would change them twice; leave it out of recompute="
                )
            self._changes[modes] = changes
            before.keep_only(changes)
        return out

    def _computed(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the block's outputs, and register ``run`` to be called again in backward."""
        return checkpoint(run, *args, use_reentrant=False, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # Copies and pickles of the module have the forward of its class.
        return getattr, (self.module, "forward")


class GroupedBlock(RecomputedBlock):
    """A block of a group; the group keeps only the input of its first block."""

    def __init__(self, name: str, module: nn.Module, group: BlockGroup, member: int) -> None:
        self._group, self._member = group, member
        super().__init__(name, module)

    def _computed(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._group.forward(self._member, run, args, kwargs)


def recompute_layers(model: nn.Module) -> None:
    """Recompute the activations of every layer of a transformers model, by the model's own option, which has
    another name in newer releases. Raises ValueError if the model does not support it."""
    own: Any = model
    enable = getattr(own, "activation_checkpointing_enable", None) or own.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def recompute_blocks(model: nn.Module, names: Iterable[Names]) -> None:
    """Recompute the activations of the modules ``names`` of ``model`` in backward. A tuple of names is a
    group of blocks that run one after another, and may contain groups. A group keeps only the input of its
    first block.

    Disables the key caches of transformers models: a second run would add to them.

    Raises:
        ConfigError: as :func:`refuse_unfit_blocks`; nothing was changed.
    """
    names = tuple(names)
    refuse_unfit_blocks(model, names)
    for name in names:
        if isinstance(name, str):
            RecomputedBlock(name, model.get_submodule(name))
            continue
        group = BlockGroup(name)
        for member, each in enumerate(group.names):
            GroupedBlock(each, model.get_submodule(each), group, member)
    for module in model.modules() if names else ():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # type: ignore[union-attr]


def refuse_unfit_blocks(model: nn.Module, blocks: Iterable[Names]) -> None:
    """Raise ConfigError if a name in ``blocks`` is not a module of ``model`` that can be recomputed."""
    names, modules = flat_names(tuple(blocks)), dict(model.named_modules())
    for name in names:
        if name not in modules or not name:
            raise ConfigError(
                f"recompute names {name!r:.200}, but the model has no such block; use the names of "
                "model.named_modules()"
            )
        outer = next((each for each in names if name.startswith(f"{each}.")), None)
        if outer is not None or names.count(name) > 1:
            raise ConfigError(
                f"recompute names {name!r} {f'and {outer!r} around it' if outer else 'twice'}; name "
                "each recomputed block once"
            )
        module = modules[name]
        is_function = isinstance(inspect.getattr_static(type(module), "forward", None), types.FunctionType)
        if not is_function or type(module).forward is nn.Module.forward:
            raise ConfigError(f"recompute names {name!r}, but {type(module).__name__} has no forward()")
        if "forward" in vars(module) or isinstance(module, torch.jit.ScriptModule) or is_compiled(module):
            raise ConfigError(
                f"recompute names {name!r}, but its forward is already replaced (by torch.compile, a "
                "hook of another library, or recomputation); leave one of them out"
            )


def _digest(module: nn.Module) -> Digest | None:
    """Return the digest of a module's state besides parameters; None if it cannot be computed."""
    try:
        return digest_of(module)
    except CannotRepeat:
        return None


def _all_places(parts: Sequence[nn.Module]) -> Iterator[Place]:
    """Yield the places of a block's buffers and attributes. Parameters are left out, because updates change
    them."""
    for number, part in enumerate(parts):
        for name, value in part._buffers.items():
            if value is None or value.nbytes <= _LARGEST_BYTES:
                yield Place(number, True, name)
        for name in vars(part):
            if name not in _LEFT_OUT:
                yield Place(number, False, name)


def _copied(value: Any) -> Any:
    """Return a copy of ``value`` if it is a small tensor or a collection, else ``value`` itself."""
    if _is_small(value):
        return value.clone()
    return value.copy() if type(value) in _COLLECTIONS else value


def _is_small(value: Any) -> bool:
    """Say whether ``value`` is a plain tensor that is small enough to copy."""
    is_plain = type(value) is torch.Tensor and not value.requires_grad and not value.is_meta
    return is_plain and value.nbytes <= _LARGEST_BYTES


def _version(value: Any) -> int:
    """Return the version counter of a tensor, which most in-place operators raise; 0 for other values."""
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


def _same_members(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(other[key] is value for key, value in one.items())
    return one == other if isinstance(one, set) else all(map(operator.is_, one, other))


def _random_states() -> tuple[Any, Any]:
    """Return the states of Python's generator and, if loaded, numpy's; checkpoint() handles torch's."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def _set_random_states(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])
