"""Files of models, optimizers and schedulers: safetensors and JSON, without pickle."""

from gemini.parallel.booster.checkpoint.model_files import load_model, save_model
from gemini.parallel.booster.checkpoint.optimizer_files import (
    load_optimizer,
    load_scheduler,
    save_optimizer,
    save_scheduler,
)
from gemini.parallel.booster.checkpoint.sources import Names, parameter_names
from gemini.parallel.booster.checkpoint.writing import FileLayout, layout, require_true

__all__ = [
    "FileLayout",
    "Names",
    "layout",
    "load_model",
    "load_optimizer",
    "load_scheduler",
    "parameter_names",
    "require_true",
    "save_model",
    "save_optimizer",
    "save_scheduler",
]
