"""A module around a module that hides nothing of it."""

from __future__ import annotations

from typing import Any

from torch import nn


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
