"""The seeds' helper functions: a model and an optimizer wrapped by stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemini.errors import ConfigError
from gemini.model.ddp import GeminiDDP
from gemini.optim import GeminiOptimizer
from gemini.system.config import keyword_names, refuse_unknown

if TYPE_CHECKING:
    from gemini.parallel.zero import LowLevelZeroModel, LowLevelZeroOptimizer

_MODEL = keyword_names(GeminiDDP) - {"module"}
_NAMED = {"optim", "optimizer", "model", "stage", "clip_grad_norm"}  # said otherwise, or by the model


def zero_model_wrapper(
    model: nn.Module, zero_stage: int = 1, gemini_config: dict[str, Any] | None = None
) -> GeminiDDP | LowLevelZeroModel:
    """Return :class:`GeminiDDP` of ``model`` for stage 3; for stages 1 and 2 a module that leaves it as it is
    and tells :func:`zero_optim_wrapper` the stage.

    ``gemini_config`` holds keywords of GeminiDDP, for stage 3 only.

    Raises:
        ConfigError: another stage, or ``gemini_config`` with stages 1 and 2.
    """
    refuse_unknown("zero_model_wrapper's gemini_config", gemini_config or {}, _MODEL)
    if zero_stage == 3:
        return GeminiDDP(model, **(gemini_config or {}))
    if zero_stage not in (1, 2):
        raise ConfigError(f"zero_stage={zero_stage}; there are 1, 2 and 3")
    if gemini_config:
        raise ConfigError(f"gemini_config is for zero_stage=3, not {zero_stage}; leave it out")
    # Not above: it brings torch.distributed along, which `import gemini` does without.
    from gemini.parallel.zero import LowLevelZeroModel

    return LowLevelZeroModel(model, stage=zero_stage)


def zero_optim_wrapper(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, max_norm: float = 0.0, **options: Any
) -> GeminiOptimizer | LowLevelZeroOptimizer:
    """Wrap ``optimizer`` for a model from :func:`zero_model_wrapper`.

    ``options`` are keywords of GeminiOptimizer or, for stages 1 and 2, of LowLevelZeroOptimizer.

    Raises:
        ConfigError: another model, or an optimizer that the stage cannot drive.
    """
    if isinstance(model, GeminiDDP):
        refuse_unknown("zero_optim_wrapper", options, keyword_names(GeminiOptimizer) - _NAMED)
        return GeminiOptimizer(optimizer, model, max_norm=max_norm, **options)
    from gemini.parallel.zero import LowLevelZeroModel, LowLevelZeroOptimizer

    if not isinstance(model, LowLevelZeroModel):
        raise ConfigError(f"a {type(model).__name__} does not come from zero_model_wrapper")
    refuse_unknown("zero_optim_wrapper", options, keyword_names(LowLevelZeroOptimizer) - _NAMED)
    return LowLevelZeroOptimizer(optimizer, stage=model.stage, clip_grad_norm=max_norm, **options)
