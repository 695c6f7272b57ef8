"""torch's ``load_state_dict`` in two parts: what it would do, found out by the modules themselves, and doing
it.

Hooks run once, as in torch: those before a module is loaded, and ``_load_from_state_dict``, in the first
part, which writes no weight; those after it in the second.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from gemini.errors import ConfigError

Keep = Callable[[torch.Tensor], torch.Tensor]
IncompatibleKeys = nn.modules.module._IncompatibleKeys


@dataclass(frozen=True)
class Copy:
    """One value to be copied into a parameter or buffer of the model; ``read`` returns it."""

    target: torch.Tensor
    read: Callable[[], torch.Tensor]


@dataclass
class ModuleLoad:
    """What loading one module, without its parts, will do."""

    module: nn.Module
    copies: list[Copy] = field(default_factory=list)
    extra_states: list[Any] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    parts: list[ModuleLoad] = field(default_factory=list)

    def everything(self) -> Iterator[ModuleLoad]:
        """Yield this and all parts, in the order in which torch loads them."""
        yield self
        for part in self.parts:
            yield from part.everything()


class StateLoad:
    """A state dict on its way into a module.

    ``keep`` takes a tensor that a hook has made and returns one with the same values that may be kept until
    it is written. A mapping with a method ``outline(name)``, which returns a tensor on ``meta``, is read
    once: it is asked for that where only shapes are looked at.

    Raises:
        ConfigError: a value's shape is not that of its target, or it is no tensor. No weight was changed; nor
            was one where a hook raises.
        RuntimeError: a hook, or a module's own way of loading, found an error.
    """

    def __init__(self, module: nn.Module, state: Mapping[str, Any], keep: Keep) -> None:
        if not isinstance(state, Mapping):
            raise TypeError(
                f"load_state_dict takes a mapping of names to tensors, not {type(state).__name__}"
            )
        self._metadata: Mapping[str, Any] = getattr(state, "_metadata", None) or {}
        self._given = {_address(each) for each in state.values()} if isinstance(state, dict) else set()
        self._keep = keep
        self._missing: list[str] = []
        self._unexpected: list[str] = []
        self._errors: list[str] = []
        with _copying_in_place():
            self.root = self._visit(module, _own_copy(state), "")
        if self._errors:
            raise RuntimeError("load_state_dict: " + "\n\t".join(self._errors))

    @property
    def keys(self) -> Any:
        """What is missing and what is not expected, before any hook after loading has had a say."""
        return IncompatibleKeys(self._missing, self._unexpected)

    @property
    def has_post_hooks(self) -> bool:
        """Whether a hook after loading may still change :attr:`keys`."""
        return any(load.module._load_state_dict_post_hooks for load in self.root.everything())

    @property
    def targets(self) -> list[torch.Tensor]:
        """What will be written."""
        return [copy.target for load in self.root.everything() for copy in load.copies]

    def carry_out(self, write: Callable[[torch.Tensor, torch.Tensor], None]) -> Any:
        """Call ``write`` with each target and value, and the hooks that come after; return the keys that are
        missing or not expected then."""
        keys = IncompatibleKeys([], [])
        self._carry_out(self.root, write, keys)
        return keys if self.has_post_hooks else self.keys

    def _carry_out(
        self, load: ModuleLoad, write: Callable[[torch.Tensor, torch.Tensor], None], keys: Any
    ) -> None:
        for copy in load.copies:
            write(copy.target, copy.read())
        load.copies.clear()  # what a hook made is needed no more
        for state in load.extra_states:
            load.module.set_extra_state(state)
        keys.missing_keys.extend(load.missing)
        keys.unexpected_keys.extend(load.unexpected)
        for part in load.parts:
            self._carry_out(part, write, keys)
        for hook in load.module._load_state_dict_post_hooks.values():
            if hook(load.module, keys) is not None:
                raise AssertionError("a load_state_dict post-hook changes the keys in place and returns None")

    def _visit(self, module: nn.Module, state: Any, prefix: str) -> ModuleLoad:
        load = ModuleLoad(module)
        if isinstance(state, _LazyState):
            state.outlined = _loads_as_torch_does(module)
        num_missing, num_unexpected = len(self._missing), len(self._unexpected)
        errors: list[str] = []
        with _Recorder(module, state, prefix) as recorder, _extra_states_to(load):
            module._load_from_state_dict(
                state,
                prefix,
                dict(self._metadata.get(prefix[:-1], {})),
                True,
                self._missing,
                self._unexpected,
                errors,
            )
        if errors:
            _refuse_misfit(module, state, prefix)
        self._errors += errors
        load.missing = self._missing[num_missing:]
        load.unexpected = self._unexpected[num_unexpected:]
        for key, target, value in recorder.copies:
            is_outline = isinstance(state, _LazyState) and state.is_given(key)
            _refuse_kind(key, target, value, may_be_meta=is_outline)
        load.copies = [
            Copy(target, self._reader(state, key, value)) for key, target, value in recorder.copies
        ]
        recorder.copies.clear()
        for name, part in module._modules.items():
            if part is not None:
                load.parts.append(self._visit(part, _under(state, f"{prefix}{name}."), f"{prefix}{name}."))
        return load

    def _reader(self, state: Any, key: str, value: torch.Tensor) -> Callable[[], torch.Tensor]:
        if isinstance(state, _LazyState) and state.is_given(key):
            shape = value.shape
            return lambda: state.read(key).reshape(shape)
        address = _address(value)
        if address is not None and address not in self._given:
            value = self._keep(value)
        return lambda: value


class _Recorder(TorchFunctionMode):
    """Notes which values of ``state`` are copied into parameters and buffers of one module, in the place of
    copying them."""

    def __init__(self, module: nn.Module, state: Any, prefix: str) -> None:
        super().__init__()
        self.copies: list[tuple[str, torch.Tensor, torch.Tensor]] = []  # key, target, value
        self._module = module
        self._state = state
        self._prefix = prefix
        self._held: dict[torch.Tensor, list[str]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.copy_ and len(args) == 2 and not kwargs:
            target, value = args
            key = next((k for k in self._keys_of(target) if self._is_from_state(k, target, value)), None)
            if key is not None:
                self.copies.append((key, target, value))
                return target
        return func(*args, **(kwargs or {}))

    def _keys_of(self, target: torch.Tensor) -> list[str]:
        """Return the names of a tensor of the module: several where it is tied to itself."""
        if target not in self._held:  # a hook may have put in another
            self._held = {}
            for name, each in [*self._module._parameters.items(), *self._module._buffers.items()]:
                if each is not None:
                    self._held.setdefault(each, []).append(self._prefix + name)
        return self._held.get(target, [])

    def _is_from_state(self, key: str, target: torch.Tensor, value: torch.Tensor) -> bool:
        """Tell what torch copies from what a hook does, which may look at the result."""
        if key not in self._state or not isinstance(value, torch.Tensor) or target.shape != value.shape:
            return False
        if target.dim() == 0:  # it may come from a tensor of one element, and is another object then
            return True
        latest = self._state.latest(key) if isinstance(self._state, _LazyState) else self._state[key]
        return latest is value


class _LazyState(MutableMapping[str, Any]):
    """A mapping that hooks may change, over one whose values are read anew at each use."""

    def __init__(self, given: Mapping[str, Any], names: Mapping[str, Any]) -> None:
        """``names``: those that there are; the value of one is its own where it is not to be read."""
        self.outlined = False  # values are not looked at
        self._given = given
        self._outline = getattr(given, "outline", given.__getitem__)
        self._names = dict(names)
        self._latest: dict[str, weakref.ref[Any]] = {}

    def latest(self, key: str) -> Any:
        """Return what the last look at ``key`` found, None where nobody has it any more."""
        value = self._names[key]
        return self._latest[key]() if value is _READ and key in self._latest else value

    def is_given(self, key: str) -> bool:
        """Say whether the value is the one that is read."""
        return self._names.get(key) is _READ

    def __contains__(self, key: object) -> bool:
        return key in self._names  # of Mapping, this would read the value

    def read(self, key: str) -> Any:
        """Return a given value."""
        return self._given[key]

    def under(self, prefix: str) -> _LazyState:
        """Return one with the names that begin with ``prefix``."""
        return _LazyState(self._given, {k: v for k, v in self._names.items() if k.startswith(prefix)})

    def __getitem__(self, key: str) -> Any:
        value = self._names[key]
        if value is not _READ:
            return value
        value = self._outline(key) if self.outlined else self._given[key]
        if isinstance(value, torch.Tensor):
            self._latest[key] = weakref.ref(value)
        return value

    def __setitem__(self, key: str, value: Any) -> None:
        self._names[key] = value

    def __delitem__(self, key: str) -> None:
        del self._names[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


_READ = object()


def _own_copy(state: Mapping[str, Any]) -> Any:
    """Return what hooks may change in the place of ``state``."""
    if not isinstance(state, dict):
        return _LazyState(state, dict.fromkeys(state, _READ))
    copy: Any = OrderedDict(state)
    if hasattr(state, "_metadata"):
        copy._metadata = state._metadata
    return copy


def _loads_as_torch_does(module: nn.Module) -> bool:
    """Say whether nothing of the module's own sees the values of a state on their way to where they are
    copied."""
    own = "_load_from_state_dict" in vars(module)
    own = own or type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
    return not own and not module._load_state_dict_pre_hooks


def _under(state: Any, prefix: str) -> Any:
    if isinstance(state, _LazyState):
        return state.under(prefix)
    return {key: value for key, value in state.items() if key.startswith(prefix)}


def _address(value: Any) -> int | None:
    """Return what tells whether two tensors are parts of one memory; None: they have none of their own."""
    if type(value) not in (torch.Tensor, nn.Parameter) or value.layout is not torch.strided or value.is_meta:
        return None
    return int(value.untyped_storage().data_ptr())


@contextmanager
def _copying_in_place() -> Iterator[None]:
    """Have torch copy into parameters, not exchange them, for the block."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(False)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


