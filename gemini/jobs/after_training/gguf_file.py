"""Exports a transformers model to one GGUF file, for llama.cpp and programs based on it. The ``gguf`` package
names the tensors and quantizes; one tensor is in memory at a time.

GGUF has one tensor for a matrix of all experts, transformers' files one for each expert. They are written one
after the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gemini.errors import ConfigError, InputError
from gemini.integrations.safetensors_files import SafetensorsFiles, StoredTensor
from gemini.jobs.after_training.gguf_architectures import ModelShape
from gemini.jobs.after_training.gguf_tokenizer import read_tokenizer
from gemini.jobs.after_training.model_copy import (
    Copied,
    cast,
    published,
    read_config,
    refuse_existing,
    refuse_quantized,
)
from gemini.jobs.run.model_card import name_of

TYPES = ("f16", "bf16", "q8_0")
_CONVERTED_NUMEL = 2**20  # elements to convert at a time
_ROPE_FACTORS = "rope_freqs.weight"
_OF_EXPERTS = ("ffn_gate_inp.weight", "ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight")


@dataclass(frozen=True)
class Exported:
    """The contents of an exported GGUF file; ``notes`` are for the user."""

    copied: Copied
    architecture: str
    notes: tuple[str, ...]


def gguf_package() -> Any:
    """Import and return the package gguf. Raise ConfigError if it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(
            f"--format gguf needs the package gguf: pip install 'gemini-runtime[gguf]' ({error})"
        ) from error
    return gguf


