"""The configuration of a run: a Python file, a dict or nothing, and its reserved keywords."""

from __future__ import annotations

import logging
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from gemini.errors import ConfigError

logger = logging.getLogger(__name__)


class Config(dict[str, Any]):
    """A dict with entries that are also attributes, at every depth: ``config.BATCH_SIZE``,
    ``config.parallel.tensor.size``. Setting an attribute sets an entry.
    """

    def __init__(self, entries: Mapping[str, Any] | None = None) -> None:
        super().__init__({key: _nested(value) for key, value in (entries or {}).items()})

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            said = ", ".join(self) or "nothing"
            raise AttributeError(f"the configuration has no {name!r}; it has {said}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = _nested(value)


def read_config(config: str | os.PathLike[str] | Mapping[str, Any] | None) -> Config:
    """Read ``config``: the path of a Python file, which is run, a dict, or None for an empty configuration.

    A file may import modules beside it. All its names are entries except modules and names that begin with an
    underscore. Programs may use any names except the reserved ones: ``parallel``, ``fp16``, ``zero``,
    ``gradient_accumulation``, ``clip_grad_norm``, ``gradient_handler``, ``NUM_MICRO_BATCHES``,
    ``NUM_CHUNKS``, ``TENSOR_SHAPE``, ``dali``. A name similar to a reserved one logs a warning. ``parallel``
    is not checked here, because that needs the number of processes.

    Raises:
        ConfigError: there is no such file, it fails, or a reserved keyword has an invalid value.
    """
    entries = _entries(config)
    for name, check in _RESERVED.items():
        if entries.get(name) is not None:
            check(name, entries[name])
    _warn_of_near_ones(entries)
    if entries.get("fp16") is not None and entries.get("zero") is not None:
        raise ConfigError(
            "config: fp16 and zero exclude each other: zero computes in 16 bits by itself; leave fp16 out"
        )
    return Config(entries)


def _entries(config: object) -> Mapping[str, Any]:
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return config
    if isinstance(config, (str, os.PathLike)):
        return _run(Path(config))
    kind = type(config).__name__
    raise ConfigError(f"config is a {kind}; pass the path of a Python file, a dict or None")


def _run(path: Path) -> dict[str, Any]:
    """Run a Python file and return the names that it defines."""
    if path.suffix != ".py" or not path.is_file():
        what = "is no Python file (*.py)" if path.exists() else "does not exist"
        raise ConfigError(f"config: {path} {what}; from {Path.cwd()} that is {path.resolve()}")
    try:
        with _importable(path.parent):
            found = runpy.run_path(str(path))
    except Exception as error:
        way_out = ""
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "colossalai":
            way_out = "; change its import root to gemini.compat, like that of the program (docs/compat.md)"
        raise ConfigError(f"config: {path} failed with {type(error).__name__}: {error}{way_out}") from error
    return {
        name: value
        for name, value in found.items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }


@contextmanager
def _importable(directory: Path) -> Iterator[None]:
    """Make modules in ``directory`` importable inside the block, before all others."""
    place = str(directory.resolve())
    sys.path.insert(0, place)
    try:
        yield
    finally:
        sys.path.remove(place)


def _nested(value: Any) -> Any:
    return Config(value) if isinstance(value, Mapping) and not isinstance(value, Config) else value


# -- reserved keywords -----------------------------------------------------------------------------


def _options(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(f"config: {name} is {value!r}; write {name}=dict(...)")


def _count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"config: {name} is {value!r}; give a whole number, 1 or more")


def _norm(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ConfigError(f"config: {name} is {value!r}; give a number, 0 for none")


def _handlers(name: str, value: Any) -> None:
    entries = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    for entry in entries:
        if not isinstance(entry, Mapping) or not isinstance(entry.get("type"), str):
            raise ConfigError(f"config: {name} has {entry!r}; write {name}=[dict(type='NameOfTheClass')]")


def _shape(name: str, value: Any) -> None:
    sizes = [value] if isinstance(value, int) else value
    if not isinstance(sizes, Sequence) or isinstance(sizes, str) or not sizes:
        raise ConfigError(f"config: {name} is {value!r}; give the shape of a tensor, such as (8, 1024, 768)")
    for size in sizes:
        _count(f"{name}'s size", size)


_RESERVED: dict[str, Callable[[str, Any], None]] = {
    "parallel": _options,
    "fp16": _options,
    "zero": _options,
    "dali": _options,
    "gradient_accumulation": _count,
    "clip_grad_norm": _norm,
    "gradient_handler": _handlers,
    "gradient_handlers": _handlers,
    "NUM_MICRO_BATCHES": _count,
    "NUM_CHUNKS": _count,
    "TENSOR_SHAPE": _shape,
    "tensor_shape": _shape,
}


def _warn_of_near_ones(entries: Mapping[str, Any]) -> None:
    """Warn of names that are so similar to a reserved name that it may be a typo."""
    by_letters = {name.lower(): name for name in _RESERVED if name not in entries}
    for name in sorted(set(map(str, entries)) - _RESERVED.keys()):
        near = get_close_matches(name.lower(), by_letters, 1, cutoff=0.85)
        if near:
            meant = by_letters[near[0]]
            logger.warning(
                "config: %r is not a reserved name and is left to the program; if you meant %s, write that",
                name,
                meant,
            )
