"""Detects settings of DeepSpeed, FSDP and other engines in a script or its launcher.

Two engines cannot hold one model. Each setting is refused before anything is built, and the message says
which line to change.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from gemini.errors import ConfigError, printable

_MOST_CHARACTERS = 80  # shown of a setting in an error
_HELD = "but gemini manages it: only one of them can hold it"
# Arguments of TrainingArguments -> (engine, usual file name, related arguments).
_ARGUMENTS = {
    "deepspeed": ("DeepSpeed", "ds_config.json", ""),
    "fsdp": ("FSDP", "fsdp_config.json", " and fsdp_config="),
}
# Variables that accelerate launch sets -> the engine that they select.
_VARIABLES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "Accelerate's parallelism_config",
}
# Arguments of Accelerate's Accelerator -> the engine that they select.
_PLUGINS = {
    "deepspeed_plugin": "DeepSpeed",
    "deepspeed_plugins": "DeepSpeed",
    "fsdp_plugin": "FSDP",
    "megatron_lm_plugin": "Megatron-LM",
    "parallelism_config": "Accelerate's parallelism_config",
}
_TRUE = ("1", "true", "yes", "y", "t", "on")


def refuse_in_arguments(arguments: Any) -> None:
    """Raise ConfigError if TrainingArguments give the model to another engine."""
    for name, (engine, file, others) in _ARGUMENTS.items():
        value = getattr(arguments, name, None)
        if not value:
            continue
        named = value if isinstance(value, str) and value.endswith(".json") else file
        raise ConfigError(
            f"TrainingArguments({name}={printable(repr(value))[:_MOST_CHARACTERS]}) gives the model to "
            f"{engine}, {_HELD}. Take {name}={others} out; {_convert(named, 'trainer')}"
        )


def refuse_in_options(options: Mapping[str, Any]) -> None:
    """Raise ConfigError if arguments of an Accelerator give models to another engine."""
    for name, engine in _PLUGINS.items():
        if options.get(name) is not None:
            raise ConfigError(
                f"GeminiAccelerator({name}=...) gives the model to {engine}, {_HELD}. Take {name}= out; "
                f"{_convert('FILE', 'accelerate')}"
            )


def refuse_in_environment(target: str) -> None:
    """Raise ConfigError if a variable of accelerate launch gives models to another engine.

    ``target``: the value for ``gemini convert-config --for``.
    """
    for name, engine in _VARIABLES.items():
        value = os.environ.get(name, "")
        if value.strip().lower() in _TRUE:
            raise ConfigError(
                f"{name}={printable(value)} gives the model to {engine}, {_HELD}. Start the script by "
                "torchrun, or by accelerate launch with distributed_type: MULTI_GPU (NO for one process) in "
                "its file; "
                f"{_convert('default_config.yaml', target)}"
            )


def _convert(file: str, target: str) -> str:
    return f"gemini convert-config {printable(file)} --for {target} prints the lines with the same settings"