def export_gguf(source: Path, target: Path, kind: str) -> Exported:
    """Write the model in ``source`` to the file ``target``, with matrices of type ``kind`` (``"f16"``,
    ``"bf16"``, ``"q8_0"``) and vectors in fp32.

    Raises:
        ConfigError: the package gguf is not installed, the model or its tokenizer cannot be exported to GGUF,
            or ``target`` exists.
        IoError: the file cannot be written.
    """
    gguf = gguf_package()
    refuse_existing(target)
    config = read_config(source)
    refuse_quantized(config, source)
    shape = ModelShape(config, source)
    tokenizer = read_tokenizer(source, shape.vocabulary, config)
    with SafetensorsFiles.of_directory(source) as files:
        tensors = _tensors(gguf, shape, files, kind, source)
        with published(target, "export the model") as made:
            writer = gguf.GGUFWriter(made, shape.architecture.name)
            with closing(writer):
                writer.add_type("model")
                writer.add_name(name_of(str(source)))
                writer.add_file_type(int(_file_type(gguf, kind)))
                writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
                shape.add_to(writer)
                tokenizer.add_to(writer)
                nbytes, largest_bytes = _write(writer, tensors)
    padded = [each.name for each in tensors if each.kind == "f16" and kind == "q8_0"]
    notes = [*tokenizer.notes]
    if padded:
        notes.append(
            f"{len(padded)} matrices stay f16, because their row length is not a multiple of 32, "
            f"such as {padded[0]}"
        )
    return Exported(Copied(len(tensors), nbytes, largest_bytes), shape.architecture.name, tuple(notes))


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the file, with its ``shape`` and ``kind`` there. GGUFWriter uses it as an array: it reads
    ``nbytes`` and calls :meth:`tofile`.

    ``stored``: its sources, several for the matrices of all experts; empty for the factors of rope.
    """

    gguf: Any
    name: str
    shape: tuple[int, ...]
    kind: str
    stored: tuple[StoredTensor, ...]
    model: ModelShape

    @property
    def ggml_type(self) -> Any:
        return getattr(self.gguf.GGMLQuantizationType, self.kind.upper())

    @property
    def nbytes(self) -> int:
        block, size = self.gguf.GGML_QUANT_SIZES[self.ggml_type]
        return int(np.prod(self.shape, dtype=np.int64)) // int(block) * int(size)

    @property
    def most_bytes(self) -> int:
        """How much of it is in memory at a time."""
        return self.nbytes // max(1, len(self.stored))

    def tofile(self, file: Any) -> None:
        """Write the values in the file's encoding, one source at a time. Raises OSError."""
        if not self.stored:
            factors = self.model.rope_factors()
            assert factors is not None
            factors.numpy().tofile(file)
        for stored in self.stored:
            self._rows_of(stored).tofile(file)

    def _rows_of(self, stored: StoredTensor) -> npt.NDArray[Any]:
        """Return the values in the file's encoding, uint8 with one row of bytes per row. They are converted a
        few rows at a time."""
        found = self.model.rearranged(stored.name, stored.read()).reshape(-1, self.shape[-1])
        made = np.empty((len(found), self.most_bytes // len(found)), dtype=np.uint8)
        step = max(1, _CONVERTED_NUMEL // self.shape[-1])
        for first in range(0, len(found), step):
            made[first : first + step] = self._converted(found[first : first + step], stored.name)
        return made

    def _converted(self, rows: torch.Tensor, name: str) -> npt.NDArray[Any]:
        if self.kind == "f16":
            return cast(rows, torch.float16, name).contiguous().view(torch.uint8).numpy()
        if self.kind == "bf16":
            return rows.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
        plain = rows.float().contiguous().numpy()
        made = plain if self.kind == "f32" else self.gguf.quants.quantize(plain, self.ggml_type)
        found: npt.NDArray[Any] = made.view(np.uint8)
        return found


def _tensors(gguf: Any, shape: ModelShape, files: SafetensorsFiles, kind: str, source: Path) -> list[_Tensor]:
    """Return the tensors of the file in the order in which they are written."""
    arch = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[shape.architecture.name]
    names = gguf.get_tensor_name_map(arch, shape.blocks)
    wanted = set(gguf.MODEL_TENSORS[arch])
    experts: dict[str, dict[int, StoredTensor]] = {}  # by name in GGUF
    found: dict[str, _Tensor] = {}
    if shape.rope_factors() is not None:
        found[_ROPE_FACTORS] = _Tensor(gguf, _ROPE_FACTORS, (shape.head_size // 2,), "f32", (), shape)
    for stored in files.values():
        if not shape.is_weight(stored.name):
            continue
        together, number = shape.expert_of(stored.name) or (stored.name, None)
        named = names.get_type_and_name(together, try_suffixes=(".weight", ".bias"))
        is_known = named is not None and named[0] in wanted and shape.has_place_for(stored.name)
        is_known = is_known and (number is not None) == (named[0] in _expert_types(gguf))
        if named is None or not is_known or not stored.dtype.is_floating_point:
            raise ConfigError(
                f"{source} has {stored.name!r}, for which GGUF has no name in {shape.architecture.name!r}"
            )
        tensor_type, name = named
        _check_shape(shape, stored, source)
        if number is not None:
            is_down = tensor_type == gguf.MODEL_TENSOR.FFN_DOWN_EXP
            _check_expert(shape, stored, is_down=is_down, source=source)
            _add_expert(experts.setdefault(name, {}), number, stored, shape, source)
            continue
        if name in found:
            raise InputError(
                f"{source} has two tensors for the GGUF name {name!r}, the second is {stored.name!r}"
            )
        is_router = tensor_type == gguf.MODEL_TENSOR.FFN_GATE_INP
        is_vector = len(stored.shape) < 2 or tensor_type == gguf.MODEL_TENSOR.POS_EMBD
        placed = shape.shape_of(stored.name, stored.shape)
        own = "f32" if is_vector or is_router else _kind_of(gguf, placed, kind)
        found[name] = _Tensor(gguf, name, placed, own, (stored,), shape)
    for name, each in experts.items():
        found[name] = _experts_together(gguf, name, each, kind, shape, source)
    _require_complete(found, shape, source)
    return list(found.values())


def _expert_types(gguf: Any) -> tuple[Any, ...]:
    types = gguf.MODEL_TENSOR
    return types.FFN_GATE_EXP, types.FFN_UP_EXP, types.FFN_DOWN_EXP


def _kind_of(gguf: Any, placed: tuple[int, ...], kind: str) -> str:
    """Return ``kind``, or f16 if rows are no whole blocks of it."""
    block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q8_0][0]
    return "f16" if kind == "q8_0" and placed[-1] % block else kind


def _check_expert(shape: ModelShape, stored: StoredTensor, *, is_down: bool, source: Path) -> None:
    """Raise InputError if a matrix of an expert has not the shape that the config says."""
    inner, width = shape.expert_inner, shape.width
    wanted = (width, inner) if is_down else (inner, width)
    if stored.shape != wanted:
        raise InputError(
            f"{source}: {stored.name!r} has shape {list(stored.shape)}, and config.json says experts of "
            f"width {inner} in a model of width {width}; copy or download the model again"
        )


def _add_expert(
    to: dict[int, StoredTensor], number: int, stored: StoredTensor, shape: ModelShape, source: Path
) -> None:
    """Add a matrix of one expert. Raises InputError if the model has no such expert, or the matrix twice."""
    if number >= shape.experts or number in to:
        raise InputError(
            f"{source} has {stored.name!r}, and config.json says {shape.experts} experts with one such "
            "matrix each; copy or download the model again"
        )
    to[number] = stored


def _experts_together(
    gguf: Any, name: str, each: dict[int, StoredTensor], kind: str, shape: ModelShape, source: Path
) -> _Tensor:
    """Return the matrices of all experts as one tensor. Raises InputError if an expert is missing."""
    in_order = tuple(each[number] for number in sorted(each))
    if len(in_order) < shape.experts:
        raise InputError(
            f"{source} has {len(in_order)} of {shape.experts} experts in {name!r} of GGUF; copy or download "
            "the model again"
        )
    placed = (shape.experts, *in_order[0].shape)
    return _Tensor(gguf, name, placed, _kind_of(gguf, placed, kind), in_order, shape)


def _require_complete(names: Iterable[str], shape: ModelShape, source: Path) -> None:
    """Raise InputError if a tensor is missing: a block lacks one that others have, or one outside the blocks
    is missing."""
    blocks: dict[str, set[str]] = {str(number): set() for number in range(shape.blocks)}
    whole: set[str] = set()
    for name in names:
        kind, _, rest = name.partition(".")
        number, _, own = rest.partition(".")
        (blocks[number] if kind == "blk" else whole).add(own if kind == "blk" else name)
    every = set().union(*blocks.values(), _OF_EXPERTS if shape.experts else ())
    missing = [f"blk.{number}.{name}" for number, own in blocks.items() for name in sorted(every - own)]
    missing += sorted({"token_embd.weight", "output_norm.weight"} - whole)
    if "output.weight" not in whole and not shape.is_tied:
        missing.append("output.weight")
    if missing or not every:
        raise InputError(
            f"{source} lacks {len(missing)} tensors of its config.json, such as "
            f"{(missing or ['blk.0'])[0]!r} in GGUF; copy or download the model again"
        )


def _check_shape(shape: ModelShape, stored: StoredTensor, source: Path) -> None:
    """Raise InputError if the number of rows differs from the config, so that rows cannot be rearranged."""
    heads = {".q_proj.weight": shape.heads, ".k_proj.weight": shape.kv_heads}
    heads |= {".q_proj.bias": shape.heads, ".k_proj.bias": shape.kv_heads}
    for end, count in heads.items():
        if stored.name.endswith(end) and stored.shape[:1] != (count * shape.head_size,):
            raise InputError(
                f"{source}: {stored.name!r} has shape {list(stored.shape)}, but config.json has "
                f"{count} heads of size {shape.head_size}; copy or download the model again"
            )
    if shape.experts and stored.name.endswith((".mlp.gate.weight", ".block_sparse_moe.gate.weight")):
        wanted = (shape.experts, shape.width)
        if stored.shape != wanted:
            raise InputError(
                f"{source}: {stored.name!r} has shape {list(stored.shape)}, and config.json says "
                f"{shape.experts} experts and a width of {shape.width}; copy or download the model again"
            )
    if stored.name.endswith(("embed_tokens.weight", "wte.weight")) and stored.shape[:1] != (
        shape.vocabulary,
    ):
        raise InputError(
            f"{source}: {stored.name!r} has shape {list(stored.shape)}, but config.json has "
            f"vocab_size {shape.vocabulary}; copy or download the model again"
        )


def _write(writer: Any, tensors: list[_Tensor]) -> tuple[int, int]:
    """Write header, fields and tensors. Return the bytes of all tensors and of the largest one."""
    for each in tensors:
        info = np.empty(0, dtype=np.float32).dtype
        writer.add_tensor_info(each.name, each.shape, info, each.nbytes, raw_dtype=each.ggml_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for each in tensors:
        writer.write_tensor_data(each)
    return sum(each.nbytes for each in tensors), max((each.most_bytes for each in tensors), default=0)


def _file_type(gguf: Any, kind: str) -> Any:
    return getattr(gguf.LlamaFileType, f"MOSTLY_{kind.upper()}")
