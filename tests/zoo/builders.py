"""Models and arguments out of rows of the table."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch_models
from catalogue import Row
from timm_alone import import_timm
from torch import Tensor, nn


def built(row: Row, seed: int = 0) -> nn.Module:
    """Return the model of ``row`` with random weights, computing activations again where it can."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    return _BUILDERS[row.library](row).train()


def recomputes(model: nn.Module) -> bool:
    """Say whether ``model`` computes activations again in backward."""
    flags = ("gradient_checkpointing", "grad_checkpointing")
    return any(vars(part).get(flag) for part in model.modules() for flag in flags)


def arguments(row: Row, index: int) -> dict[str, Any]:
    """Return the arguments of ``row``, the same for the same ``index``."""
    generator = torch.Generator().manual_seed(1000 + index)
    made: dict[str, Any] = {}
    for name, value in row.arguments.items():
        made[name] = made[value] if isinstance(value, str) else _made(value, generator)
    return made


def _made(value: list[Any], generator: torch.Generator) -> Tensor:
    """Return a tensor: of ``["float", *sizes]``, ``["int", below, *sizes]``, ``["full", value, *sizes]``,
    ``["after", token, times, below, *sizes]`` (rows that begin with so many of a token), or as it stands."""
    kind, *numbers = value
    if kind == "float":
        return torch.randn(numbers, generator=generator)
    if kind == "int":
        return torch.randint(numbers[0], numbers[1:], generator=generator)
    if kind == "full":
        return torch.full(numbers[1:], numbers[0])
    if kind == "after":
        token, times, below, *sizes = numbers
        tokens = torch.randint(below, sizes, generator=generator)
        tokens[..., :times] = token
        return tokens
    return torch.tensor(value)


def called(row: Row, model: nn.Module, given: dict[str, Any]) -> Any:
    """Call ``model`` the way its library does: by name, or by position."""
    return model(**given) if row.library in ("transformers", "peft") else model(*given.values())


def tensors_in(out: Any) -> list[Tensor]:
    """Return the floating-point tensors in what a model returned, in order."""
    if isinstance(out, Tensor):
        return [out] if out.is_floating_point() else []
    if isinstance(out, dict):
        out = list(out.values())
    return [tensor for part in out for tensor in tensors_in(part)] if isinstance(out, (list, tuple)) else []


def loss_of(out: Any) -> Tensor:
    """Return the model's own loss, or the mean squares of what it returned."""
    own = getattr(out, "loss", None)
    if own is not None:
        return own
    trained = [tensor for tensor in tensors_in(out) if tensor.requires_grad]
    return torch.stack([tensor.float().square().mean() for tensor in trained]).sum()


def _transformers_model(row: Row) -> nn.Module:
    import transformers

    kind = getattr(transformers, row.build)
    model = kind(kind.config_class(**row.options))
    if model.supports_gradient_checkpointing and row.recomputes:
        model.activation_checkpointing_enable()
    return model


def _peft_model(row: Row) -> nn.Module:
    import peft

    options = dict(row.options)
    base = replace(row, build=options.pop("base"), options=options.pop("model"))
    return peft.get_peft_model(_transformers_model(base), getattr(peft, row.build)(**options))


def _timm_model(row: Row) -> nn.Module:
    timm = import_timm()
    place, _, kind = row.build.rpartition(".")  # a name that timm knows, or a class and where it is
    make = getattr(getattr(timm.models, place), kind) if place else partial(timm.create_model, kind)
    model = make(**row.options)
    with suppress(AssertionError, AttributeError):  # how models say that they have none
        model.set_grad_checkpointing(True)
    return model


def _torch_model(row: Row) -> nn.Module:
    return getattr(torch_models, row.build)(**row.options)


_BUILDERS: dict[str, Callable[[Row], nn.Module]] = {
    "transformers": _transformers_model,
    "peft": _peft_model,
    "timm": _timm_model,
    "torch": _torch_model,
}
