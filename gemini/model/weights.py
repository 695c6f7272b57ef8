"""A managed model's weights as an ordinary state dict, and loading one.

A load has two phases. The first runs torch's own ``_load_from_state_dict`` of every module but only records
the copies. The second performs the copies. Hooks run once, as in torch: hooks before a module is loaded run
in the first phase, which writes no weight; hooks after it run in the second.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.overrides import TorchFunctionMode

from gemini.errors import ConfigError, StateError
from gemini.model.handle import ManagedModel
from gemini.offload.mapped_tensors import IN_MEMORY, MappedTensors, Place
from gemini.runtime import GeminiManager, ManagedParameter
from gemini.runtime.adopt import read_quantized, read_values, write_quantized, write_values
from gemini.runtime.intercept.quantized_operators import QuantizedParameter
from gemini.runtime.intercept.tensors import ManagedTensor, plain_copy
from gemini.runtime.storage.model_storage import ManagedSlot, slot_of
from gemini.system.config import parse_bytes
from gemini.system.process import paused_collector

Keep = Callable[[torch.Tensor], torch.Tensor]
IncompatibleKeys = nn.modules.module._IncompatibleKeys


@dataclass(frozen=True)
class Copy:
    """A value to copy into a parameter or buffer of the model; ``read`` returns it."""

    target: torch.Tensor
    read: Callable[[], torch.Tensor]


@dataclass
class ModuleLoad:
    """The planned load of one module; ``parts`` are the loads of its submodules."""

    module: nn.Module
    copies: list[Copy] = field(default_factory=list)
    extra_states: list[Any] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    parts: list[ModuleLoad] = field(default_factory=list)

    def everything(self) -> Iterator[ModuleLoad]:
        """Yield this load and those of all submodules, in the order in which torch loads them."""
        yield self
        for part in self.parts:
            yield from part.everything()


class StateLoad:
    """A load of a state dict into a module: planned on construction, performed by :meth:`carry_out`.

    ``keep`` takes a tensor that a hook created and returns one with the same values that may be kept until it
    is written. Values of a mapping that is not a dict are read again at each access. If the mapping has a
    method ``outline(name)``, which returns a tensor on ``meta``, that is called where only shapes are needed;
    each value is then read once, when it is written.

    Raises:
        ConfigError: a value is not a tensor or has another shape than its target. No weight was changed; the
            same holds if a hook raises.
        RuntimeError: a hook, or a module's own ``_load_from_state_dict``, reported an error.
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
        """The missing and unexpected keys, before hooks that run after loading."""
        return IncompatibleKeys(self._missing, self._unexpected)

    @property
    def has_post_hooks(self) -> bool:
        """Whether a hook that runs after loading may change :attr:`keys`."""
        return any(load.module._load_state_dict_post_hooks for load in self.root.everything())

    @property
    def targets(self) -> list[torch.Tensor]:
        """The tensors that will be written."""
        return [copy.target for load in self.root.everything() for copy in load.copies]

    def carry_out(self, write: Callable[[torch.Tensor, torch.Tensor], None]) -> Any:
        """Call ``write`` with each target and value, and then the post-hooks; return the missing and
        unexpected keys that remain."""
        keys = IncompatibleKeys([], [])
        self._carry_out(self.root, write, keys)
        return keys if self.has_post_hooks else self.keys

    def _carry_out(
        self, load: ModuleLoad, write: Callable[[torch.Tensor, torch.Tensor], None], keys: Any
    ) -> None:
        for copy in load.copies:
            write(copy.target, copy.read())
        load.copies.clear()  # frees the tensors that hooks created
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
    """Records the copies from ``state`` into parameters and buffers of one module instead of performing
    them."""

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
        """Return the names of a tensor of the module: several if it is tied."""
        if target not in self._held:  # a hook may have replaced a tensor
            self._held = {}
            for name, each in [*self._module._parameters.items(), *self._module._buffers.items()]:
                if each is not None:
                    self._held.setdefault(each, []).append(self._prefix + name)
        return self._held.get(target, [])

    def _is_from_state(self, key: str, target: torch.Tensor, value: torch.Tensor) -> bool:
        """Distinguish torch's copy of a state value from a copy by a hook, which may read the result."""
        if key not in self._state or not isinstance(value, torch.Tensor) or target.shape != value.shape:
            return False
        if target.dim() == 0:  # torch reshapes a one-element value, so it is another object
            return True
        latest = self._state.latest(key) if isinstance(self._state, _LazyState) else self._state[key]
        return latest is value


