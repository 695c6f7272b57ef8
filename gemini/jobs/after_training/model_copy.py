"""Copies a model directory one tensor at a time, with other values or types for some tensors.

The copy has the shards of the original. It gets its final name only when it is complete.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gemini.checkpoint.sealed_file import Staging
from gemini.checkpoint.tensor_file import TensorFile, TensorSpec
from gemini.errors import ConfigError
from gemini.integrations.model_directory import ADAPTER_CONFIG, CONFIG, MAX_CONFIG_BYTES
from gemini.integrations.safetensors_files import INDEX, SINGLE, SafetensorsFiles, StoredTensor
from gemini.system.durable import publish, scratch_directory
from gemini.system.files import io_errors, read_regular
from gemini.system.input_files import InputDirectory

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
CARD = "README.md"
_CAST_NUMEL = 2**20  # elements to cast at a time
_MOST_BYTES = 2**28  # limit for a file that has no weights; tokenizers have some ten MiB
_KEPT = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_LEGAL = ("LICENSE", "NOTICE", "USE_POLICY")
_TOKENIZER = ("tokenizer", "special_tokens", "added_tokens", "chat_template", "vocab", "merges", "spiece")


@dataclass(frozen=True)
class Copied:
    """The contents of a copy. ``nbytes`` is the size of its tensors, ``largest_bytes`` that of the largest
    one."""

    num_tensors: int
    nbytes: int
    largest_bytes: int


def refuse_existing(target: Path) -> None:
    """Raise ConfigError if ``target`` exists: nothing is overwritten."""
    with io_errors("check the output path", target):
        exists = target.exists() or target.is_symlink()
    if exists:
        raise ConfigError(f"{target} exists; remove it, or name another place for the output")


@contextmanager
def published(target: Path, doing: str) -> Iterator[Path]:
    """Yield a temporary path near ``target`` for a file or a directory. If the block succeeds, it is renamed
    to ``target``; otherwise it is removed. Raises IoError, and ConfigError if ``target`` exists."""
    refuse_existing(target)
    with io_errors(doing, target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with scratch_directory(target) as scratch:
            made = scratch / "made"
            yield made
            refuse_existing(target)
            publish(made, target)


def copy_documents(source: Path, made: Path, *, tokenizer_of: Path | None = None) -> None:
    """Copy configs, tokenizer and licenses from ``source``, but no weights and no code. The tokenizer in
    ``tokenizer_of``, if it has one, replaces that of ``source``. Raises InputError."""
    names = {name: source for name in InputDirectory(source).names if _is_document(name)}
    if tokenizer_of is not None:
        own = [name for name in InputDirectory(tokenizer_of).names if _is_of_tokenizer(name)]
        if any(name.startswith("tokenizer") for name in own):
            names = {name: path for name, path in names.items() if not _is_of_tokenizer(name)}
            names |= {name: tokenizer_of for name in own}
    for name, directory in names.items():
        path = InputDirectory(directory).file(name)
        (made / name).write_bytes(read_regular(path, _MOST_BYTES))


def _is_document(name: str) -> bool:
    if name == ADAPTER_CONFIG or name.endswith(".index.json"):
        return False
    return name.endswith(_KEPT) or name.startswith(_LEGAL)


def _is_of_tokenizer(name: str) -> bool:
    return name.startswith(_TOKENIZER) and name.endswith(_KEPT)


def copy_weights(
    files: SafetensorsFiles,
    made: Path,
    *,
    dtype_of: Callable[[StoredTensor], torch.dtype],
    values_of: Callable[[StoredTensor], torch.Tensor],
) -> Copied:
    """Write the tensors of ``files`` into the directory ``made``, each into its original shard, with the
    types and values that the two functions return. One tensor is in memory at a time.

    Raises:
        CheckpointError: a tensor cannot be read.
        OSError: the copy cannot be written.
    """
    shards: dict[str, list[StoredTensor]] = {}
    for stored in files.values():
        shards.setdefault(stored.path.name, []).append(stored)
    total_bytes, largest_bytes = 0, 0
    with closing(Staging()) as staging:
        for shard, tensors in shards.items():
            specs = [TensorSpec(each.name, dtype_of(each), each.shape) for each in tensors]
            with closing(TensorFile(made / shard, specs, {}, staging, private=False)) as written:
                for stored in tensors:
                    written.write(stored.name, 0, values_of(stored))
                written.finish()
            total_bytes += sum(spec.nbytes for spec in specs)
            largest_bytes = max([largest_bytes, *(spec.nbytes for spec in specs)])
    if list(shards) != [SINGLE]:
        places = {name: files[name].path.name for name in sorted(files)}
        index = {"metadata": {"total_size": total_bytes}, "weight_map": places}
        (made / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return Copied(len(files), total_bytes, largest_bytes)


def read_config(path: Path) -> dict[str, Any]:
    """Return the config of a model directory. Raises InputError, and ConfigError if the directory has only
    adapters."""
    directory = InputDirectory(path)
    if CONFIG not in directory and ADAPTER_CONFIG in directory:
        raise ConfigError(
            f"{path} holds adapters, not a model; merge them into their base first: gemini merge BASE "
            f"{path} OUT"
        )
    return directory.json(CONFIG, MAX_CONFIG_BYTES)


def refuse_quantized(config: Mapping[str, Any], path: Path) -> None:
    """Raise ConfigError for a model with quantized weights."""
    if config.get("quantization_config"):
        raise ConfigError(
            f"{path} has quantized weights (quantization_config in {CONFIG}); give the original model"
        )


def export_safetensors(source: Path, target: Path, dtype: torch.dtype | None) -> Copied:
    """Write the model in ``source`` to the directory ``target``, with floating-point weights of ``dtype``;
    None: unchanged.

    Raises:
        ConfigError: ``target`` exists, or ``source`` cannot be exported.
        IoError: the directory cannot be written.
    """
    config = read_config(source)
    refuse_quantized(config, source)

    def dtype_of(stored: StoredTensor) -> torch.dtype:
        is_cast = dtype is not None and stored.dtype.is_floating_point and stored.dtype.itemsize > 1
        return dtype if is_cast and dtype is not None else stored.dtype

    def values_of(stored: StoredTensor) -> torch.Tensor:
        return cast(stored[...], dtype_of(stored), stored.name)

    with SafetensorsFiles.of_directory(source) as files, published(target, "export the model") as made:
        made.mkdir()
        copy_documents(source, made)
        if dtype is not None:
            said = {key: value for key, value in config.items() if key != "torch_dtype"}
            said["dtype"] = str(dtype).removeprefix("torch.")
            (made / CONFIG).write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
        return copy_weights(files, made, dtype_of=dtype_of, values_of=values_of)


def cast(values: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Return ``values`` as another type, with only a few MiB of temporary memory. Raise ConfigError if a
    finite number overflows to infinity in f16."""
    if values.dtype == dtype:
        return values
    made = torch.empty(values.shape, dtype=dtype, device=values.device)
    flat, given = made.view(-1), values.reshape(-1)
    for first in range(0, len(flat), _CAST_NUMEL):
        piece = slice(first, first + _CAST_NUMEL)
        flat[piece] = given[piece]
        if dtype == torch.float16 and (flat[piece].isinf() & given[piece].isfinite()).any():
            raise ConfigError(
                f"{name} has values above {torch.finfo(dtype).max:g}, the largest of f16; give --type bf16"
            )
    return made
