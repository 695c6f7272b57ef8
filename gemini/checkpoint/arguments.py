"""What a checkpoint can be made of, or loaded into."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from gemini.errors import CheckpointError, ConfigError
from gemini.model.managed_model import ManagedModel, handle_of
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


def refuse_shared_directory(model: ManagedModel, directory: str | os.PathLike[str]) -> None:
    """Raise CheckpointError, on all of them, where ranks that hold different parts of a model name one
    directory: a checkpoint has one part, of the same names and shapes as the others."""
    part = model.manager.part
    if part is None:
        return
    said = part.peers.say(str(Path(os.fsdecode(directory)).resolve()))
    if len(set(said)) < len(said):
        mine = said[part.peers.share.place]
        raise CheckpointError(
            f"{len(said)} ranks hold different parts of the model, and several name {mine}; give each a "
            "directory of its own, for example with mesh['tp'].get_local_rank() in its name"
        )
