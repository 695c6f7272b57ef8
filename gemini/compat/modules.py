"""Creates the modules of :mod:`gemini.compat.names` on import and resolves their names on first use."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from gemini.compat.names import COMING, NAMES, OWN
from gemini.system.config import did_you_mean

_ROOT = "gemini.compat"


def _modules() -> set[str]:
    """Return the paths of all modules, without the root."""
    paths = [name.split(".")[:-1] for name in (*NAMES, *COMING)]
    return {".".join(parts[:depth]) for parts in paths for depth in range(1, len(parts) + 1)}


MODULES = _modules()


def resolve(name: str) -> Any:
    """Return the object that ``name`` of the list refers to."""
    module, _, attribute = NAMES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def look_up(module: str, name: str) -> Any:
    """Return the object ``name`` of a module, with a DeprecationWarning that names our equivalent.

    Raises:
        AttributeError: the name does not exist, or is not available yet; the message says why.
    """
    if name == "__all__":  # for ``from gemini.compat.nn import *``
        return [each for each in names_in(module) if not each.startswith("_")]
    path = f"{module}.{name}" if module else name
    if path in MODULES:
        return importlib.import_module(f"{_ROOT}.{path}")
    if reason := why_absent(path):
        raise AttributeError(f"{_ROOT}.{path} is still to come: {reason}")
    if path not in NAMES:
        raise AttributeError(f"module {f'{_ROOT}.{module}'.rstrip('.')!r} has no attribute {name!r}")
    found = resolve(path)
    if not name.startswith("_"):
        note = f"{_ROOT}.{path} is for programs of the documents' library; it is {own_name(path)}"
        warnings.warn(note, DeprecationWarning, stacklevel=3)
    vars(sys.modules[f"{_ROOT}.{module}".rstrip(".")])[name] = found  # cached: the warning comes once
    return found


def why_absent(path: str) -> str | None:
    """Return why a listed name is not available yet; None if it is available."""
    return COMING.get(path)


def own_name(path: str) -> str:
    """Return the name of the equivalent outside compat."""
    target = NAMES[path]
    return OWN.get(target, target.replace(":", "."))


def names_in(module: str) -> list[str]:
    """Return the names and submodules directly in a module."""
    prefix = f"{module}." if module else ""
    inside = [path.removeprefix(prefix) for path in (*NAMES, *MODULES) if path.startswith(prefix)]
    return sorted(name for name in inside if name and "." not in name)


class _Module(ModuleType):
    """A module created from the list."""

    def __getattr__(self, name: str) -> Any:
        return look_up(self.__name__.removeprefix(f"{_ROOT}."), name)

    def __dir__(self) -> list[str]:
        return names_in(self.__name__.removeprefix(f"{_ROOT}."))


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name, "See docs/compat.md.")

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: names are resolved on first use."""


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        name = fullname.removeprefix(f"{_ROOT}.")
        if name == fullname:
            return None
        if reason := why_absent(name):  # the last part of ``from gemini.compat.trainer import Trainer``
            raise ImportError(f"{fullname} is still to come: {reason}", name=fullname)
        if name in MODULES:
            return ModuleSpec(fullname, _Loader(), is_package=True)
        if name.rpartition(".")[2].startswith("_"):
            return None
        guess = did_you_mean(name, [*NAMES, *MODULES], cutoff=0.8)
        # Not ModuleNotFoundError: ``from gemini.compat.utils import nothing`` would ignore it.
        raise ImportError(
            f"{_ROOT} has no {name}{guess}; docs/compat.md lists the names of the documents that it has",
            name=fullname,
        )


def add_finder() -> None:
    """Register the import hook for these modules. Idempotent."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
