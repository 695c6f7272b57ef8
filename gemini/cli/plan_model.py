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

from gemini.cli.plan_hugging_face import hugging_face
from gemini.errors import ConfigError
from gemini.forecast.rehearsal import Example, LossFunction, ModelSource, mean_of_outputs
from gemini.integrations.model_directory import CONFIG, MOST_LAYERS
from gemini.jobs.gpt.model import GPT, GPTConfig, language_loss
from gemini.runtime import init_on
from gemini.runtime.intercept.nested import map_tensors
from gemini.system.config import did_you_mean
from gemini.system.input_files import InputDirectory

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
_MOST_WIDTH = 10_000_000  # bytes of a weight are counted in 64 bits
_GPT_KEYS = ("layers", "hidden", "heads", "vocab")


@dataclass(frozen=True)
class ModelOptions:
    """What the command line says about the model besides its name."""

    seq: int
    checkpointing: bool
    seq_is_asked: bool = True


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
    if _is_directory(path) or path.suffix == ".json":
        return hugging_face(
            InputDirectory(path).file(CONFIG) if _is_directory(path) else path,
            options.seq,
            seq_is_asked=options.seq_is_asked,
            checkpointing=options.checkpointing,
        )
    if ":" in name:
        return _factory(name, options)
    raise ConfigError(
        f"{name!r} is no model{did_you_mean(name, PRESETS)}: give a preset ({', '.join(PRESETS)}), "
        "gpt:layers=..,hidden=..,heads=.., module:function, or the path of a Hugging Face config.json"
    )


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name that is too long, a directory that may not be looked into
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
    """Return a size of a GPT. Raises ConfigError where nobody would live to see it built."""
    most = MOST_LAYERS if key == "layers" else _MOST_WIDTH
    if len(value) > 18 or int(value) > most:
        raise ConfigError(f"{key} is {value:.20} in {name!r:.100}; at most {most} are built: correct it")
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
        raise ConfigError(f"--checkpointing: {name} has no parameter 'checkpointing' to pass it to")

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