@contextmanager
def _extra_states_to(load: ModuleLoad) -> Iterator[None]:
    """Note the extra state that the block sets, which may look at weights that are not there yet."""
    attributes = vars(load.module)
    before = attributes.get("set_extra_state")
    attributes["set_extra_state"] = load.extra_states.append
    try:
        yield
    finally:
        del attributes["set_extra_state"]
        if before is not None:
            attributes["set_extra_state"] = before


def _refuse_kind(key: str, target: torch.Tensor, value: torch.Tensor, *, may_be_meta: bool) -> None:
    """Raise ConfigError where torch cannot copy ``value``, of the right shape, to its parameter or buffer."""
    kind, way_out = "", "give its values: value.to_dense()"
    if value.layout is not target.layout:
        kind = str(value.layout).removeprefix("torch.")
    elif value.is_quantized and not target.is_quantized:
        kind, way_out = "quantized", "give its values: value.dequantize()"
    elif value.is_meta and not may_be_meta:
        kind, way_out = "on meta", "load the state from a file"
    if kind:
        raise ConfigError(f"{key!r} is {kind} in the state but an ordinary tensor in the model; {way_out}")


def _refuse_misfit(module: nn.Module, state: Mapping[str, Any], prefix: str) -> None:
    """Raise ConfigError where a value cannot be that of its parameter or buffer."""
    for places in (module._parameters, module._buffers):
        for name, target in places.items():
            key = prefix + name
            if target is None or key not in state:
                continue
            value = state[key]
            if not isinstance(value, torch.Tensor):
                raise ConfigError(
                    f"{key!r} is a {type(value).__name__} in the state but a tensor in the model"
                )
            if value.shape != target.shape:
                raise ConfigError(
                    f"{key!r} has shape {tuple(value.shape)} in the state but {tuple(target.shape)} in the "
                    "model"
                )
