"""Weights that transformers quantizes while loading, or finds quantized in safetensors.

Chunks are laid out before weights are read, so the layout of each quantized weight is needed first. One
weight of each kind and shape, a sample, is quantized from zeros or read from the files. Copies of samples
stand in the model while adapters are applied and chunks are laid out. Then transformers loads one weight
after another: each goes into its chunk as soon as it is quantized, and its 16-bit values are freed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemini import _C
from gemini.errors import ConfigError
from gemini.integrations.model_directory import CONFIG, MAX_CONFIG_BYTES
from gemini.integrations.safetensors_files import SafetensorsFiles
from gemini.runtime import init_on
from gemini.runtime.adopt import Adopted
from gemini.runtime.growth import Filling
from gemini.runtime.intercept.precision import is_quantized
from gemini.runtime.intercept.quantized import form_of, like
from gemini.runtime.storage.model_storage import ManagedSlot, ModelStorage
from gemini.system.input_files import InputDirectory, errors_of

_BYTES_BEFORE = 2  # per element before quantization, in most files
# malloc keeps freed tensors of less than 32 MiB that lie between used ones; trim after this many bytes.
_MOST_FREED_BYTES = 8 * 2**20
_Kind = tuple[Any, ...]  # a key: weights with equal keys are quantized to the same layout


def loads_part_by_part(quantizer: Any, *, safetensors: bool) -> bool:
    """Return whether quantized weights can be written to chunks one by one. If not, transformers loads the
    whole model first: torch files of quantized weights are read at once, and torchao unties embeddings that
    it quantizes only then.
    """
    unties = getattr(quantizer.quantization_config, "untie_embedding_weights", False)
    return not unties and (safetensors or not quantizer.pre_quantized)


class QuantizedWeights:
    """The quantized weights of one model on ``meta`` while transformers loads it. For one thread."""

    def __init__(self, model: nn.Module, samples: Mapping[str, nn.Parameter], quantizer: Any) -> None:
        """``samples``: for the name of each quantized weight, a weight with the same layout."""
        self._model, self._quantizer = model, quantizer
        # Looked up now, before adapters change the names of modules.
        self._places = [(*_place(model, name), sample) for name, sample in samples.items()]
        # (id of a module, parameter name) -> the slot of the weight, and its sample.
        self._awaited: dict[tuple[int, str], tuple[ManagedSlot, nn.Parameter]] = {}
        self._freed_bytes = 0  # estimate of the bytes freed since the last malloc_trim
        self.adopted: list[Adopted] = []

    @classmethod
    def of(cls, model: Any, loading: Any, stored: SafetensorsFiles | None) -> QuantizedWeights:
        """Return the weights of ``model`` that loading will quantize. ``loading``: transformers'
        LoadStateDictConfig. ``stored``: the files. Takes the memory of the largest weight in 16 bits, and of
        one quantized weight of each kind.
        """
        quantizer = loading.hf_quantizer
        if quantizer.pre_quantized and stored is not None:
            makers = _stored_samples(model, loading, stored)
        else:
            makers = _fresh_samples(model, quantizer)
        return cls(model, _samples(model, makers, {}), quantizer)

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Put samples into the model for the block; see :meth:`stand_in`."""
        before = [owner._parameters[key] for owner, key, _ in self._places]
        self.stand_in()
        try:
            yield
        finally:
            for (owner, key, _), without_values in zip(self._places, before, strict=True):
                owner._parameters[key] = without_values

    def stand_in(self, *, without_values: bool = False) -> None:
        """Put quantized weights of the right layout, with arbitrary values, into the model, and mark it as
        quantized, which PEFT checks. ``without_values``: weights on ``meta``.
        """
        model: Any = self._model
        model.hf_quantizer = self._quantizer
        self._quantizer.postprocess_model(model)
        for owner, key, sample in self._places:
            for param in owner.parameters(recurse=False):  # unquantized ones, as after loading
                param.requires_grad_(param.is_floating_point())
            owner._parameters[key] = like(sample, owner, without_values=without_values)

    def await_values(self, module: nn.Module, storage: ModelStorage) -> None:
        """Record the slot of each weight. ``module``: the model, with adapters if there are any. Call it
        while samples stand in the model.
        """
        slots = {id(param): storage.slots[name] for name, param in module.named_parameters()}
        for owner, key, sample in self._places:
            self._awaited[id(owner), key] = slots[id(owner._parameters[key])], sample

    def take(self, owner: nn.Module, key: str, param: nn.Parameter | None, filling: Filling) -> bool:
        """If ``param``, which ``owner`` gets as ``key``, is an awaited quantized weight, move it into its
        chunk and make it managed. Return whether it is one.

        Raises:
            ConfigError: it was quantized to another layout than the sample.
        """
        if param is None or (id(owner), key) not in self._awaited or not is_quantized(param):
            return False
        slot, sample = self._awaited[id(owner), key]
        param.requires_grad_(False)  # transformers marks some stored quantized weights as trainable
        form, expected = form_of(slot.name, param, owner), form_of(slot.name, sample, owner)
        if str(form) != str(expected):
            raise ConfigError(
                f"{slot.name!r} was quantized to {form}, and {expected} was expected of its shape; load the "
                "model with transformers and give it to gemini.manage()"
            )
        del self._awaited[id(owner), key]
        self.adopted.append(filling.adopt(param, slot, owner))
        self._freed_bytes += sample.numel() * _BYTES_BEFORE
        if self._freed_bytes >= _MOST_FREED_BYTES:
            self._freed_bytes = 0
            _C.malloc_trim()
        return True

    def refuse_missing(self) -> None:
        """Raise ConfigError if an awaited weight was not loaded."""
        for slot, _ in self._awaited.values():
            raise ConfigError(
                f"the files lack values of {slot.name!r}, which is to be quantized; give a directory with "
                "all weights, or name the layer among those that are not quantized"
            )


