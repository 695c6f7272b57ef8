"""Digest: what a module has besides parameters, so that it shows whether a call changed any of it."""

from __future__ import annotations

import enum
import functools
import random
import types
import weakref
from collections import deque
from typing import Any

import torch
from torch import nn

_VALUES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_FIXED = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    functools.partial,
    enum.Enum,
    weakref.ref,
    nn.Module,  # looked at for itself, if it is within the block
)
_MOST_VALUES = 20_000
# Parameters change with the update of every step; a stand-in for forward is the runtime's own.
_LEFT_OUT = frozenset({"_parameters", "forward"})


class CannotRepeat(Exception):
    """A block must not be run again; says why."""


class Digest:
    """Compares equal to another one of the same module where nothing was set, written or grew. Keeps what it
    has looked at alive, so that no other object gets its id."""

    def __init__(self) -> None:
        self._found: list[object] = []
        self._kept: list[object] = []
        self._seen: set[int] = set()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Digest) and self._found == other._found

    __hash__ = None  # type: ignore[assignment]

    def add(self, value: Any) -> None:
        """Look at a value, and into it. Raises CannotRepeat where it may change unseen."""
        if len(self._found) > _MOST_VALUES:
            raise CannotRepeat("it has too many attributes to look at")
        if isinstance(value, _VALUES):
            self._found.append((type(value), value))
            return
        self._kept.append(value)
        self._found.append(id(value))
        if id(value) in self._seen or isinstance(value, _FIXED):
            return
        self._seen.add(id(value))
        self._look_into(value)

    def _look_into(self, value: Any) -> None:
        if isinstance(value, nn.Parameter):
            return
        if isinstance(value, torch.Tensor):
            self._found.append(0 if value.is_inference() else value._version)
        elif isinstance(value, torch.Generator):
            self._found.append(bytes(value.get_state().tolist()))
        elif isinstance(value, random.Random):
            self._found.append(value.getstate())
        elif isinstance(value, dict):
            for key, one in value.items():
                self.add(key)
                self.add(one)
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            self._found.append(len(value))
            for one in value:
                self.add(one)
        elif type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
            self._found.append(value.tobytes())
        elif hasattr(value, "__dict__"):
            self.add(vars(value))
        else:
            raise CannotRepeat(f"it has an attribute of type {type(value).__name__}, which may change unseen")


def digest_of(module: nn.Module) -> Digest:
    """Return the digest of a module and all within it. Raises CannotRepeat."""
    digest = Digest()
    with torch._C.DisableTorchFunctionSubclass():
        for part in module.modules():
            for name, value in vars(part).items():
                if name not in _LEFT_OUT:
                    digest.add(name)
                    digest.add(value)
    return digest
