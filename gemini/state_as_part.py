"""A wrapper as a part of a larger module: what torch loads has the names of what is wrapped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import nn

from gemini.errors import ConfigError
from gemini.weights import import_weights

if TYPE_CHECKING:
    from gemini.ddp import GeminiDDP


class LoadsAsPart(nn.Module):
    """A wrapper whose state has the names of the module that it wraps, and is loaded under them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(_show_modules)  # type: ignore[no-untyped-call]

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
        """Load all of the wrapped module, as ``load_state_dict`` of the wrapper does; what an outer module's
        ``load_state_dict`` calls."""
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        refuse_assign(bool(local_metadata.get("assign_to_params_buffers")))
        own = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
        keys = import_weights(cast("GeminiDDP", self), own, strict=False)
        if strict:
            missing_keys += [prefix + key for key in keys.missing_keys]
            unexpected_keys += [prefix + key for key in keys.unexpected_keys]
        # torch goes on with our parts, under names that begin with theirs, and they are loaded: until it is
        # done with us, which the hook tells, there are none.
        self.__dict__["_hidden_modules"], self._modules = self._modules, {}


def _show_modules(wrapper: LoadsAsPart, _keys: Any) -> None:
    wrapper._modules = wrapper.__dict__.pop("_hidden_modules", wrapper._modules)


def refuse_assign(assign: bool) -> None:
    """Raise ConfigError for ``load_state_dict(assign=True)``."""
    if assign:
        raise ConfigError("load_state_dict(assign=True) cannot re-point managed parameters; use assign=False")