def stored_dtype(directory: Path) -> torch.dtype:
    """Return the dtype in which transformers loads the model of a directory: that of its config, or of its
    first floating-point weight. Raises InputError.
    """
    fields = InputDirectory(directory).json(CONFIG, MAX_CONFIG_BYTES)
    named = getattr(torch, str(fields.get("dtype") or fields.get("torch_dtype")), None)
    if isinstance(named, torch.dtype):
        return named
    with SafetensorsFiles.of_directory(directory) as stored:
        types = (stored[name].dtype for name in stored)
        return next((dtype for dtype in types if dtype.is_floating_point), torch.float32)


class QuantizedOutline:
    """Gives models on ``meta`` quantized weights with the layout that loading them gives, and arbitrary
    values.
    """

    def __init__(self, quantization: Any, dtype: torch.dtype) -> None:
        """``quantization``: a config of transformers. ``dtype``: of the files."""
        self._quantization, self._dtype = quantization, dtype
        self._made: dict[_Kind, nn.Parameter] = {}  # reused when the model is built again

    @contextmanager
    def put_on(self, model: Any) -> Iterator[None]:
        """Quantize ``model``, from transformers. Takes memory like :meth:`QuantizedWeights.of`.

        During the block the weights are on ``meta``, so that adapters that copy or compute with them (DoRA)
        are on ``meta`` too.

        Raises:
            ConfigError: transformers cannot quantize it.
        """
        from transformers.quantizers.auto import AutoHfQuantizer

        with errors_of("transformers cannot quantize the model"), init_on("cpu"):
            quantizer: Any = AutoHfQuantizer.from_config(
                copy.deepcopy(self._quantization), pre_quantized=False
            )
            quantizer.validate_environment(device_map={"": "cpu"})
            for param in model.parameters():
                param.data = param.data.to(self._dtype)
            with init_on("meta"):
                quantizer.preprocess_model(model, dtype=self._dtype, device_map={"": "cpu"})
            samples = _samples(model, _fresh_samples(model, quantizer), self._made)
            weights = QuantizedWeights(model, samples, quantizer)
        weights.stand_in(without_values=True)
        yield
        weights.stand_in()


