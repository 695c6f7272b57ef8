"""What a checkpoint can be made of, or loaded into."""

from __future__ import annotations

from torch import nn

from gemini.errors import ConfigError
from gemini.managed_model import ManagedModel, handle_of
from gemini.optim.gemini_optimizer import GeminiOptimizer


def checked_model(model: nn.Module | ManagedModel, optimizer: GeminiOptimizer) -> ManagedModel:
    """Return the handle of ``model``.

    Raises:
        ConfigError: they are not a managed model and its optimizer.
    """
    handle = handle_of(model)
    if not isinstance(optimizer, GeminiOptimizer):
        raise ConfigError(
            f"optimizer is a {type(optimizer).__name__}, not a GeminiOptimizer: a checkpoint has the chunks "
            "of a managed model; save plain ones with torch.save, or pass what was wrapped"
        )
    if optimizer.model is not handle:
        raise ConfigError("the optimizer updates another model than the one given")
    return handle