class _LazyState(MutableMapping[str, Any]):
    """A mapping that hooks may change, over a mapping with values that are read again at each access."""

    def __init__(self, given: Mapping[str, Any], names: Mapping[str, Any]) -> None:
        """``names``: the value of each name, or _READ if it is read from ``given``."""
        self.outlined = False  # return outlines instead of values
        self._given = given
        self._outline = getattr(given, "outline", given.__getitem__)
        self._names = dict(names)
        self._latest: dict[str, weakref.ref[Any]] = {}

    def latest(self, key: str) -> Any:
        """Return the value that the last access to ``key`` returned; None if it was freed."""
        value = self._names[key]
        return self._latest[key]() if value is _READ and key in self._latest else value

    def is_given(self, key: str) -> bool:
        """Say whether ``key`` still has its original value, which is read from the mapping."""
        return self._names.get(key) is _READ

    def __contains__(self, key: object) -> bool:
        return key in self._names  # Mapping's own would read the value

    def read(self, key: str) -> Any:
        """Read an original value."""
        return self._given[key]

    def under(self, prefix: str) -> _LazyState:
        """Return a _LazyState of the names that begin with ``prefix``."""
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
    """Return a copy of ``state`` that hooks may change."""
    if not isinstance(state, dict):
        return _LazyState(state, dict.fromkeys(state, _READ))
    copy: Any = OrderedDict(state)
    if hasattr(state, "_metadata"):
        copy._metadata = state._metadata
    return copy


def _loads_as_torch_does(module: nn.Module) -> bool:
    """Say whether torch's default load is used, without pre-hooks: no code of the module sees the values
    before they are copied."""
    own = "_load_from_state_dict" in vars(module)
    own = own or type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
    return not own and not module._load_state_dict_pre_hooks


def _under(state: Any, prefix: str) -> Any:
    if isinstance(state, _LazyState):
        return state.under(prefix)
    return {key: value for key, value in state.items() if key.startswith(prefix)}


def _address(value: Any) -> int | None:
    """Return the address of a tensor's storage, which is equal for views of one storage; None if it has no
    memory of its own."""
    if type(value) not in (torch.Tensor, nn.Parameter) or value.layout is not torch.strided or value.is_meta:
        return None
    return int(value.untyped_storage().data_ptr())