_Makers = Iterable[tuple[str, _Kind, Callable[[], nn.Parameter]]]


def _samples(model: Any, makers: _Makers, made: dict[_Kind, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return a sample for the name of each quantized weight. ``made`` caches samples by kind and
    is extended.
    """
    samples: dict[str, nn.Parameter] = {}
    for name, kind, make in makers:
        if kind not in made:
            made[kind] = _kept_as_it_was(model, name, make)
        if is_quantized(made[kind]):
            samples[name] = made[kind]
    return samples


def _fresh_samples(model: Any, quantizer: Any) -> _Makers:
    """Yield (name, kind, make) for the weights to quantize; ``make()`` quantizes zeros."""
    by_name = hasattr(getattr(quantizer.quantization_config, "quant_type", None), "fqn_to_config")
    for name, param in list(model.named_parameters()):
        if not quantizer.param_needs_quantization(model, name):
            continue
        owner, _ = _place(model, name)
        source = getattr(
            owner, "source_cls", None
        )  # set on bitsandbytes' layers; Conv1D stores its weight transposed
        shape = param.shape[::-1] if getattr(source, "__name__", "") == "Conv1D" else param.shape
        kind = (type(owner), source, shape, param.dtype, name if by_name else "")
        yield name, kind, partial(_quantize_zeros, model, quantizer, name, shape, param.dtype)


def _quantize_zeros(
    model: Any, quantizer: Any, name: str, shape: torch.Size, dtype: torch.dtype
) -> nn.Parameter:
    zeros = torch.zeros(shape, dtype=dtype, device="cpu")
    made = quantizer.get_quantize_ops().convert(
        {name: [zeros]}, full_layer_name=name, model=model, missing_keys=set()
    )
    owner, key = _place(model, name)
    found: nn.Parameter = made.get(name, owner._parameters[key])
    return found


def _stored_samples(model: Any, loading: Any, stored: SafetensorsFiles) -> _Makers:
    """Yield (name, kind, make) for the weights that are quantized in the files; ``make()`` reads one."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = loading.weight_mapping or []
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    outlines = model.state_dict()
    parts: dict[str, list[tuple[str, str]]] = {}
    for file_name in stored:
        name, pattern = rename_source_key(file_name, renamings, converters, model.base_model_prefix, outlines)
        if pattern is not None and name in outlines:
            parts.setdefault(name, []).append((pattern, file_name))
    said = getattr(loading.hf_quantizer, "metadata", {})
    for name, found in parts.items():
        converter = of_pattern[found[0][0]]
        if len(found) < 2 or not any(hasattr(step, "hf_quantizer") for step in converter.operations):
            continue
        shapes = tuple((pattern, stored[each].shape, stored[each].dtype) for pattern, each in found)
        kind = (type(_place(model, name)[0]), shapes, said.get(name, ""))
        yield name, kind, partial(_read_sample, model, loading, converter, name, found, stored)


def _read_sample(
    model: Any,
    loading: Any,
    converter: Any,
    name: str,
    parts: Iterable[tuple[str, str]],
    stored: SafetensorsFiles,
) -> nn.Parameter:
    made = copy.deepcopy(converter)
    for pattern, file_name in parts:
        made.add_tensor(name, file_name, pattern, stored[file_name].read)
    values = made.convert(name, model=model, config=model.config, hf_quantizer=loading.hf_quantizer)[name]
    values = values[0] if isinstance(values, list) else values
    return values if isinstance(values, nn.Parameter) else nn.Parameter(values, requires_grad=False)


def _kept_as_it_was(model: nn.Module, name: str, make: Callable[[], nn.Parameter]) -> nn.Parameter:
    """Return the result of ``make`` and restore the module of the weight ``name`` afterwards."""
    owner, key = _place(model, name)
    changed = (owner._parameters, vars(owner._parameters[key]), vars(owner))
    before = [dict(each) for each in changed]
    try:
        return make()
    finally:
        for each, content in zip(changed, before, strict=True):
            each.clear()
            each.update(content)


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that has a parameter, and the parameter's name there."""
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key
