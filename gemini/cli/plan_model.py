"""Builds the model that ``gemini plan MODEL`` names, on ``meta``: a preset, a GPT shape, a Hugging Face
config or a factory. Nothing is downloaded."""

from __future__ import annotations

import argparse
import importlib
import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemini.cli.plan_inputs import ModelKind, PositionTable, most_tokens
from gemini.errors import ConfigError, GeminiError, in_words
from gemini.forecast.rehearsal import Example, LossFunction, ModelSource, mean_of_outputs
from gemini.integrations.model_directory import (
    CONFIG,
    MAX_CONFIG_BYTES,
    MOST_LAYERS,
    check_config,
    is_model_class,
)
from gemini.jobs.gpt.model import GPT, GPTConfig, language_loss
from gemini.runtime import init_on
from gemini.runtime.activation.recomputed_blocks import recompute_layers
from gemini.runtime.config import GeminiConfig
from gemini.runtime.intercept.nested import map_tensors
from gemini.system.config import did_you_mean
from gemini.system.input_files import InputDirectory, errors_of, read_document

_FACTORY = "write a factory (package.module:function, docs/plan.md) that returns the module and its inputs"


@dataclass(frozen=True)
class HuggingFaceModel:
    """A config as transformers reads it, and the class to build. ``architecture`` None: the model without a
    head."""

    path: Path
    config: Any
    architecture: Any
    checkpointing: bool

    def build(self) -> nn.Module:
        """Return the model. It is on ``meta`` if that is torch's default device."""
        import transformers  # type: ignore[import-not-found, unused-ignore]

        headless: Any = transformers.AutoModel
        try:
            module: Any = (
                headless.from_config(self.config)
                if self.architecture is None
                else self.architecture._from_config(self.config)
            )
            if self.checkpointing:
                recompute_layers(module)
        except Exception as error:  # model code may raise anything
            raise ConfigError(
                f"transformers cannot build the model of {self.path}: {in_words(error)}; correct the config"
            ) from error
        _leave_memory(module)
        built: nn.Module = module
        return built

    def kind(self, module: nn.Module) -> ModelKind:
        """Return the properties of a built model from which its inputs follow."""
        modalities = getattr(module, "input_modalities", None) or ()
        return ModelKind(
            type(module).__name__,
            self.config,
            {
                name: parameter.default is parameter.empty
                for name, parameter in inspect.signature(module.forward).parameters.items()
                if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            },
            getattr(module, "main_input_name", None) or "input_ids",
            (modalities,) if isinstance(modalities, str) else tuple(modalities),
        )

    def inputs(self, module: Any, batch: int, seq: int) -> dict[str, Any]:
        """Return the keyword arguments of a step; unknown ones are shaped like the model's ``dummy_inputs``.

        Raises:
            ConfigError: the shape of a required argument is unknown.
        """
        kind = self.kind(module)
        inputs = kind.inputs(batch, seq)
        missing = [name for name, required in kind.parameters.items() if required and name not in inputs]
        dummies: dict[str, Any] = getattr(module, "dummy_inputs", {}) if missing else {}
        unknown = [name for name in missing if not isinstance(dummies.get(name), torch.Tensor)]
        if unknown or not (inputs or missing):
            raise ConfigError(
                f"cannot make inputs for {kind.name} of {self.path} "
                f"({', '.join(unknown or kind.parameters):.200}); {_FACTORY}"
            )
        for name in missing:
            dummy = dummies[name]
            inputs[name] = torch.empty((batch, *dummy.shape[1:]), dtype=dummy.dtype, device="meta")
        return inputs