@contextmanager
def _copying_in_place() -> Iterator[None]:
    """Make torch copy into parameters instead of swapping them, for the block."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(False)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


@contextmanager
def _extra_states_to(load: ModuleLoad) -> Iterator[None]:
    """Record the extra state that is set in the block, because ``set_extra_state`` may read weights that are
    not loaded yet."""
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
    """Raise ConfigError if torch cannot copy ``value``, which has the right shape, to its parameter or
    buffer."""
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
    """Raise ConfigError if a value is not a tensor or has another shape than its parameter or buffer."""
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


_UNREAD = object()


class LazyState(dict[str, Any]):
    """A dict that reads a value on first access and then keeps it. It tracks which names were removed, and
    which values were replaced or changed in place.

    ``read(name)`` returns a value. Pickles and copies are ordinary dicts with all values.
    """

    # dict's own methods would return the placeholders of values that were not read yet.
    keys = MutableMapping.keys  # type: ignore[assignment]
    items = MutableMapping.items  # type: ignore[assignment]
    values = MutableMapping.values  # type: ignore[assignment]
    get = MutableMapping.get  # type: ignore[assignment]
    pop = MutableMapping.pop
    popitem = MutableMapping.popitem
    setdefault = MutableMapping.setdefault
    update = MutableMapping.update
    clear = MutableMapping.clear
    __eq__ = MutableMapping.__eq__
    __hash__ = None

    def __init__(
        self, names: Iterable[str], read: Callable[[str], Any], metadata: Mapping[str, Any] | None = None
    ) -> None:
        """``metadata``: the ``_metadata`` that torch keeps with a state dict."""
        self._metadata = metadata
        dict.__init__(self, dict.fromkeys(names, _UNREAD))
        self._names = tuple(dict.keys(self))
        self._read = read
        self._versions: dict[str, int] = {}  # version counters at the time of reading

    def __getitem__(self, name: str) -> Any:
        value = dict.__getitem__(self, name)
        if value is _UNREAD:
            value = self._read(name)
            dict.__setitem__(self, name, value)
            self._versions[name] = value._version if isinstance(value, torch.Tensor) else 0
        return value

    def __setitem__(self, name: str, value: Any) -> None:
        self._versions.pop(name, None)
        dict.__setitem__(self, name, value)

    def __delitem__(self, name: str) -> None:
        self._versions.pop(name, None)
        dict.__delitem__(self, name)

    def __iter__(self) -> Iterator[str]:
        return dict.__iter__(self)

    def __len__(self) -> int:
        return dict.__len__(self)

    def __contains__(self, name: object) -> bool:
        return dict.__contains__(self, name)

    def __or__(self, other: Any) -> Any:
        return {**self, **other}

    def __ror__(self, other: Any) -> Any:
        return {**other, **self}

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self

    def __repr__(self) -> str:
        return f"LazyState({list(self)!r})"

    def __reduce_ex__(self, _protocol: Any) -> Any:
        # The type of a state dict, which torch.load accepts.
        return OrderedDict, (), None, None, iter(self.items())

    def copy(self) -> dict[str, Any]:
        """Return an ordinary dict with all values."""
        return dict(self.items())

    @property
    def removed(self) -> list[str]:
        """The names that were removed."""
        return [name for name in self._names if name not in self]

    @property
    def changed(self) -> dict[str, Any]:
        """The values that were replaced or changed in place."""
        return {name: value for name, value in dict.items(self) if self._is_changed(name, value)}

    @property
    def is_as_read(self) -> bool:
        """Whether no value was removed, replaced or changed."""
        return not self.removed and not self.changed

    def _is_changed(self, name: str, value: Any) -> bool:
        if value is _UNREAD:
            return False
        version = value._version if isinstance(value, torch.Tensor) else 0
        return self._versions.get(name) != version

    def pop_unread(self, name: str) -> None:
        """Remove a name, if it is there. It does not count as removed in :attr:`removed` or
        :attr:`is_as_read`."""
        if name in self:
            del self[name]

    def peek(self, name: str) -> Any:
        """Return a value without keeping it."""
        value = dict.__getitem__(self, name)
        return self._read(name) if value is _UNREAD else value


class Peeking(Mapping[str, Any]):
    """A view of a LazyState to be read once: it keeps no values."""

    def __init__(self, state: LazyState) -> None:
        self._state = state

    def __getitem__(self, name: str) -> Any:
        return self._state.peek(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


@paused_collector()
def export_weights(
    model: ManagedModel, *args: Any, only_rank_0: bool = False, **options: Any
) -> dict[str, Any]:
    """Return the state dict as :meth:`GeminiDDP.state_dict` does; other arguments are those of
    ``nn.Module.state_dict``."""
    state = _state(model, "state_dict", *args, **options)
    keeps = not only_rank_0 or model.rank().index == 0
    managed = {id(v): v for v in state.values() if isinstance(v, ManagedParameter)}
    directory = model.manager.chunks.budgets.disk_dir if keeps else None
    capacity = sum(p.numel() * max(4, p.element_size()) for p in managed.values())
    export = MappedTensors(directory, capacity, len(managed)) if directory is not None else IN_MEMORY
    for names, value in _full_values(model, state, export):
        state.update(dict.fromkeys(names, value) if keeps else {})
    if not keeps:
        state.clear()
    return state


def lazy_weights(model: ManagedModel) -> LazyState:
    """Return the weights of :func:`export_weights` as a LazyState. Reading a value is collective."""
    state = _state(model, "state_dict")

    def read(name: str) -> Any:
        value = state[name]
        if isinstance(value, ManagedParameter):
            return _full_value(model, value, IN_MEMORY)
        return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value

    return LazyState(state, read, getattr(state, "_metadata", None))


def export_shards(
    model: ManagedModel, max_shard_size: int | str, only_rank_0: bool
) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the shards of :meth:`GeminiDDP.state_dict_shard`."""
    most = parse_bytes(max_shard_size, name="max_shard_size")
    if not most or most < 0:
        raise ConfigError(f"max_shard_size is {max_shard_size!r}; give a number of bytes or '1GiB'")
    state = _state(model, "state_dict_shard")
    keeps = not only_rank_0 or model.rank().index == 0
    return _shards(model, _full_values(model, state, IN_MEMORY), most, keeps)


