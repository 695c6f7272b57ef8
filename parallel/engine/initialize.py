"""initialize: create an engine with the features that a configuration names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from gemini.errors import ConfigError
from gemini.optim import CPUAdam
from gemini.parallel.booster import (
    Booster,
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
)
from gemini.parallel.booster.mixed_precision import MixedPrecision
from gemini.parallel.booster.plugin.base import Criterion
from gemini.parallel.booster.ranks import join_launched_group
from gemini.parallel.engine.amp import read_amp
from gemini.parallel.engine.engine import Engine, UpdateScheduler
from gemini.parallel.engine.gradient_handler import HandledPlugin, make_handlers
from gemini.parallel.engine.schedule import BaseSchedule, InterleavedPipelineSchedule, PipelineSchedule
from gemini.parallel.launch import ParallelMode, global_context
from gemini.parallel.launch.config import read_config
from gemini.parallel.launch.launching import ConfigLike
from gemini.parallel.moe.losses import MoeLoss
from gemini.parallel.partition import Partition
from gemini.parallel.pipeline import BuiltStages
from gemini.parallel.tensor.nn import partition_of
from gemini.parallel.tensor.nn.grid_layer import GridLayer

Initialized = tuple[Engine, Any, Any, Any]


@dataclass(frozen=True)
class Features:
    """The features that a configuration requests for training."""

    precision: MixedPrecision | None
    casts: bool
    zero: Mapping[str, Any] | None
    accumulation: int
    clip_grad_norm: float
    handlers: tuple[Mapping[str, Any], ...]

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Features:
        """Read a configuration with reserved keywords that were checked before.

        Raises:
            ConfigError: features exclude each other, or an option of mixed precision is not supported.
        """
        fp16, precision, casts = config.get("fp16"), None, False
        if fp16 is not None:
            if "mode" not in fp16:
                raise ConfigError("config: fp16 has no mode; write fp16=dict(mode=AMP_TYPE.TORCH)")
            amp = read_amp(fp16["mode"], {key: value for key, value in fp16.items() if key != "mode"})
            precision, casts = amp.precision, amp.casts
        handlers = _handlers(config)
        zero = config.get("zero")
        if handlers and (zero is not None or casts):
            what = "zero" if zero is not None else "AMP_TYPE.NAIVE"
            raise ConfigError(
                f"config: gradient handlers reduce whole gradients, but {what} cuts gradients and reduces "
                "the parts itself; leave one of them out"
            )
        accumulation, clip = config.get("gradient_accumulation"), config.get("clip_grad_norm")
        return cls(precision, casts, zero, accumulation or 1, float(clip or 0.0), handlers)


def initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    criterion: Criterion | None = None,
    train_dataloader: DataLoader[Any] | None = None,
    test_dataloader: DataLoader[Any] | None = None,
    lr_scheduler: Any = None,
    *,
    config: ConfigLike = None,
    plugin: Plugin | None = None,
    schedule: BaseSchedule | None = None,
) -> Initialized:
    """Return an engine, both data loaders and the scheduler, ready to train.

    ``fp16``, ``zero``, ``gradient_accumulation``, ``clip_grad_norm`` and ``gradient_handler`` of the
    configuration select the features. Without any, ranks share gradients as torch's DDP does.
    ``zero=dict(stage=1)`` to 3 takes the keywords of LowLevelZeroPlugin or, for 3, GeminiPlugin, and computes
    in fp16 by default. A model of layers over the launched ranks of tensor parallelism is one part of
    several: they clip by one norm and skip steps together. With pipeline stages the model is an ordinary
    whole model on each rank, which HybridParallelPlugin cuts, or ``BuiltStages`` with the stages that the
    program has built for this rank; batches go through ``engine.execute_schedule``.

    A ``MoeLoss`` is bound to the model. If ``parallel=dict(moe=dict(size=n))`` divides experts among ranks,
    gradients are shared as by ``MoeGradientHandler``, and files have all experts.

    With gradient accumulation the returned ``lr_scheduler`` steps with the updates. Use the model and the
    optimizer only through the engine.

    Args:
        optimizer: None for evaluation only.
        config: path, dict, or None for that of the launch.
        plugin: how to train, instead of ``zero`` in the configuration.
        schedule: the schedule of ``engine.execute_schedule``; None chooses it by the configuration.

    Raises:
        ConfigError: the configuration has features that exclude each other or do not fit this model.
    """
    join_launched_group()
    said = read_config(global_context.config if config is None else config)
    features = Features.read(said)
    if global_context.sequence_parallel_size > 1:
        raise ConfigError(
            "parallel: an engine does not support sequence parallelism; use Booster with "
            "HybridParallelPlugin(sp_size=...)"
        )
    divides = global_context.layout.ep > 1
    if plugin is None:
        if isinstance(model, BuiltStages) or global_context.pipeline_parallel_size > 1:
            plugin = choose_stages(features, model, optimizer, said)
        else:
            plugin = choose_plugin(features, partition_of_layers(model))
    elif features.zero is not None:
        raise ConfigError("config: zero and plugin= both choose how to train; give one of them")
    in_stages = isinstance(plugin, HybridParallelPlugin) and (plugin.pp_size > 1 or not divides)
    if isinstance(criterion, MoeLoss):
        if in_stages:
            raise ConfigError(
                "MoeLoss does not work with HybridParallelPlugin: a stage does not see the losses of "
                "routers in other stages; use the loss function itself, and MoeLayer(..., aux_weight=0.01)"
            )
        criterion.bind(model)
    booster = Booster(features.precision, plugin)
    if schedule is None and in_stages:
        chunks = model.num_chunks if isinstance(model, BuiltStages) else said.get("NUM_CHUNKS") or 1
        schedule = (InterleavedPipelineSchedule if chunks > 1 else PipelineSchedule)(booster)
    boosted, optim, loss, _, _ = booster.boost(model, optimizer, criterion, None, lr_scheduler)
    engine = Engine(
        booster,
        boosted,
        optim,
        loss,
        accumulation=features.accumulation,
        clip_grad_norm=features.clip_grad_norm,
        gradient_handlers=[]
        if optim is None
        else make_handlers(() if divides else features.handlers, boosted, optim, data_group()),
        schedule=schedule,
    )
    if lr_scheduler is not None and features.accumulation > 1:
        lr_scheduler = UpdateScheduler(lr_scheduler, engine)
    return engine, train_dataloader, test_dataloader, lr_scheduler


def choose_plugin(features: Features, parts: Partition | None) -> Plugin:
    """Return the plugin for a configuration; ``parts``: the parts of the model on this rank, None for all.
    Raises ConfigError if no plugin fits.
    """
    group, model_ranks = data_group(), None if parts is None else parts.model_ranks
    if global_context.layout.ep > 1:
        return choose_with_experts(features, parts)
    if features.handlers:
        return HandledPlugin(process_group=group, model_ranks=model_ranks)
    if features.zero is None and not features.casts:
        return TorchDDPPlugin(process_group=group, model_ranks=model_ranks)
    options = dict(features.zero or {})
    if model_ranks is not None and (features.zero is None or options.get("stage") == 3):
        options.pop("stage", None)
        precision = {} if features.casts else {"mixed_precision": "fp16"}
        return GeminiPlugin(process_group=group, model_ranks=model_ranks, **{**precision, **options})
    stage = options.pop("stage", 1)
    if stage == 3:
        return GeminiPlugin(process_group=group, **{"mixed_precision": "fp16", **options})
    if model_ranks is not None:
        raise ConfigError(
            f"config: zero has stage {stage}, but the layers of the model are cut over ranks, which works "
            "only with stage 3; write zero=dict(stage=3)"
        )
    precision = {} if features.casts else {"precision": "fp16"}
    return LowLevelZeroPlugin(stage, dp_process_group=group, **{**precision, **options})


def choose_with_experts(features: Features, parts: Partition | None) -> Plugin:
    """Return the plugin for a model with experts that ranks divide; arguments and errors as for
    :func:`choose_plugin`.
    """
    ep = global_context.layout.ep
    others = [str(entry["type"]) for entry in features.handlers if entry["type"] != "MoeGradientHandler"]
    options = dict(features.zero or {})
    stage = options.pop("stage", 0 if features.zero is None else 1)
    for is_there, what in (
        (parts is not None, "layers cut by tensor parallelism; write tensor=dict(size=1)"),
        (bool(others), f"{', '.join(others)}; use MoeGradientHandler, or no gradient handler"),
    ):
        if is_there:
            raise ConfigError(f"config: experts divided among {ep} ranks do not work with {what}")
    if stage == 0:
        return HybridParallelPlugin(zero_stage=0, ep_size=ep)
    if stage == 3:
        precision = {} if features.casts else {"mixed_precision": "fp16"}
        return GeminiPlugin(process_group=data_group(), ep_size=ep, **{**precision, **options})
    precision = {} if features.casts else {"precision": "fp16"}
    return LowLevelZeroPlugin(stage, dp_process_group=data_group(), ep_size=ep, **{**precision, **options})


def choose_stages(
    features: Features,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: Mapping[str, Any],
) -> HybridParallelPlugin:
    """Return the plugin for the stages of a model, whole on each rank or BuiltStages.

    Chunks (stage 3) need our Adam; with another optimizer the default of ``zero`` is stage 0. Raises
    ConfigError for features that a pipeline does not support.
    """
    layout, is_built = global_context.layout, isinstance(model, BuiltStages)
    for is_there, what in (
        (
            bool(features.handlers),
            "gradient handlers, as stages reduce gradients themselves; leave gradient_handler out",
        ),
        (
            not is_built and partition_of_layers(model) is not None,
            (
                "layers that are already cut over ranks; pass an ordinary model, and the pipeline cuts its "
                "layers"
            ),
        ),
        (layout.mode not in (None, "1d"), f"tensor parallelism in mode {layout.mode!r}; write mode='1d'"),
        (
            features.precision is not None and not features.casts,
            (
                "autocast, because a stage does not tell the next one its types; write "
                "fp16=dict(mode=AMP_TYPE.NAIVE)"
            ),
        ),
    ):
        if is_there:
            raise ConfigError(f"config: a pipeline of {layout.pp} stages does not work with {what}")
    options = dict(features.zero or {})
    chunks = model.num_chunks if isinstance(model, BuiltStages) else config.get("NUM_CHUNKS") or 1
    stage = options.pop("stage", 3 if isinstance(optimizer, CPUAdam) and layout.ep == 1 else 0)
    precision = {} if features.zero is None else {"mixed_precision": "fp16"}
    return HybridParallelPlugin(
        tp_size=layout.tp,
        pp_size=layout.pp,
        ep_size=layout.ep,
        zero_stage=stage,
        pp_style="interleaved" if chunks > 1 else "1f1b",
        num_model_chunks=chunks,
        num_microbatches=config.get("NUM_MICRO_BATCHES"),
        **{**precision, **options},
    )


def partition_of_layers(model: nn.Module) -> Partition | None:
    """Return the partition of a model of layers over the launched ranks; None for a whole model."""
    if global_context.tensor_parallel_size == 1:
        return None
    return partition_of(model) if any(isinstance(layer, GridLayer) for layer in model.modules()) else None


def data_group() -> dist.ProcessGroup | None:
    """Return the ranks of data parallelism; None: all ranks, or this process only."""
    mode = ParallelMode.DATA
    return global_context.get_group(mode) if global_context.is_initialized(mode) else None


def _handlers(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the entries of ``gradient_handler`` and of ``gradient_handlers``."""
    found: list[Mapping[str, Any]] = []
    for key in ("gradient_handler", "gradient_handlers"):
        said = config.get(key) or ()
        found.extend(said if isinstance(said, Sequence) else [said])
    return tuple(found)