def hugging_face(
    path: Path,
    seq: int,
    *,
    seq_is_asked: bool,
    checkpointing: bool,
    adapted: Callable[[nn.Module], nn.Module] | None = None,
) -> ModelSource:
    """Return the model that a config describes, with ``adapted`` applied to it. A ``seq`` that the user did
    not ask for is shortened to the model's number of positions.

    Raises:
        ConfigError: the file, transformers or the model cannot be used.
    """
    fields = _read_config(path)
    model = _model_of(path, fields, checkpointing)
    doing = f"the model of {path} cannot be planned"
    with errors_of(doing):
        with init_on("meta"):
            first = model.build()
        kind = model.kind(first)
        limit = most_tokens(_position_tables(first), kind)
    notes = []
    if limit is not None and seq > limit:
        if seq_is_asked:
            raise ConfigError(
                f"--seq {seq}: {kind.name} of {path} has positions for {limit} tokens; give --seq {limit} or "
                "less, or raise the number of positions in the config"
            )
        notes.append(f"{kind.name} has positions for {limit} tokens: planned for --seq {limit}, not {seq}.")
        seq = limit

    def build(batch: int, seq: int) -> Example:
        with errors_of(doing):
            module = model.build()
            inputs = model.inputs(module, batch, seq)
            whole = module if adapted is None else adapted(module)
            return Example(_Keywords(whole), (inputs,), is_wrapped=True)

    def source(seq: int) -> ModelSource:
        return ModelSource(
            f"{Path(path.parent.name, path.name)} ({fields['model_type']})",
            lambda batch: build(batch, seq),
            mean_of_outputs,
            1 if kind.unit == "samples" else seq,
            kind.unit,
            notes=(*notes, *kind.notes),
            resized=None if kind.unit == "samples" else source,
        )

    return source(seq)


def _read_config(path: Path) -> dict[str, Any]:
    fields = read_document(path, "the model config", max_bytes=MAX_CONFIG_BYTES, kind=".json")
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise ConfigError(f'{path} is not a Hugging Face model config: it has no "model_type"')
    return fields


def _model_of(path: Path, fields: dict[str, Any], checkpointing: bool) -> HuggingFaceModel:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"{path} describes a {fields['model_type']!r} model, which needs the package "
            f"transformers: pip install transformers ({error})"
        ) from error
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns about missing values on meta
    kept = {name: value for name, value in fields.items() if name not in ("dtype", "torch_dtype")}
    check_config(kept, path)
    try:  # without a dtype: --dtype decides, and masters are fp32
        config = transformers.AutoConfig.for_model(**kept)
    except Exception as error:  # checks of configs may raise anything
        raise ConfigError(
            f"transformers cannot read {path} as a {fields['model_type']!r} model: "
            f"{in_words(error)}; correct it, or install the version of transformers that wrote it"
        ) from error
    said = fields.get("architectures") or []
    wanted = list(map(str, said)) if isinstance(said, list) else [str(said)]
    found = [getattr(transformers, each, None) for each in wanted]
    classes = [each for each in found if is_model_class(transformers, each)]
    if wanted and not classes:
        raise ConfigError(
            f"transformers has no {' or '.join(map(repr, wanted))}, the architectures of {path}: "
            "correct the name, install a version of transformers that has it, or remove the entry to "
            "plan the model without a head"
        )
    return HuggingFaceModel(path, config, classes[0] if classes else None, checkpointing)


def _leave_memory(module: nn.Module) -> None:
    """Move parameters to ``meta`` that old constructors (``torch.Tensor(8)``) allocate in memory."""
    if torch.get_default_device().type != "meta":
        return
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for each in module.modules():
        for name, param in each._parameters.items():
            if param is not None and not param.is_meta:
                made = moved.setdefault(param, nn.Parameter(param.to("meta"), param.requires_grad))
                each._parameters[name] = made


def _position_tables(module: nn.Module) -> list[PositionTable]:
    tables = []
    for name, each in module.named_modules():
        if isinstance(each, nn.Embedding):
            # RoBERTa's positions begin after the padding row; BART has an explicit offset.
            behind = 0 if each.padding_idx is None else each.padding_idx + 1
            tables.append(PositionTable(name, each.num_embeddings, getattr(each, "offset", behind)))
    return tables


