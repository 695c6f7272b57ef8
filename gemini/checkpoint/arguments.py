"""What a checkpoint can be made of, or loaded into."""

from __future__ import annotations

from gemini.errors import ConfigError
from gemini.managed_model import ManagedModel
from gemini.optim.gemini_optimizer import GeminiOptimizer


def check_managed(model: ManagedModel, optimizer: GeminiOptimizer) -> None:
    """Raise ConfigError where they are not a managed model and its optimizer."""
    for name, value, kind in (("model", model, GeminiDDP), ("optimizer", optimizer, GeminiOptimizer)):
        if not isinstance(value, kind):
            raise ConfigError(
                f"{name} is a {type(value).__name__}, not a {kind.__name__}: a checkpoint has the chunks of "
                "a managed model; save plain ones with torch.save, or pass what was wrapped"
            )
    if optimizer.model is not model:
        raise ConfigError("the optimizer updates another model than the one given")