def _shards(
    model: ManagedModel, values: Iterator[tuple[list[str], Any]], most: int, keeps: bool
) -> Iterator[tuple[dict[str, Any], int]]:
    begun = model.manager.step
    shard: dict[str, Any] = {}
    held = 0
    for names, value in values:
        nbytes = value.nbytes if isinstance(value, torch.Tensor) else 0
        if shard and held + nbytes > most:
            yield shard, held
            shard, held = {}, 0
            if model.manager.step != begun:
                raise StateError("weights changed while they were read in shards; start again after the step")
        if keeps:
            shard.update(dict.fromkeys(names, value))
            held += nbytes
    if shard:
        yield shard, held


def _state(model: ManagedModel, doing: str, *args: Any, **options: Any) -> dict[str, Any]:
    """Return the module's state dict with managed weights as they are; runs pending updates first."""
    model.manager.lock.refuse_all()
    model.storage.mixture.refuse(doing)
    model.managed.refuse_exchanged(doing)
    model.manager.run_pending()
    state: dict[str, Any] = model.module.state_dict(*args, **{**options, "keep_vars": True})
    return state


def _full_values(
    model: ManagedModel, state: Mapping[str, Any], export: Place
) -> Iterator[tuple[list[str], Any]]:
    """Yield each value of a state as an ordinary one, with its names (several if it is tied)."""
    names: dict[int, list[str]] = {}
    for key, value in state.items():
        names.setdefault(id(value), []).append(key)
    for keys in names.values():
        value = state[keys[0]]
        if isinstance(value, ManagedParameter):
            value = _full_value(model, value, export)
        elif isinstance(value, ManagedTensor):  # e.g. the scales of a quantized weight
            value = plain_copy(value).cpu()
        elif isinstance(value, torch.Tensor):
            value = value.detach().cpu()
        yield keys, value


def import_weights(
    model: ManagedModel,
    state_dict: Mapping[str, Any],
    *,
    strict: bool,
    fill: Callable[[ManagedSlot, torch.Tensor], None] | None = None,
) -> Any:
    """Load a state dict as :meth:`GeminiDDP.load_state_dict` does. ``fill`` writes the values of managed
    weights; None: :func:`write_values` does."""
    model.managed.refuse_exchanged("load_state_dict")
    rank = model.rank()

    def found() -> StateLoad:
        load = StateLoad(model.module, state_dict, partial(_kept, model))
        if not load.has_post_hooks:  # post-hooks may still remove keys from these lists
            _refuse_keys(load.keys, strict=strict)
        return load

    load = rank.together(found)
    names = _stored_names(model.module)
    loaded = {_stored_name(target, names) for target in load.targets}
    rank.together(model.manager.run_pending)

    def write() -> Any:
        keys = load.carry_out(partial(_write, model, fill=fill))
        _refuse_keys(keys, strict=strict)
        return keys

    with model.storage.mixture.load(loaded, set(names.values())):
        return rank.together(write)


