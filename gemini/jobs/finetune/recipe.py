"""Recipes of ``gemini finetune``: TOML or YAML files with its options."""

from __future__ import annotations

import difflib
import os
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from gemini.errors import ConfigError, InputError
from gemini.jobs.finetune.config import FineTuneConfig
from gemini.jobs.run.run_directory import is_a
from gemini.system.config import parse_bytes
from gemini.system.input_files import read_document

_KINDS = (".toml", ".yaml", ".yml")
_SIZES = ("device_bytes", "host_bytes", "disk_bytes", "non_model_bytes")
_LISTS = ("lora_targets", "lora_target_parameters", "recompute", "report_to")
_PATH_OPTIONS = ("model", "data", "eval_data", "output", "tokenizer", "disk_dir", "plan")


def read_recipe(path: Path) -> dict[str, Any]:
    """Return the options in the recipe at ``path``, by field name.

    Paths in it are relative to the recipe's directory. Tables such as ``[budgets]`` only group keys and have
    no meaning.

    Raises:
        ConfigError: the recipe cannot be read, or a key or value is not valid for an option.
    """
    if path.suffix not in _KINDS and path.is_file():
        raise InputError(f"the recipe {path} is neither .toml nor .yaml; rename the file to its format")
    if not os.path.lexists(path):
        raise InputError(
            f"the recipe {path} does not exist; name a .toml or .yaml file of options (recipes/ in "
            "the checkout has examples), or give only options: --model DIR --data PATH --output DIR"
        )
    document = read_document(path, "the recipe", kind=path.suffix if path.suffix in _KINDS else ".toml")
    if not isinstance(document, dict):
        raise ConfigError(f"the recipe {path} holds no keys; write one 'name = value' per line")
    hints, own = get_type_hints(FineTuneConfig), list(FineTuneConfig.__annotations__)
    names = [each.name for each in fields(FineTuneConfig)]
    # The job's own fields first, so that they come first in messages.
    names.sort(key=lambda name: own.index(name) if name in own else len(own))
    types = {name: hints[name] for name in names}
    return {name: _value(path, name, value, types) for name, value in _flat(path, document).items()}


def _flat(path: Path, document: dict[Any, Any]) -> dict[str, Any]:
    """Return all keys, including those inside tables, as field names."""
    found: dict[str, Any] = {}
    for key, value in document.items():
        inner = _flat(path, value) if isinstance(value, dict) else {str(key).replace("-", "_"): value}
        twice = found.keys() & inner.keys()
        if twice:
            raise ConfigError(f"{path} gives {min(twice)!r} twice; keep one of them")
        found |= inner
    return found


def _value(path: Path, name: str, value: Any, types: dict[str, Any]) -> Any:
    """Return the value of a key for its field. Raise ConfigError if it is not valid."""
    if name not in types:
        # Cut the name: comparing takes quadratic time in its length.
        near = difflib.get_close_matches(name[:100], types, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(types)}"
        raise ConfigError(
            f"{path} has the key {name!r:.200}, which is not an option of gemini finetune; {hint}"
        )
    if name in _SIZES:
        return None if value == "auto" else parse_bytes(value, name=f"{name} in {path}")
    if name in _LISTS and isinstance(value, list):
        value = ",".join(map(str, value))
    if name in ("resume", "tiled_loss") and isinstance(value, bool):
        value = "yes" if value else "no"
    if type(value) is int and types[name] in (float, float | None) and abs(value) < 2**63:
        value = float(value)
    if not is_a(value, types[name]):
        hint = "; write 0.00001 or 1.0e-5, because YAML reads 1e-5 as text" if isinstance(value, str) else ""
        raise ConfigError(f"{path} has {name} = {value!r:.200}, which is not {_word(types[name])}{hint}")
    if name in _PATH_OPTIONS and value is not None:
        return str(path.parent / value)
    return value


def _word(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    base = next((each for each in get_args(kind) if each is not type(None)), kind)
    return names.get(base) or str(base)