class _Keywords(nn.Module):
    """Wraps a model such that it is called with a dict of its keyword arguments."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, arguments: dict[str, Any]) -> Any:
        """Call the model. Raises ConfigError for any exception that it raises."""
        try:
            return self.model(**arguments)
        except GeminiError:
            raise
        except Exception as error:  # model code may raise anything
            given = ", ".join(
                f"{name} {list(each.shape)}" if isinstance(each, torch.Tensor) else f"{name}={each}"
                for name, each in arguments.items()
            )
            raise ConfigError(
                f"{type(self.model).__name__} cannot be rehearsed with {given} without values: "
                f"{in_words(error)}; if the config is right, {_FACTORY}"
            ) from error


# The GPT of gemini train with the published shapes: learned positions, pre-LN, tied head.
PRESETS = {
    "gpt2": "gpt:layers=12,hidden=768,heads=12,vocab=50257",
    "gpt2-medium": "gpt:layers=24,hidden=1024,heads=16,vocab=50257",
    "gpt2-large": "gpt:layers=36,hidden=1280,heads=20,vocab=50257",
    "gpt2-xl": "gpt:layers=48,hidden=1600,heads=25,vocab=50257",
    "gpt3-6.7b": "gpt:layers=32,hidden=4096,heads=32,vocab=50257",
    "gpt3-13b": "gpt:layers=40,hidden=5120,heads=40,vocab=50257",
    "gpt3-175b": "gpt:layers=96,hidden=12288,heads=96,vocab=50257",
}
_MOST_WIDTH = 10_000_000  # larger weights could overflow 64-bit byte counts
_GPT_KEYS = ("layers", "hidden", "heads", "vocab")


@dataclass(frozen=True)
class ModelOptions:
    """Options of the command line about the model."""

    seq: int
    checkpointing: bool
    seq_is_asked: bool = True
    adapted: Callable[[nn.Module], nn.Module] | None = None  # only for a Hugging Face directory


def find_model(name: str, options: ModelOptions) -> ModelSource:
    """Return the model that ``name`` stands for: a preset, ``gpt:...``, ``module:function``, or a Hugging
    Face config.

    Raises:
        ConfigError: the name is unknown, or a required package is not installed.
    """
    name_or_shape = PRESETS.get(name, name)
    if name_or_shape.startswith("gpt:"):
        return _gpt(name, name_or_shape.removeprefix("gpt:"), options)
    path = Path(name)
    if _is_directory(path) or path.suffix == ".json":
        return hugging_face(
            InputDirectory(path).file(CONFIG) if _is_directory(path) else path,
            options.seq,
            seq_is_asked=options.seq_is_asked,
            checkpointing=options.checkpointing,
            adapted=options.adapted,
        )
    if ":" in name:
        return _factory(name, options)
    raise ConfigError(
        f"{name!r} is not a model{did_you_mean(name, PRESETS)}: give a preset "
        f"({', '.join(PRESETS)}), gpt:layers=..,hidden=..,heads=.., module:function, or the path of "
        "a Hugging Face config.json"
    )


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name that is too long, or a directory without permission
        return False


def _gpt(name: str, shape: str, options: ModelOptions) -> ModelSource:
    fields: dict[str, int] = {}
    for part in filter(None, shape.split(",")):
        key, _, value = part.partition("=")
        if key not in _GPT_KEYS or not value.isdecimal():
            raise ConfigError(
                f"{part!r} in {name!r}: write gpt: and then {', '.join(_GPT_KEYS)} as key=number"
            )
        fields[key] = _checked(key, value, name)
    config = GPTConfig(**fields, seq=options.seq, checkpoint_activations=options.checkpointing)
    return ModelSource(
        name,
        lambda batch: Example(GPT(config), (_tokens(batch, options.seq),)),
        lambda logits, inputs: language_loss(logits, inputs[0]),
        tokens=options.seq,
        unit="tokens",
    )


def _checked(key: str, value: str, name: str) -> int:
    """Return a size of a GPT. Raises ConfigError if it is too large to build in a reasonable time."""
    most = MOST_LAYERS if key == "layers" else _MOST_WIDTH
    if len(value) > 18 or int(value) > most:
        raise ConfigError(f"{key} is {value:.20} in {name!r:.100}; it must be at most {most}")
    return int(value)


def _tokens(batch: int, seq: int) -> torch.Tensor:
    return torch.empty(batch, seq, dtype=torch.int64, device="meta")


# -- a factory of the user's ----------------------------------------------------------------------


def _factory(name: str, options: ModelOptions) -> ModelSource:
    function = _import(name)
    accepted = inspect.signature(function).parameters
    given: dict[str, Any] = {}
    if "checkpointing" in accepted:
        given["checkpointing"] = options.checkpointing
    elif options.checkpointing:
        raise ConfigError(
            f"--checkpointing: the factory {name} has no parameter 'checkpointing'; add one, or leave "
            "--checkpointing out"
        )

    def made(batch: int, seq: int) -> tuple[Any, ...]:
        sizes = {"batch": batch, "seq": seq}
        made = function(**given, **{key: size for key, size in sizes.items() if key in accepted})
        made = made if isinstance(made, tuple) else (made,)
        if not 1 <= len(made) <= 3 or not isinstance(made[0], nn.Module):
            raise ConfigError(
                f"{name} returned {made!r:.200}; it must be a module, (module, inputs) "
                "or (module, inputs, loss)"
            )
        return made

    def build(batch: int, seq: int) -> Example:
        module, *rest = made(batch, seq)
        if not rest:
            return Example(module, (_tokens(batch, seq),))
        inputs = rest[0] if isinstance(rest[0], tuple) else (rest[0],)
        return Example(module, inputs if "batch" in accepted else _with_batch(inputs, batch))

    with init_on("meta"):
        first = made(1, options.seq)
    loss: LossFunction = first[2] if len(first) == 3 else mean_of_outputs
    sequences = len(first) == 1 or "seq" in accepted

    def source(seq: int) -> ModelSource:
        return ModelSource(
            name,
            lambda batch: build(batch, seq),
            loss,
            seq if sequences else 1,
            "tokens" if sequences else "samples",
            resized=source if sequences else None,
        )

    return source(options.seq)


def _import(name: str) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise ConfigError(f"{name!r} does not name a module; write package.module:function, without a path")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as python -m does
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError, SyntaxError) as error:
        raise ConfigError(
            f"cannot import {name!r}: {error}; run in its directory or set PYTHONPATH"
        ) from error
    if not callable(function):
        raise ConfigError(
            f"{name!r} is a {type(function).__name__}; it must be a function that returns a module"
        )
    found: Callable[..., Any] = function
    return found


def _with_batch(inputs: tuple[Any, ...], batch: int) -> tuple[Any, ...]:
    """Return the inputs with another first dimension."""

    def resized(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(batch, *tensor.shape[1:], dtype=tensor.dtype, device="meta")

    changed: tuple[Any, ...] = map_tensors(inputs, resized)
    return changed


_NO_ADAPTERS = ("space", "operators")
_NOT_QUANTIZED = ("tp", "pp", "sp", "search")  # options that need weights that can be cut


def adapting_of(options: argparse.Namespace) -> Callable[[nn.Module], nn.Module]:
    """Return a function that quantizes a model on ``meta`` and puts adapters on it, for ``--lora``,
    ``--lora-targets``, ``--dora`` and ``--quantize`` of ``gemini plan``.

    Raises:
        ConfigError: they are incompatible with other options, or a package is missing.
    """
    named = ("lora", "quantize", "dora", "lora_targets")
    given = next(f"--{name.replace('_', '-')}" for name in named if getattr(options, name))
    directory = Path(options.model)
    if not directory.is_dir():
        raise ConfigError(
            f"{given} needs a model of transformers; give its directory instead of {options.model!r}"
        )
    if not options.lora:
        reasons = {
            "--quantize": "freezes the base model, so only adapters train",
            "--dora": "is a variant of LoRA",
            "--lora-targets": "names the layers that get adapters of LoRA",
        }
        raise ConfigError(f"{given} {reasons[given]}; add --lora 16")
    from gemini.jobs.finetune.adapters import adapting, require_peft
    from gemini.jobs.finetune.config import ALL_LINEAR, names_of
    from gemini.jobs.finetune.engine import quantization_named, stored_quantization

    peft = require_peft()
    precision = None if options.dtype == "fp32" else options.dtype
    compute = GeminiConfig.from_options(mixed_precision=precision).precision or torch.float32
    quantization = stored_quantization(directory)
    if options.quantize is not None:
        quantization = quantization_named(options.quantize, compute)
    refused = _NO_ADAPTERS if quantization is None else (*_NO_ADAPTERS, *_NOT_QUANTIZED)
    if others := [f"--{name}" for name in refused if getattr(options, name)]:
        what = "adapters are" if quantization is None else "adapters on quantized weights are"
        raise ConfigError(
            f"{what} not supported with {', '.join(others)}: leave {'it' if len(others) == 1 else 'them'} out"
            + ("" if quantization is None else ", or use data parallelism only (--dp)")
        )
    layers = names_of(options.lora_targets or ALL_LINEAR)
    targets = ALL_LINEAR if layers == [ALL_LINEAR] else layers
    adapter = peft.LoraConfig(r=options.lora, use_dora=options.dora, target_modules=targets)
    return adapting(adapter, quantization, directory)
