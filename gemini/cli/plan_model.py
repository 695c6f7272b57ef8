"""What ``gemini plan MODEL`` may name, and how it becomes a model on ``meta``."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemini.errors import ConfigError
from gemini.files import parse_json, read_regular
from gemini.forecast.rehearsal import LossFunction
from gemini.forecast.source import Example, ModelSource, mean_of_outputs
from gemini.runtime import init_on
from gemini.runtime.nested import map_tensors
from gemini.train.model import GPT, GPTConfig, language_loss

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
_MAX_CONFIG_BYTES = 2**24  # some list a label for each of their classes
_GPT_KEYS = ("layers", "hidden", "heads", "vocab")


@dataclass(frozen=True)
class ModelOptions:
    """What the command line says about the model besides its name."""

    seq: int
    checkpointing: bool


def find_model(name: str, options: ModelOptions) -> ModelSource:
    """Return the model that ``name`` stands for: a preset, ``gpt:...``, ``module:function``, or a Hugging
    Face config.

    Raises:
        ConfigError: it stands for none, or what it needs is not installed.
    """
    name_or_shape = PRESETS.get(name, name)
    if name_or_shape.startswith("gpt:"):
        return _gpt(name, name_or_shape.removeprefix("gpt:"), options)
    path = Path(name)
    if path.is_dir() or path.suffix == ".json":
        return _hugging_face(path / "config.json" if path.is_dir() else path, options)
    if ":" in name:
        return _factory(name, options)
    raise ConfigError(
        f"{name!r} is no model: give a preset ({', '.join(PRESETS)}), gpt:layers=..,hidden=..,heads=.., "
        "module:function, or the path of a Hugging Face config.json"
    )


def _gpt(name: str, shape: str, options: ModelOptions) -> ModelSource:
    fields: dict[str, int] = {}
    for part in filter(None, shape.split(",")):
        key, _, value = part.partition("=")
        if key not in _GPT_KEYS or not value.isdecimal():
            raise ConfigError(
                f"{part!r} in {name!r}: write gpt: and then {', '.join(_GPT_KEYS)} as key=number"
            )
        fields[key] = int(value)
    config = GPTConfig(**fields, seq=options.seq, checkpoint_activations=options.checkpointing)
    return ModelSource(
        name,
        lambda batch: Example(GPT(config), (_tokens(batch, options.seq),)),
        lambda logits, inputs: language_loss(logits, inputs[0]),
        tokens=options.seq,
        unit="tokens",
    )


def _tokens(batch: int, seq: int) -> torch.Tensor:
    return torch.empty(batch, seq, dtype=torch.int64, device="meta")


# -- a factory of the user's ----------------------------------------------------------------------


def _factory(name: str, options: ModelOptions) -> ModelSource:
    function = _import(name)
    accepted = inspect.signature(function).parameters
    given: dict[str, Any] = {"seq": options.seq} if "seq" in accepted else {}
    if "checkpointing" in accepted:
        given["checkpointing"] = options.checkpointing
    elif options.checkpointing:
        raise ConfigError(f"--checkpointing: {name} has no parameter 'checkpointing' to pass it to")

    def made(batch: int) -> tuple[Any, ...]:
        made = function(**given, **({"batch": batch} if "batch" in accepted else {}))
        made = made if isinstance(made, tuple) else (made,)
        if not 1 <= len(made) <= 3 or not isinstance(made[0], nn.Module):
            raise ConfigError(
                f"{name} returned {made!r:.200}; it must be a module, (module, inputs) "
                "or (module, inputs, loss)"
            )
        return made

    def build(batch: int) -> Example:
        module, *rest = made(batch)
        if not rest:
            return Example(module, (_tokens(batch, options.seq),))
        inputs = rest[0] if isinstance(rest[0], tuple) else (rest[0],)
        return Example(module, inputs if "batch" in accepted else _with_batch(inputs, batch))

    with init_on("meta"):
        first = made(1)
    loss: LossFunction = first[2] if len(first) == 3 else mean_of_outputs
    sequences = len(first) == 1 or "seq" in accepted
    return ModelSource(
        name, build, loss, options.seq if sequences else 1, "tokens" if sequences else "samples"
    )


def _import(name: str) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise ConfigError(f"{name!r} names no module; write package.module:function, without a path")
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
    """Give every input another first dimension."""

    def resized(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(batch, *tensor.shape[1:], dtype=tensor.dtype, device="meta")

    changed: tuple[Any, ...] = map_tensors(inputs, resized)
    return changed


# -- Hugging Face ---------------------------------------------------------------------------------


def _hugging_face(path: Path, options: ModelOptions) -> ModelSource:
    try:
        fields = parse_json(read_regular(path, _MAX_CONFIG_BYTES))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the model config {path}: {error}") from error
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise ConfigError(f'{path} is no Hugging Face model config: it has no "model_type"')
    try:
        import transformers  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise ConfigError(
            f"{path} describes a {fields['model_type']!r} model, which the package transformers builds: "
            f"pip install transformers ({error})"
        ) from error
    for name in ("dtype", "torch_dtype"):  # --dtype says what to compute in; masters are fp32
        fields.pop(name, None)
    try:
        config = transformers.AutoConfig.for_model(**fields)
    except Exception as error:  # of as many classes as transformers has checks
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"transformers takes {path} for no {fields['model_type']!r} model: {reason:.300}; correct it, or "
            "install the version of transformers that it was written by"
        ) from error
    wanted = list(fields.get("architectures") or ())
    classes: list[Any] = [getattr(transformers, each) for each in wanted if hasattr(transformers, each)]
    if wanted and not classes:
        raise ConfigError(
            f"transformers has no {' or '.join(map(repr, wanted))}, the architectures of {path}: correct the "
            "name, install a version of transformers that has it, or take the entry out, for a model "
            "without a head"
        )

    def build(batch: int) -> Example:
        module = classes[0]._from_config(config) if classes else transformers.AutoModel.from_config(config)
        if options.checkpointing:
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return Example(_Keywords(module), (_hugging_face_inputs(module, config, batch, options.seq),))

    images = hasattr(config, "image_size")
    return ModelSource(
        f"{Path(path.parent.name, path.name)} ({fields['model_type']})",
        build,
        mean_of_outputs,
        1 if images else options.seq,
        "samples" if images else "tokens",
    )


class _Keywords(nn.Module):
    """A model that is called with a dict of its keyword arguments."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, arguments: dict[str, Any]) -> Any:
        """Call the model."""
        return self.model(**arguments)


def _hugging_face_inputs(module: nn.Module, config: Any, batch: int, seq: int) -> dict[str, Any]:
    accepted = inspect.signature(module.forward).parameters
    if "pixel_values" in accepted and "input_ids" not in accepted:
        size, channels = config.image_size, getattr(config, "num_channels", 3)
        inputs = {"pixel_values": torch.empty(batch, channels, size, size, device="meta")}
        return inputs | (
            {"labels": torch.empty(batch, dtype=torch.int64, device="meta")} if "labels" in accepted else {}
        )
    inputs = {"input_ids": _tokens(batch, seq)}
    if getattr(config, "is_encoder_decoder", False) and "labels" not in accepted:
        inputs["decoder_input_ids"] = _tokens(batch, seq)
    if "labels" in accepted:
        inputs["labels"] = _tokens(batch, seq)
    return inputs
