"""``zero_model_wrapper`` and ``zero_optim_wrapper``: wrap a model or an optimizer for a given ZeRO stage."""

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
# Keywords that zero_optim_wrapper passes itself, or reads from the model.
_NAMED = {"optim", "optimizer", "model", "stage", "clip_grad_norm"}


def zero_model_wrapper(
    model: nn.Module, zero_stage: int = 1, gemini_config: dict[str, Any] | None = None
) -> GeminiDDP | LowLevelZeroModel:
    """Wrap ``model`` for a ZeRO stage: in :class:`GeminiDDP` for stage 3; for stages 1 and 2 in a module that
    leaves the parameters as they are and tells :func:`zero_optim_wrapper` the stage.

    Args:
        model: the model.
        zero_stage: 1, 2 or 3.
        gemini_config: keywords of GeminiDDP, for stage 3 only.

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
    # Imported here because it imports torch.distributed, which `import gemini` must not.
    from gemini.parallel.zero import LowLevelZeroModel

    return LowLevelZeroModel(model, stage=zero_stage)


def zero_optim_wrapper(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, max_norm: float = 0.0, **options: Any
) -> GeminiOptimizer | LowLevelZeroOptimizer:
    """Wrap ``optimizer`` for a model from :func:`zero_model_wrapper`.

    ``options`` are keywords of GeminiOptimizer or, for stages 1 and 2, of LowLevelZeroOptimizer.

    Raises:
        ConfigError: a model from elsewhere, an unknown option, or an optimizer that the stage cannot drive.
    """
    if isinstance(model, GeminiDDP):
        refuse_unknown("zero_optim_wrapper", options, keyword_names(GeminiOptimizer) - _NAMED)
        return GeminiOptimizer(optimizer, model, max_norm=max_norm, **options)
    from gemini.parallel.zero import LowLevelZeroModel, LowLevelZeroOptimizer

    if not isinstance(model, LowLevelZeroModel):
        raise ConfigError(f"a {type(model).__name__} does not come from zero_model_wrapper")
    refuse_unknown("zero_optim_wrapper", options, keyword_names(LowLevelZeroOptimizer) - _NAMED)
    return LowLevelZeroOptimizer(optimizer, stage=model.stage, clip_grad_norm=max_norm, **options)
