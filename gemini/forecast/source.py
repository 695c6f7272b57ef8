"""ModelSource: how to build a model, for any batch size, without its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gemini.errors import ConfigError
from gemini.forecast.rehearsal import LossFunction
from gemini.runtime import init_on
from gemini.runtime.intercept.nested import map_tensors


@dataclass(frozen=True)
class Example:
    """A model on ``meta``, and arguments that it can be called with."""

    module: nn.Module
    inputs: tuple[Any, ...]


@dataclass(frozen=True)
class ModelSource:
    """``build(batch)`` makes the model anew, with inputs of that batch size; it runs while torch makes
    everything on ``meta``. ``tokens`` is what one sample counts in the report, in ``unit``.

    ``notes``: lines for the report, on what was decided in the user's place. ``resized(tokens)`` is the same
    with another number of tokens per sample, where that can be had; ``spans``: the numbers that are rehearsed
    instead of ``tokens``.
    """

    name: str
    build: Callable[[int], Example]
    loss: LossFunction
    tokens: int = 1
    unit: str = "samples"
    notes: tuple[str, ...] = ()
    resized: Callable[[int], ModelSource] | None = None
    spans: tuple[int, int, int] | None = None

    def example(self, batch: int) -> Example:
        """Return the model and inputs for ``batch``.

        Raises:
            ConfigError: the model has parameters with memory, none to train, or inputs that are no tensors.
        """
        with init_on("meta"):
            example = self.build(batch)
        real = [name for name, param in example.module.named_parameters() if not param.is_meta]
        if real:
            raise ConfigError(
                f"{self.name}: parameter {real[0]!r} (one of {len(real)}) was made with memory; build it "
                "with torch's default device, which is 'meta' while the factory runs"
            )
        if not any(param.requires_grad for param in example.module.parameters()):
            raise ConfigError(
                f"{self.name} has no parameter that requires a gradient: there is nothing to train"
            )
        example.module.train()
        return Example(example.module, map_tensors(example.inputs, lambda tensor: tensor.to("meta")))


def mean_of_outputs(outputs: Any, _inputs: Any) -> torch.Tensor:
    """Return a scalar that depends on what the model returned: its ``loss`` where it has one, else the mean
    of the first floating-point tensor.

    Raises:
        ConfigError: there is none.
    """
    loss = getattr(outputs, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    found: list[torch.Tensor] = []
    map_tensors(outputs, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    for tensor in found:
        if tensor.is_floating_point() and tensor.requires_grad:
            return tensor.float().mean()
    raise ConfigError(
        f"the model returned {type(outputs).__name__} without a floating-point tensor to train on; "
        "have the factory return (module, inputs, loss) with loss(outputs, inputs) -> scalar"
    )
