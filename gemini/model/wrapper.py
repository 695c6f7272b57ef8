"""A module around a module that hides nothing of it, also as a part of a larger one: what torch loads has the
names of what is wrapped."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from gemini.errors import ConfigError
from gemini.model.managed_model import ManagedModel
from gemini.model.weights import import_weights

_HELPER = "torch.distributed.checkpoint.state_dict"


class Wrapper(nn.Module):
    """Wraps :attr:`module`: an attribute that the wrapper itself does not have is the module's, to read and,
    where the module has it, to set."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self._wrapped()
            if module is None or (name.startswith("__") and name.endswith("__")):
                raise
        return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        module = self._wrapped()
        if module is None or self._is_own(name) or not hasattr(module, name):
            super().__setattr__(name, value)
        else:
            setattr(module, name, value)

    def __delattr__(self, name: str) -> None:
        module = self._wrapped()
        if module is None or self._is_own(name):
            super().__delattr__(name)
        else:
            delattr(module, name)

    def __dir__(self) -> list[str]:
        module = self._wrapped()
        own = super().__dir__()  # type: ignore[no-untyped-call]
        return sorted({*own, *(dir(module) if module is not None else ())})

    def _wrapped(self) -> nn.Module | None:
        parts: dict[str, nn.Module | None] = self.__dict__.get("_modules", {})
        return parts.get("module")

    def _is_own(self, name: str) -> bool:
        held = (self.__dict__, self._parameters, self._buffers, self._modules)
        return hasattr(type(self), name) or any(name in names for names in held)


class NamedAsWrapped(Wrapper):
    """A wrapper whose state has the names of the module that it wraps, its ``module``."""

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tell torch.distributed.checkpoint that ``module`` is no part of names; where each begins there."""
        inner = cast("nn.Module", self.module)
        return dict.fromkeys(("", *inner._modules, *inner._parameters, *inner._buffers), "module")

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As a module's. To torch.distributed.checkpoint without ``module``, which it takes off for torch's
        own wrapper only: it looks for the states of an optimizer under the names of weights."""
        if torchs_checkpoint_asks():
            return cast("nn.Module", self.module).named_parameters(*args, **kwargs)
        return super().named_parameters(*args, **kwargs)


class LoadsAsPart(NamedAsWrapped):
    """A wrapper whose state has the names of the module that it wraps, and is loaded under them."""

    _gemini: ManagedModel

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(_load_part)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Have all of the wrapped module loaded, as ``load_state_dict`` of the wrapper does; what an outer
        module's ``load_state_dict`` calls."""
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        refuse_assign(bool(local_metadata.get("assign_to_params_buffers")))
        _end_load(self)  # of one that was interrupted
        own: Any = OrderedDict(
            (key[len(prefix) :], state_dict[key]) for key in state_dict if key.startswith(prefix)
        )
        own._metadata = {"": local_metadata}
        # torch goes on with our parts, under names that begin with theirs, and tells only those what version
        # of each the state is of. So they note it, and the hook that comes after them loads.
        self.__dict__["_part_load"] = _PartLoad(own, prefix, strict, self._modules)
        self._modules = _Listener(self._gemini.module, prefix, own._metadata)._modules


@dataclass(frozen=True)
class _PartLoad:
    """A load of a wrapper that has begun, and what is in the wrapper."""

    state: Mapping[str, Any]
    prefix: str
    strict: bool
    modules: dict[str, nn.Module | None]


class _Listener(nn.Module):
    """Stands for a module while torch loads what it is in; notes ``metadata`` by name below ``prefix``."""

    def __init__(self, module: nn.Module, prefix: str, metadata: dict[str, Any]) -> None:
        super().__init__()
        self._start = len(prefix)
        self._metadata = metadata
        for name, part in module._modules.items():
            self._modules[name] = None if part is None else _Listener(part, prefix, metadata)

    def _load_from_state_dict(self, _state: Any, prefix: str, local_metadata: Any, *_rest: Any) -> None:
        self._metadata[prefix[self._start : -1]] = local_metadata


def _end_load(wrapper: LoadsAsPart) -> _PartLoad | None:
    load: _PartLoad | None = wrapper.__dict__.pop("_part_load", None)
    if load is not None:
        wrapper._modules = load.modules
    return load


def _load_part(wrapper: LoadsAsPart, keys: Any) -> None:
    load = _end_load(wrapper)
    if load is None:
        return
    found = import_weights(wrapper._gemini, load.state, strict=False)
    if load.strict:
        keys.missing_keys.extend(load.prefix + key for key in found.missing_keys)
        keys.unexpected_keys.extend(load.prefix + key for key in found.unexpected_keys)


def torchs_checkpoint_asks() -> bool:
    """Say whether the caller of the function that asks is torch.distributed.checkpoint's own."""
    return sys._getframe(2).f_globals.get("__name__") == _HELPER


def refuse_assign(assign: bool) -> None:
    """Raise ConfigError for ``load_state_dict(assign=True)``."""
    if assign:
        raise ConfigError("load_state_dict(assign=True) cannot re-point managed parameters; use assign=False")
