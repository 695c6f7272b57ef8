"""Registries of classes by name, for configurations, and a program's own kinds of groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, TypeVar

from gemini.errors import ConfigError

_Class = TypeVar("_Class", bound=type)


class Registry:
    """A registry of classes by name::

    @MODELS.register_module class Mlp(nn.Module): ...
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._classes: dict[str, type] = {}

    def register_module(self, cls: _Class) -> _Class:
        """Add a class and return it. Raises ConfigError if another class has its name."""
        other = self._classes.setdefault(cls.__name__, cls)
        if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ConfigError(
                f"{self.name} already has a {cls.__name__!r} of {other.__module__}; choose another name"
            )
        self._classes[cls.__name__] = cls  # a notebook's cell may run again
        return cls

    def has(self, name: str) -> bool:
        """Return whether there is a class with this name."""
        return name in self._classes

    def get_module(self, name: str) -> type:
        """Return a class. Raises ConfigError if there is none."""
        if name not in self._classes:
            said = ", ".join(self._classes) or "none"
            raise ConfigError(
                f"{self.name} has no {name!r} (it has {said}); decorate the class with register_module"
            )
        return self._classes[name]


LAYERS = Registry("LAYERS")
MODELS = Registry("MODELS")
DIST_GROUP_INITIALIZER = Registry("DIST_GROUP_INITIALIZER")
GRADIENT_HANDLER = Registry("GRADIENT_HANDLER")

# From ``tensor=dict(mode=...)`` in a configuration to the name of a class in DIST_GROUP_INITIALIZER.
INITIALIZER_MAPPING: dict[str, str] = {}

GroupsByMode = Mapping[Enum | str, Iterable[Iterable[int]]]


class ProcessGroupInitializer:
    """Defines the process groups of a program's own kind.

    Register a subclass in ``DIST_GROUP_INITIALIZER``, and its name in ``INITIALIZER_MAPPING`` under a mode.
    ``parallel=dict(tensor=dict(size=4, mode=..., ...))`` then creates it, with further entries as keywords.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        config: Mapping[str, Any],
        data_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        tensor_parallel_size: int = 1,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.config = config
        self.data_parallel_size = data_parallel_size
        self.pipeline_parallel_size = pipeline_parallel_size
        self.tensor_parallel_size = tensor_parallel_size

    def init_parallel_groups(self) -> GroupsByMode | None:
        """Return all groups of each kind as lists of global ranks, the same on all ranks::

            return {"new_mode": [[0, 2], [1, 3]]}

        None: there are none.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no groups; override init_parallel_groups()")
