"""Checkpoints of a whole model in one file. A file saved with one plugin can be loaded with another."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemini.checkpoint.contents import Scheduler
from gemini.errors import CheckpointError, ConfigError
from gemini.parallel.booster.ranks import Ranks
from gemini.parallel.engine.initialize import partition_of_layers
from gemini.parallel.launch import global_context
from gemini.parallel.moe.divide import divided_experts
from gemini.parallel.partition import Partition
from gemini.parallel.pipeline import BuiltStages
from gemini.parallel.pipeline.remote_modules import RemoteModule
from gemini.system.durable import replacing
from gemini.system.files import io_errors, open_regular


def save_checkpoint(
    file: str | os.PathLike[str],
    epoch: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: Scheduler | None = None,
) -> None:
    """Write ``epoch`` and the whole model's state dict to ``file``, and the states of the others if given.

    Collective; the first rank writes. An earlier file stays until the new one is complete. :func:`torch.load`
    can read it. For large models use ``Booster.save_model`` or :func:`gemini.checkpoint.save`, which hold one
    tensor at a time.

    Raises:
        IoError: the file cannot be written; CheckpointError on the other ranks.
        ConfigError: the model is in pipeline stages.
    """
    _refuse_stages("save_checkpoint", model)
    parts = _partition_of_model(model)
    state = model.state_dict(keep_vars=parts is not None)  # parts of tensors, to be gathered
    content: dict[str, Any] = {"epoch": epoch, "model": state if parts is None else parts.gather_state(state)}
    if optimizer is not None:
        content["optimizer"] = optimizer.state_dict()
    if lr_scheduler is not None:
        content["lr_scheduler"] = lr_scheduler.state_dict()
    path, ranks = Path(file), Ranks()

    def write() -> None:
        if ranks.is_first:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path, "save_checkpoint") as temporary:
                torch.save(content, temporary)

    ranks.together(write)


def load_checkpoint(
    file: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: Scheduler | None = None,
    strict: bool = True,
) -> int:
    """Read a file of :func:`save_checkpoint`, without running any code in it, and return its epoch.

    Collective; each rank reads the file. Ranks continue after all have read it: if one cannot, nothing is
    loaded on any. The other ranks wait for a rank that does not call this.

    Raises:
        IoError: the file cannot be read.
        CheckpointError: it is no such file, an entry to load is missing, or another rank could not read it.
        ConfigError: the model is in pipeline stages.
    """
    _refuse_stages("load_checkpoint", model)
    path = Path(file)

    def read() -> dict[str, Any]:
        with io_errors("load_checkpoint", path):
            os.close(open_regular(path))  # raises for a FIFO, at which torch would wait
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            raise CheckpointError(f"{path} was not written by save_checkpoint: {error}") from error
        if not isinstance(found, dict) or not {"epoch", "model"} <= found.keys():
            raise CheckpointError(
                f"{path} was not written by save_checkpoint: it lacks epoch or model; load the state dict of "
                "a model with model.load_state_dict(torch.load(file))"
            )
        wanted = {"optimizer": optimizer, "lr_scheduler": lr_scheduler}
        lacking = [key for key, value in wanted.items() if value is not None and key not in found]
        if lacking:
            raise CheckpointError(
                f"{path} has no {', '.join(lacking)}; pass it to save_checkpoint when you save"
            )
        return dict(found)

    content = Ranks().together(read)
    parts = _partition_of_model(model)
    state = content["model"]
    model.load_state_dict(state if parts is None else parts.cut_state(state), strict=strict)
    if optimizer is not None:
        optimizer.load_state_dict(content["optimizer"])
    if lr_scheduler is not None:
        lr_scheduler.load_state_dict(content["lr_scheduler"])
    return int(content["epoch"])


def _refuse_stages(what: str, model: nn.Module) -> None:
    """Raise ConfigError if other ranks have stages or experts of ``model``, or the run has stages."""
    parts = (RemoteModule, BuiltStages)
    has_parts = any(isinstance(module, parts) for module in model.modules())
    in_stages = global_context.pipeline_parallel_size > 1 or has_parts
    if in_stages or divided_experts(model) is not None:
        raise ConfigError(
            f"{what} handles one file of the whole model, but other ranks have "
            f"{'stages' if in_stages else 'experts'} of it; use engine.booster.save_model(engine.model, "
            "directory) and load_model, which handle all parts, and save_optimizer and load_optimizer for "
            "the optimizer's states"
        )


def _partition_of_model(model: nn.Module) -> Partition | None:
    """Return the partition of ``model``; None if it has all its tensors whole."""
    known = getattr(model, "partition", None)
    if isinstance(known, Partition):
        return known
    return partition_of_layers(getattr(model, "module", model))
