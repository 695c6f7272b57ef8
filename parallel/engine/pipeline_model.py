"""Build this rank's stages from a sequence of layers, by the launched configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from gemini.errors import ConfigError
from gemini.parallel.launch import LAYERS, MODELS, ParallelMode, get_dist_logger, global_context
from gemini.parallel.launch.config import read_config
from gemini.parallel.launch.registry import Registry
from gemini.parallel.pipeline.layers import stretch_of

_POLICIES = {"layer": "uniform", "parameter": "balanced"}


def build_pipeline_model(model: nn.Sequential, num_chunks: int = 1, verbose: bool = False) -> nn.Module:
    """Return this rank's part of ``model``, a sequence of layers divided into equal numbers: a Sequential, or
    with several chunks a ModuleList of Sequentials. The rest of the model may be deleted.

    ``BuiltStages.of(...)`` trains it. ``verbose`` logs the indices of the layers.

    Raises:
        ConfigError: ``model`` is no Sequential, or has fewer layers than chunks.
    """
    if not isinstance(model, nn.Sequential):
        raise ConfigError(
            f"build_pipeline_model() cuts an nn.Sequential, but the model is a {type(model).__name__}; use "
            "PipelinableContext, or pass the whole model to initialize(), which cuts it"
        )
    return _own_stretch(list(model), num_chunks, "layer", verbose)


def build_pipeline_model_from_cfg(
    config: str | os.PathLike[str] | Mapping[str, Any] | Sequence[Mapping[str, Any]],
    num_chunks: int = 1,
    partition_method: str = "parameter",
    verbose: bool = False,
) -> nn.Module:
    """Return this rank's part of the model that ``config`` describes, as :func:`build_pipeline_model`.

    Args:
        config: ``dict(type=..., **arguments)`` of a model of ``MODELS``, which is an nn.Sequential or has
            such dicts of its layers as ``layers_cfg``; or a list of those dicts; or the path of a
            configuration file that has either as ``model``. ``type`` is a class, or the name of one in
            ``LAYERS`` (``MODELS``) or in torch.nn.
        partition_method: ``"parameter"`` balances the numbers of parameters, ``"layer"`` those of layers.

    Raises:
        ConfigError: it describes no sequence of layers, or one with fewer layers than chunks.
    """
    if partition_method not in _POLICIES:
        raise ConfigError(f"partition_method is {partition_method!r}; give 'parameter' or 'layer'")
    return _own_stretch(_layers_of(config), num_chunks, partition_method, verbose)


def _own_stretch(layers: Sequence[nn.Module], num_chunks: int, method: str, verbose: bool) -> nn.Module:
    mode = ParallelMode.PIPELINE
    size = global_context.pipeline_parallel_size
    rank = global_context.get_local_rank(mode) if size > 1 else 0
    stages = stretch_of(layers, num_chunks, size, rank, _POLICIES[method])
    if verbose:
        places = {id(layer): place for place, layer in enumerate(layers)}
        chunks = [stages] if num_chunks == 1 else stages.children()
        rows = [[places[id(layer)] for layer in chunk.children()] for chunk in chunks]
        said = [f"{min(row)} to {max(row)}" for row in rows]
        get_dist_logger().info(
            f"rank {global_context.get_global_rank()} of {size} stages builds layers {', '.join(said)} of "
            f"{len(layers)}"
        )
    return stages


def _layers_of(config: Any) -> list[nn.Module]:
    """Return the layers that a configuration describes."""
    if isinstance(config, (str, os.PathLike)):
        said = read_config(config)
        if "model" not in said:
            raise ConfigError(f"{config} has no model; add model = dict(type='MyModel', ...) to it")
        config = said["model"]
    if isinstance(config, Mapping):
        model = _build(MODELS, config)
        if isinstance(model, nn.Sequential):
            return list(model)
        config = getattr(model, "layers_cfg", None)
        if config is None:
            raise ConfigError(
                f"{type(model).__name__} is no nn.Sequential and has no layers_cfg; give it a list of "
                "dict(type=...), one for each layer in the order of the forward pass"
            )
    return [_build(LAYERS, entry) for entry in config]


def _build(registry: Registry, entry: Any) -> nn.Module:
    """Return an object of the class that ``entry`` names, made with its other items."""
    if not isinstance(entry, Mapping) or "type" not in entry:
        raise ConfigError(
            f"{entry!r} does not describe a module; write dict(type='Linear', in_features=8, ...)"
        )
    arguments = dict(entry)
    kind = arguments.pop("type")
    if isinstance(kind, str):
        found = None if registry.has(kind) else getattr(nn, kind, None)
        kind = registry.get_module(kind) if found is None else found
    made = kind(**arguments)
    if not isinstance(made, nn.Module):
        raise ConfigError(f"{entry!r} makes a {type(made).__name__}, which is no nn.Module")
    return made