def import_others(model: ManagedModel, others: Mapping[str, Any]) -> bool:
    """Load ``others``: all of the module's state except managed weights, which keep their values.

    Load hooks run as in a load of everything and see all names, with the current weights. Values that a hook
    creates for a managed weight are ignored. Returns whether a hook wrote to a managed weight itself, which
    then has other values.
    """
    written = model.manager.written.times()
    state = model.module.state_dict(keep_vars=True)
    for name, value in list(state.items()):
        if isinstance(value, ManagedTensor):  # a part of a quantized weight
            del state[name]
        elif isinstance(value, torch.Tensor):
            state[name] = value.detach()
    state.update(others)

    def write(target: torch.Tensor, value: torch.Tensor) -> None:
        if not isinstance(target, ManagedParameter):
            _write(model, target, value)

    StateLoad(model.module, state, partial(_kept, model)).carry_out(write)
    return model.manager.written.times() != written


def _refuse_keys(keys: Any, *, strict: bool) -> None:
    missing, unexpected = keys.missing_keys, keys.unexpected_keys
    if strict and (missing or unexpected):
        raise RuntimeError(f"load_state_dict: missing keys {missing}, unexpected keys {unexpected}")


def _stored_names(module: nn.Module) -> dict[int, str]:
    """Return the id of each tensor that a full load writes, mapped to its name. Tied parameters share one
    name."""
    names: dict[int, str] = {}
    for prefix, part in module.named_modules():
        held = dict(part._parameters)
        held |= {k: v for k, v in part._buffers.items() if k not in part._non_persistent_buffers_set}
        for key, value in held.items():
            if value is not None:
                names.setdefault(id(value), _name_of(value) or f"{prefix}.{key}".lstrip("."))
    return names


def _stored_name(target: torch.Tensor, names: Mapping[int, str]) -> str:
    return names.get(id(target)) or _name_of(target)


def _name_of(value: torch.Tensor) -> str:
    return value._slot.name if isinstance(value, ManagedParameter) else ""


@torch.no_grad()
def _write(
    model: ManagedModel,
    target: torch.Tensor,
    value: torch.Tensor,
    fill: Callable[[ManagedSlot, torch.Tensor], None] | None = None,
) -> None:
    """Copy a value into chunks or into a buffer. Over several ranks each rank writes the part that it
    owns."""
    if isinstance(value, ManagedParameter):  # a hook may use it for a missing name
        owner = value._ref.manager  # may be another model's
        assert isinstance(owner, GeminiManager)
        quantized = isinstance(value, QuantizedParameter)
        value = plain_copy(value) if quantized else read_values(slot_of(value), owner)
    elif isinstance(value, ManagedTensor):
        value = plain_copy(value)
    if not isinstance(target, ManagedParameter):
        target.copy_(value)
        return
    if isinstance(target, QuantizedParameter):
        write_quantized(slot_of(target), value, model.manager)
    elif fill is not None:
        fill(slot_of(target), value)
    else:
        write_values(slot_of(target), value, model.manager)
    with torch._C.DisableTorchFunctionSubclass():
        increment_version(target)


def _kept(model: ManagedModel, value: torch.Tensor) -> torch.Tensor:
    """Return a copy of a value that a hook created, to keep until it is written. With a DISK tier the copy is
    in a file, so that a hook that converts all weights needs no memory for all of them at once."""
    directory = model.manager.chunks.budgets.disk_dir
    if directory is None or value.device.type != "cpu":
        return value
    return MappedTensors(directory, value.numel() * value.element_size(), 1).copy(value)


def _full_value(model: ManagedModel, param: ManagedParameter, export: Place) -> torch.Tensor:
    """Return a copy of a parameter in fp32, in host memory: of its master if it has one."""
    if isinstance(param, QuantizedParameter):
        return read_quantized(slot_of(param), model.manager, export)
    dtype = torch.float32 if param.dtype.itemsize < 4 else param.dtype
    return read_values(slot_of(param), model.manager, export, dtype)
