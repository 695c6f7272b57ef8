"""Recipes: options of ``gemini finetune`` in a TOML or YAML file."""

from __future__ import annotations

import difflib
import os
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

from gemini.errors import ConfigError, InputError
from gemini.jobs.finetune.config import FineTuneConfig
from gemini.jobs.run.run_directory import is_a
from gemini.system.config import parse_bytes
from gemini.system.input_files import read_document

_KINDS = (".toml", ".yaml", ".yml")
_SIZES = ("device_bytes", "host_bytes", "disk_bytes", "non_model_bytes")
_PATHS = ("model", "data", "output", "tokenizer", "disk_dir")


def read_recipe(path: Path) -> dict[str, Any]:
    """Return the options that the recipe at ``path`` gives, by the names of their fields.

    Paths in it are relative to the recipe's directory. Tables only group keys: ``[budgets]`` and the like
    have no meaning of their own.

    Raises:
        ConfigError: it cannot be read, or has a key or a value that is none of an option.
    """
    if path.suffix not in _KINDS and path.is_file():
        raise InputError(f"the recipe {path} is neither .toml nor .yaml; name it by what it is")
    if not os.path.lexists(path):
        raise InputError(
            f"there is no recipe {path}; name a .toml or .yaml file of options (recipes/ in the checkout has "
            "some to start from), or give options alone: --model DIR --data PATH --output DIR"
        )
    document = read_document(path, "the recipe", kind=path.suffix if path.suffix in _KINDS else ".toml")
    if not isinstance(document, dict):
        raise ConfigError(f"the recipe {path} holds no keys; write one 'name = value' per line")
    hints, own = get_type_hints(FineTuneConfig), list(FineTuneConfig.__annotations__)
    names = [each.name for each in fields(FineTuneConfig)]
    # The job's own first, as its class has them.
    names.sort(key=lambda name: own.index(name) if name in own else len(own))
    types = {name: hints[name] for name in names}
    return {name: _value(path, name, value, types) for name, value in _flat(path, document).items()}


def _flat(path: Path, document: dict[Any, Any]) -> dict[str, Any]:
    """Return all keys, those of tables among them, as names of fields."""
    found: dict[str, Any] = {}
    for key, value in document.items():
        inner = _flat(path, value) if isinstance(value, dict) else {str(key).replace("-", "_"): value}
        twice = found.keys() & inner.keys()
        if twice:
            raise ConfigError(f"{path} gives {min(twice)!r} twice; keep one of them")
        found |= inner
    return found


def _value(path: Path, name: str, value: Any, types: dict[str, Any]) -> Any:
    """Return what a key gives its field. Raise ConfigError for what is none."""
    if name not in types:
        # Comparing takes time by the square of a name's length.
        near = difflib.get_close_matches(name[:100], types, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(types)}"
        raise ConfigError(f"{path} has the key {name!r:.200}, which is no option of gemini finetune; {hint}")
    if name in _SIZES:
        return None if value == "auto" else parse_bytes(value, name=f"{name} in {path}")
    if name == "lora_targets" and isinstance(value, list):
        value = ",".join(map(str, value))
    if name == "resume" and isinstance(value, bool):
        value = "yes" if value else "no"
    if type(value) is int and types[name] in (float, float | None) and abs(value) < 2**63:
        value = float(value)
    if not is_a(value, types[name]):
        hint = "; write 0.00001 or 1.0e-5, YAML takes 1e-5 for text" if isinstance(value, str) else ""
        raise ConfigError(f"{path} has {name} = {value!r:.200}, which is no {_word(types[name])}{hint}")
    if name in _PATHS and value is not None:
        return str(path.parent / value)
    return value


def _word(kind: Any) -> str:
    names = {int: "whole number", float: "number", str: "text", bool: "true or false"}
    return names.get(kind) or str(kind).replace(" | None", "")
