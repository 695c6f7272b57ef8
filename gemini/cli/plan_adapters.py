"""Adapters, and the base below them in 4 or 8 bits, on a model of transformers that is planned."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemini.errors import ConfigError
from gemini.integrations.quantized_loading import QuantizedOutline, stored_dtype
from gemini.runtime.config import GeminiConfig

Change = Callable[[nn.Module], nn.Module]

_ONE_PROCESS = ("tp", "pp", "sp", "dp", "search", "space", "operators")


def adapting(adapter: Any, quantization: Any, directory: Path) -> Change:
    """Return what quantizes the weights of a model on ``meta`` and puts adapters on it, as loading it from
    ``directory`` would.

    Args:
        adapter: a config of PEFT; None: no adapters.
        quantization: a config of transformers; None: the weights stay as they are.
    """
    outline = None
    if quantization is not None:
        outline = QuantizedOutline(quantization, stored_dtype(directory))

    def change(module: nn.Module) -> nn.Module:
        if outline is not None:
            outline.put_on(module)
        if adapter is None:
            return module
        import peft

        adapted: Any = peft.get_peft_model(module, adapter)
        return adapted  # type: ignore[no-any-return]

    return change


def adapting_of(options: argparse.Namespace) -> Change:
    """Return :func:`adapting` as ``--lora`` and ``--quantize`` of ``gemini plan`` have it.

    Raises:
        ConfigError: they do not go with the other options, or a package is missing.
    """
    given = "--lora" if options.lora else "--quantize"
    directory = Path(options.model)
    if not directory.is_dir():
        raise ConfigError(
            f"{given} is for a model of transformers; give its directory, not {options.model!r}"
        )
    if others := [f"--{name}" for name in _ONE_PROCESS if getattr(options, name)]:
        raise ConfigError(f"{given} is planned for one process; leave out {', '.join(others)}")
    if not options.lora:
        raise ConfigError("--quantize freezes the base, so adapters train; add --lora 16")
    from gemini.jobs.finetune.adapters import require_peft
    from gemini.jobs.finetune.engine import quantization_named

    peft = require_peft()
    precision = None if options.dtype == "fp32" else options.dtype
    compute = GeminiConfig.from_options(mixed_precision=precision).precision or torch.float32
    quantization = None if options.quantize is None else quantization_named(options.quantize, compute)
    return adapting(peft.LoraConfig(r=options.lora, target_modules="all-linear"), quantization, directory)
