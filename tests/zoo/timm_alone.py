"""timm, also where torchvision cannot be loaded.

The wheels of torchvision that package indexes have are for torch with CUDA: beside another one ``import
torchvision`` raises, and much of transformers with it, so that it is not installed for the tests. timm takes
names from there as it is imported (transforms of images, data sets, a frozen batch norm), of which no model
of the zoo uses one.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Empty(type):
    """The type of classes that have any attribute: its name, as members of an enumeration do."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return name


class _StandIn(ModuleType):
    """A module that has any name: an empty class."""

    def __getattr__(self, name: str) -> _Empty:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Empty(name, (), {})


class _Finder(MetaPathFinder, Loader):
    """Finds a stand-in for ``torchvision`` and for every module in it."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if _is_torchvision(fullname) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is in it."""


def import_timm() -> ModuleType:
    """Return timm; of a stand-in for torchvision that this takes nobody else gets to know."""
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError):
        with _stand_ins():
            return importlib.import_module("timm")
    return importlib.import_module("timm")


@contextmanager
def _stand_ins() -> Iterator[None]:
    """Let imports of torchvision find stand-ins."""
    finder = _Finder()
    _forget_torchvision()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        _forget_torchvision()


def _forget_torchvision() -> None:
    for name in [name for name in sys.modules if _is_torchvision(name)]:
        del sys.modules[name]


def _is_torchvision(name: str) -> bool:
    return name.partition(".")[0] == "torchvision"
