"""LowLevelZeroPlugin: ZeRO stages 1 and 2."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from gemini.device import current_device
from gemini.errors import ConfigError
from gemini.parallel import zero
from gemini.parallel.booster.mixed_precision import Precision
from gemini.parallel.booster.plugin.base import Boosted, Criterion, Plugin
from gemini.parallel.booster.plugin.options import keyword_names, refuse_unknown, with_precision

_OPTIONS = keyword_names(zero.LowLevelZeroPlugin) - {"stage", "precision"}


class LowLevelZeroPlugin(Plugin):
    """Train with :class:`gemini.parallel.LowLevelZeroOptimizer`: optimizer states are cut over ranks, with
    stage 2 gradients too.

    Any element-wise torch optimizer may be used. The model is moved to the current GPU where there is one.

    Args:
        stage: 1 or 2.
        precision: ``"fp16"``, ``"bf16"`` or ``"fp32"``; None is what the booster says, and fp32 if it says
            nothing, as with every plugin.
        options: further keywords of :class:`gemini.parallel.zero.LowLevelZeroPlugin`.

    Raises:
        TypeError: a keyword that it does not have. ConfigError: a value that cannot be.
    """

    def __init__(self, stage: int = 1, precision: str | None = None, **options: Any) -> None:
        refuse_unknown("LowLevelZeroPlugin", options, _OPTIONS)
        zero.LowLevelZeroPlugin(stage, precision or "fp32", **options)  # what cannot be is told here
        self._stage = stage
        self._precision = precision
        self._options = options
        self.process_group = options.get("dp_process_group")

    def configure(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        criterion: Criterion | None,
        precision: Precision | None,
    ) -> Boosted:
        """See :class:`Plugin`."""
        chosen, options = with_precision(
            "LowLevelZeroPlugin", "precision", {"precision": self._precision}, self._options, precision
        )
        engine = zero.LowLevelZeroPlugin(self._stage, chosen["precision"] or "fp32", **options)
        if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            raise ConfigError(
                "the model is on 'meta', and every rank of LowLevelZeroPlugin holds the whole of it: build "
                "it on 'cpu', or use GeminiPlugin"
            )
        model.to(current_device())
        boosted, optim = engine.configure(model, optimizer)
        return Boosted(boosted, optim, criterion)

    def no_sync(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> AbstractContextManager[Any]:
        """See :class:`Plugin`."""
        if not isinstance(optimizer, zero.LowLevelZeroOptimizer):
            raise ConfigError(
                "no_sync() has no gradients to keep: the model was boosted without an optimizer"
            )
        return optimizer.no_sync()
