"""What a checkpoint can be made of, or loaded into."""

from __future__ import annotations

import os
from pathlib import Path

from gemini.ddp import GeminiDDP
from gemini.errors import CheckpointError, ConfigError
from gemini.optim.gemini_optimizer import GeminiOptimizer


def check_managed(model: GeminiDDP, optimizer: GeminiOptimizer) -> None:
    """Raise ConfigError where they are not a managed model and its optimizer."""
    for name, value, kind in (("model", model, GeminiDDP), ("optimizer", optimizer, GeminiOptimizer)):
        if not isinstance(value, kind):
            raise ConfigError(
                f"{name} is a {type(value).__name__}, not a {kind.__name__}: a checkpoint has the chunks of "
                "a managed model; save plain ones with torch.save, or pass what was wrapped"
            )
    if optimizer.model is not model:
        raise ConfigError("the optimizer updates another model than the one given")


def refuse_shared_directory(model: GeminiDDP, directory: str | os.PathLike[str]) -> None:
    """Raise CheckpointError, on all of them, where ranks that hold different parts of a model name one
    directory: a checkpoint has one part, of the same names and shapes as the others."""
    part = model._gemini.manager.part
    if part is None:
        return
    said = part.peers.say(str(Path(os.fsdecode(directory)).resolve()))
    if len(set(said)) < len(said):
        mine = said[part.peers.share.place]
        raise CheckpointError(
            f"{len(said)} ranks hold different parts of the model, and several name {mine}; give each a "
            "directory of its own, for example with mesh['tp'].get_local_rank() in its name"
        )
