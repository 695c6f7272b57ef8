"""Files of a model's weights, in the formats of transformers."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemini.checkpoint.sealed_file import making_sense_of
from gemini.errors import CheckpointError, ConfigError
from gemini.model.ddp import GeminiDDP
from gemini.parallel.booster.checkpoint.sources import (
    OWN_METADATA,
    TensorFiles,
    config_file,
    extra_in,
    model_contents,
    parameter_names,
    tied_names,
    unwrap,
)
from gemini.parallel.booster.checkpoint.writing import FileLayout, save_tensors
from gemini.parallel.booster.checkpoint.zero import copy_to_masters
from gemini.parallel.booster.data_parallel import ShardedData
from gemini.parallel.booster.ranks import Ranks
from gemini.parallel.zero import LowLevelZeroOptimizer

logger = logging.getLogger(__name__)


def save_model(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    checkpoint: str | os.PathLike[str],
    layout: FileLayout,
    ranks: Ranks,
) -> None:
    """Write a model; see :meth:`Booster.save_model`."""
    _refuse_meta(model)
    held = model_contents(model, optimizer)
    companions = config_file(unwrap(model))
    save_tensors(checkpoint, "model", held.sources, held.metadata(), layout, ranks, companions)


def load_model(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    checkpoint: str | os.PathLike[str],
    ranks: Ranks | None,
    *,
    strict: bool,
) -> None:
    """Read a model; see :meth:`Booster.load_model`. ``ranks`` are the ranks that read it together; None for a
    model that is not boosted, which this process reads alone.
    """
    _refuse_meta(model)
    own = unwrap(model).state_dict(keep_vars=True)
    with ExitStack() as stack:

        def read() -> dict[str, Any]:
            files = stack.enter_context(TensorFiles(checkpoint))
            with making_sense_of(Path(checkpoint)):
                state = _state_for(own, files)
            _check_fits(own, state, files, checkpoint, strict=strict)
            return {name: value for name, value in state.items() if name in own}

        # If one rank cannot read, the others would continue with different weights or wait for it in the
        # load.
        known = read() if ranks is None else ranks.together(read)
        with torch.no_grad():
            target = model if isinstance(model, (GeminiDDP, ShardedData)) else unwrap(model)
            target.load_state_dict(known, strict=False)
        if isinstance(optimizer, LowLevelZeroOptimizer):
            copy_to_masters(optimizer, parameter_names(model), known)


def _state_for(own: Mapping[str, Any], files: TensorFiles) -> dict[str, Any]:
    """Return the state dict in a checkpoint, under all names that the model has for each tensor."""
    state: dict[str, Any] = dict(files)
    for alias, stored in files.metadata.items():
        if stored in files and not alias.startswith(OWN_METADATA):
            state.setdefault(alias, files[stored])
    tensors = {name: value for name, value in own.items() if isinstance(value, torch.Tensor)}
    tied = tied_names(tensors)
    for alias, first in tied.items():  # the file may have either name, or both
        files.first_of((first, alias))
        for there, lacking in ((first, alias), (alias, first)):
            if there in state:
                state.setdefault(lacking, state[there])
    return state | extra_in(files.metadata)


def _check_fits(
    own: Mapping[str, Any],
    state: Mapping[str, Any],
    files: TensorFiles,
    checkpoint: str | os.PathLike[str],
    *,
    strict: bool,
) -> None:
    """Raise CheckpointError if the checkpoint's names or shapes do not match the model."""
    missing = sorted(own.keys() - state.keys())
    unexpected = sorted(files.keys() - own.keys())
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"{checkpoint} was made for another model: {len(missing)} names of the model are not in it "
            f"{missing[:3]}, and {len(unexpected)} of its names are not in the model {unexpected[:3]}; pass "
            "strict=False to load the names that both have"
        )
    if missing or unexpected:
        logger.warning(
            "%s: not in the checkpoint, so not loaded: %s; not in the model, so ignored: %s",
            checkpoint,
            missing or "nothing",
            unexpected or "nothing",
        )
    for name in own.keys() & state.keys():
        here, there = own[name], state[name]
        shapes = [tuple(value.shape) if isinstance(value, torch.Tensor) else None for value in (here, there)]
        if shapes[0] != shapes[1]:
            raise CheckpointError(
                f"{checkpoint} was made for another model: {name!r} has shape {shapes[1]} in the checkpoint "
                f"and {shapes[0]} in the model"
            )


def _refuse_meta(model: nn.Module) -> None:
    held = [*unwrap(model).named_parameters(), *unwrap(model).named_buffers()]
    on_meta = [name for name, tensor in held if tensor.is_meta]
    if on_meta:
        raise ConfigError(
            f"{on_meta[0]!r} and {len(on_meta) - 1} more tensors are on 'meta' and have no memory; boost the "
            "model with GeminiPlugin, or call model.to_empty(device='cpu') first"
        )
