"""Checks a model directory before transformers and PEFT open it.

They check neither file types, nor where links lead, nor which files an index names; a FIFO would block them
indefinitely. Nothing in a directory is executed: config keys that name code are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gemini.errors import ConfigError, InputError
from gemini.system.input_files import MAX_INDEX_BYTES, InputDirectory, errors_of, files_of

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
MAX_CONFIG_BYTES = 2**24  # some configs list a label for each class
MOST_LAYERS = 10_000  # more would take hours to build; the deepest published models have some hundred
_COUNTS_MODULES = re.compile(r"layers|layer$|blocks$|depths?$|experts$")  # names in configurations
_INDEX = ".index.json"
_TEXTS = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_READ = (*_TEXTS, ".safetensors", ".bin", ".pt", ".gguf")
_MAX_TEXT_BYTES = 2**28  # tokenizers read them whole; the largest published ones have some ten MiB
_DOCUMENTS = {CONFIG: MAX_CONFIG_BYTES, "generation_config.json": MAX_CONFIG_BYTES}
_RUN = re.compile(r"(attn|experts)_implementation$")  # with a slash the value names a kernel to download


class PretrainedError(InputError, OSError, RuntimeError):
    """A model cannot be loaded from its directory. It is an OSError, a ValueError and a RuntimeError, as
    programs expect from transformers' ``from_pretrained``.
    """


def check_model(path: Path) -> None:
    """Check all files that loading a model from the directory ``path`` reads. The time grows with the number
    of files and the size of its documents.

    Raises:
        InputError: a file is damaged, not regular, or leads out of the directory.
    """
    directory = InputDirectory(path)
    check_kinds(directory)
    for name, most_bytes in _DOCUMENTS.items():
        if name in directory:
            found = directory.json(name, most_bytes)
            if name == CONFIG:
                check_config(found, path / name)
                _check_file_of(found, directory)
    for name in directory.names:
        if name.endswith(_INDEX):
            _check_index(directory, name)


def check_kinds(directory: InputDirectory) -> None:
    """Raise InputError if an entry with the name of a file to be read is not a readable regular file."""
    for name in directory.names:
        if name.endswith(_READ):
            directory.check(name, _MAX_TEXT_BYTES if name.endswith(_TEXTS) else None)


def check_config(fields: Mapping[str, Any], path: Path) -> None:
    """Raise InputError if a config, read from ``path``, has too many layers to build, or names code to
    download and run.
    """
    for name, value in _leaves(fields):
        if _COUNTS_MODULES.search(name) and type(value) is int and value > MOST_LAYERS:
            raise InputError(
                f"{path}: {name} is {min(value, 10**99):.3g}, more than the {MOST_LAYERS} that are built; "
                "correct it"
            )
        if _RUN.search(name) and isinstance(value, str) and "/" in value:
            raise InputError(
                f"{path}: {name} is {value!r:.200}, a kernel to fetch and run; take the entry out, and "
                "give attn_implementation= by hand where you trust it"
            )


def is_model_class(transformers: Any, found: object) -> bool:
    """Return whether ``found``, from the package, is a model class."""
    return isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)


def read_index(directory: InputDirectory, name: str) -> dict[str, str]:
    """Return {tensor name: file name} from an index. Raises InputError if it is malformed or names an invalid
    file.
    """
    return files_of(directory.json(name, MAX_INDEX_BYTES), directory, name)


def check_adapters(path: Path) -> None:
    """Check all files that PEFT reads for adapters in the directory ``path``. Raises InputError."""
    directory = InputDirectory(path)
    check_kinds(directory)
    fields = directory.json(ADAPTER_CONFIG, MAX_CONFIG_BYTES)
    base = fields.get("base_model_name_or_path")
    if not (base is None or isinstance(base, str)) or "\0" in (base or ""):
        raise InputError(f"{path / ADAPTER_CONFIG}: base_model_name_or_path is {base!r:.200}, no name")
    if fields.get("megatron_config"):
        raise InputError(
            f"{path / ADAPTER_CONFIG} has a megatron_config, whose module PEFT would run; take it out"
        )


def tokenizer_of(path: Path, adapter: Path | None = None) -> Any:
    """Return the tokenizer of the adapters, if they have one, else of the model.

    Raises:
        ConfigError: transformers is not installed.
        InputError: it cannot read the tokenizer.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"a tokenizer needs the package transformers: pip install 'gemini-runtime[hf]' ({error})"
        ) from error
    if adapter is not None:
        check_adapters(adapter)
        if "tokenizer_config.json" in InputDirectory(adapter):
            path = adapter
    check_kinds(InputDirectory(path))
    with errors_of(f"transformers cannot read the tokenizer of {path}"):
        return transformers.AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )


def _check_index(directory: InputDirectory, name: str) -> None:
    """Check an index, and those of its shards that will be loaded. transformers reads nothing of an index
    without shards, or of one beside a single complete file.
    """
    named = read_index(directory, name)
    whole = name.removesuffix(_INDEX)
    files = sorted(set(named.values()))
    if whole in directory or not whole.endswith(".safetensors"):
        files = [file for file in files if file in directory]
    for file in files:
        directory.check(file)


def _check_file_of(config: Mapping[str, Any], directory: InputDirectory) -> None:
    chosen = config.get("transformers_weights")
    if chosen is not None:
        directory.file(chosen)


def _leaves(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) for each value of a config; an element of a list has the list's name."""
    left: list[tuple[str, Any]] = [("", fields)]
    while left:
        name, value = left.pop()
        if isinstance(value, dict):
            left += value.items()
        elif isinstance(value, list):
            left += ((name, each) for each in value)
        else:
            yield name, value
