"""The names of ColossalAI's documentation, by their paths below its root: our equivalent of each, or why it
is missing.
"""

from __future__ import annotations

_HERE = "gemini.compat.adapters"
_LAUNCH = "gemini.parallel.launch"
_LAYERS = "gemini.parallel.tensor.nn"
_COLO = "gemini.parallel.colo"
_PRECISION = "gemini.parallel.booster.mixed_precision"
_MOE = "gemini.parallel.moe"
_ENGINE = "gemini.parallel.engine"
_TRAINER = "gemini.parallel.trainer"

# "path": "module:name".
NAMES: dict[str, str] = {
    "__version__": "gemini:__version__",
    # launch
    "launch": f"{_HERE}.launching_adapters:launch",
    "launch_from_torch": f"{_HERE}.launching_adapters:launch_from_torch",
    "launch_from_slurm": f"{_HERE}.launching_adapters:launch_from_slurm",
    "launch_from_openmpi": f"{_HERE}.launching_adapters:launch_from_openmpi",
    "get_default_parser": f"{_LAUNCH}:get_default_parser",
    "core.global_context": f"{_LAUNCH}:global_context",
    "context.Config": f"{_LAUNCH}:Config",
    "context.ParallelMode": f"{_LAUNCH}:ParallelMode",
    "context.parallel_mode.ParallelMode": f"{_LAUNCH}:ParallelMode",
    "context.dist_group_initializer.ProcessGroupInitializer": f"{_LAUNCH}:ProcessGroupInitializer",
    "context.process_group_initializer.ProcessGroupInitializer": f"{_LAUNCH}:ProcessGroupInitializer",
    "constants.INITIALIZER_MAPPING": f"{_LAUNCH}:INITIALIZER_MAPPING",
    "registry.DIST_GROUP_INITIALIZER": f"{_LAUNCH}:DIST_GROUP_INITIALIZER",
    "registry.LAYERS": f"{_LAUNCH}:LAYERS",
    "registry.MODELS": f"{_LAUNCH}:MODELS",
    "cluster.DistCoordinator": f"{_LAUNCH}:DistCoordinator",
    "cluster.dist_coordinator.DistCoordinator": f"{_LAUNCH}:DistCoordinator",
    "cluster.dist_coordinator.priority_execution": f"{_LAUNCH}:priority_execution",
    "logging.DistributedLogger": f"{_LAUNCH}:DistributedLogger",
    "logging.disable_existing_loggers": f"{_LAUNCH}:disable_existing_loggers",
    "logging.get_dist_logger": f"{_LAUNCH}:get_dist_logger",
    "testing.spawn": f"{_LAUNCH}:spawn",
    # Gemini and ZeRO
    "gemini.ChunkManager": f"{_HERE}.chunk_adapters:ChunkManager",
    "gemini.GeminiManager": f"{_HERE}.chunk_adapters:GeminiManager",
    "gemini.chunk.ChunkManager": f"{_HERE}.chunk_adapters:ChunkManager",
    "gemini.chunk.init_chunk_manager": f"{_HERE}.chunk_adapters:init_chunk_manager",
    "nn.parallel.GeminiDDP": f"{_HERE}.models:GeminiDDP",
    "nn.parallel.ZeroDDP": f"{_HERE}.models:ZeroDDP",
    "utils.model.colo_init_context.ColoInitContext": f"{_HERE}.models:ColoInitContext",
    "zero.ColoInitContext": f"{_HERE}.models:ColoInitContext",
    "zero.GeminiAdamOptimizer": "gemini:GeminiAdamOptimizer",
    "zero.GeminiDDP": f"{_HERE}.models:GeminiDDP",
    "zero.ZeroDDP": f"{_HERE}.models:ZeroDDP",
    "zero.low_level.LowLevelZeroOptimizer": "gemini.parallel:LowLevelZeroOptimizer",
    "zero.zero_model_wrapper": f"{_HERE}.models:zero_model_wrapper",
    "zero.zero_optim_wrapper": "gemini:zero_optim_wrapper",
    "nn.optimizer.CPUAdam": "gemini:CPUAdam",
    "nn.optimizer.FusedAdam": "gemini:FusedAdam",
    "nn.optimizer.HybridAdam": "gemini:HybridAdam",
    "nn.optimizer.gemini_optimizer.GeminiAdamOptimizer": "gemini:GeminiAdamOptimizer",
    # Booster, precision, files
    "Booster": "gemini.parallel:Booster",
    "booster.Booster": "gemini.parallel:Booster",
    "booster.plugin.GeminiPlugin": f"{_HERE}.plugins:GeminiPlugin",
    "booster.plugin.LowLevelZeroPlugin": f"{_HERE}.plugins:LowLevelZeroPlugin",
    "booster.plugin.TorchDDPPlugin": "gemini.parallel:TorchDDPPlugin",
    "booster.plugin.TorchFSDPPlugin": "gemini.parallel:TorchFSDPPlugin",
    "nn.layer.wrapper.PipelineSharedModuleWrapper": f"{_HERE}.pipelines:PipelineSharedModuleWrapper",
    "pipeline.pipelinable.PipelinableContext": "gemini.parallel.pipeline:PipelinableContext",
    "builder.build_pipeline_model": f"{_ENGINE}:build_pipeline_model",
    "builder.build_pipeline_model_from_cfg": f"{_ENGINE}:build_pipeline_model_from_cfg",
    "builder.pipeline.partition_uniform": "gemini.parallel.pipeline:partition_uniform",
    "booster.mixed_precision.BF16MixedPrecision": f"{_PRECISION}:BF16MixedPrecision",
    "booster.mixed_precision.FP16NaiveMixedPrecision": f"{_PRECISION}:FP16NaiveMixedPrecision",
    "booster.mixed_precision.FP16TorchMixedPrecision": f"{_PRECISION}:FP16TorchMixedPrecision",
    "mixed_precision.BF16MixedPrecision": f"{_PRECISION}:BF16MixedPrecision",
    "mixed_precision.FP16NaiveMixedPrecision": f"{_PRECISION}:FP16NaiveMixedPrecision",
    "mixed_precision.FP16TorchMixedPrecision": f"{_PRECISION}:FP16TorchMixedPrecision",
    "booster.mixed_precision.FP16ApexMixedPrecision": f"{_PRECISION}:FP16ApexMixedPrecision",
    "mixed_precision.FP16ApexMixedPrecision": f"{_PRECISION}:FP16ApexMixedPrecision",
    "booster.mixed_precision.FP8MixedPrecision": f"{_PRECISION}:FP8MixedPrecision",
    "mixed_precision.FP8MixedPrecision": f"{_PRECISION}:FP8MixedPrecision",
    "amp.AMP_TYPE": f"{_ENGINE}:AMP_TYPE",
    "amp.convert_to_amp": f"{_ENGINE}:convert_to_amp",
    "amp.apex_amp.convert_to_apex_amp": f"{_ENGINE}:convert_to_apex_amp",
    "amp.naive_amp.convert_to_naive_amp": f"{_ENGINE}:convert_to_naive_amp",
    "amp.torch_amp.convert_to_torch_amp": f"{_ENGINE}:convert_to_torch_amp",
    "utils.load_checkpoint": f"{_ENGINE}:load_checkpoint",
    "utils.save_checkpoint": f"{_ENGINE}:save_checkpoint",
    # engine
    "initialize": f"{_HERE}.training_adapters:initialize",
    "engine.BaseGradientHandler": f"{_ENGINE}:BaseGradientHandler",
    "engine.Engine": f"{_ENGINE}:Engine",
    "engine.gradient_handler.BaseGradientHandler": f"{_ENGINE}:BaseGradientHandler",
    "engine.gradient_handler.DataParallelGradientHandler": f"{_ENGINE}:DataParallelGradientHandler",
    "engine.schedule.BaseSchedule": f"{_HERE}.training_adapters:BaseSchedule",
    "engine.schedule.InterleavedPipelineSchedule": f"{_ENGINE}:InterleavedPipelineSchedule",
    "engine.schedule.NonPipelineSchedule": f"{_ENGINE}:NonPipelineSchedule",
    "engine.schedule.PipelineSchedule": f"{_ENGINE}:PipelineSchedule",
    "registry.GRADIENT_HANDLER": f"{_LAUNCH}:GRADIENT_HANDLER",
    # trainer
    "trainer.Trainer": f"{_HERE}.training_adapters:Trainer",
    **{
        f"trainer.hooks.{name}": f"{_TRAINER}.hooks:{name}"
        for name in (
            *("AccuracyHook", "BaseHook", "LRSchedulerHook", "LogMemoryByEpochHook", "LogMetricByEpochHook"),
            *("LogMetricByStepHook", "LogTimingByEpochHook", "LossHook", "ProfilerHook"),
            *("SaveCheckpointHook", "TensorboardHook", "ThroughputHook"),
        )
    },
    "nn.metric.Accuracy": f"{_TRAINER}:Accuracy",
    "nn.metric.MixupAccuracy": f"{_TRAINER}:MixupAccuracy",
    "utils.MultiTimer": f"{_TRAINER}:MultiTimer",
    "utils.Timer": f"{_TRAINER}:Timer",
    "utils.timer.MultiTimer": f"{_TRAINER}:MultiTimer",
    "utils.timer.Timer": f"{_TRAINER}:Timer",
    "nn.Lamb": "gemini:Lamb",
    "nn.optimizer.Lamb": "gemini:Lamb",
    **{
        f"nn.lr_scheduler.{name}": f"gemini.optim.lr_scheduler:{name}"
        for name in ("CosineAnnealingLR", "CosineAnnealingWarmupLR", "LinearWarmupLR")
    },
    "utils.get_dataloader": f"{_ENGINE}:get_dataloader",
    # tensors, layers
    "tensor.ColoParameter": f"{_COLO}:ColoParameter",
    "tensor.ColoTensor": f"{_COLO}:ColoTensor",
    "tensor.ColoTensorSpec": f"{_COLO}:ColoTensorSpec",
    "tensor.ComputePattern": f"{_COLO}:ComputePattern",
    "tensor.ComputeSpec": f"{_COLO}:ComputeSpec",
    "tensor.ProcessGroup": f"{_COLO}:ProcessGroup",
    "tensor.ReplicaSpec": f"{_COLO}:ReplicaSpec",
    "tensor.ShardSpec": f"{_COLO}:ShardSpec",
    **{
        f"nn.{name}": f"{_LAYERS}:{name}"
        for name in (
            *("Classifier", "CrossEntropyLoss", "Dropout", "Embedding", "LayerNorm", "Linear"),
            *("Linear1D_Col", "Linear1D_Row", "Linear2D", "Linear2p5D", "Linear3D", "PatchEmbedding"),
        )
    },
    # mixtures of experts
    "context.random.moe_set_seed": f"{_MOE}:moe_set_seed",
    "engine.gradient_handler.MoeGradientHandler": f"{_ENGINE}:MoeGradientHandler",
    "global_variables.moe_env": f"{_MOE}:moe_env",
    **{
        f"nn.{place}.{name}": f"{_MOE}:{name}"
        for place in ("layer.moe", "moe")
        for name in (
            *("Experts", "MoeLayer", "MoeLoss", "Moeloss", "NormalNoiseGenerator", "Top1Router"),
            *("Top2Router", "UniformNoiseGenerator", "VanillaFFN", "moe_mlp_args"),
        )
    },
    # automatic layouts
    "auto_parallel.autoparallelize": f"{_HERE}.models:autoparallelize",
    "autoparallelize": f"{_HERE}.models:autoparallelize",  # the documentation does not give its path
    # utilities
    "utils.get_current_device": "gemini.system.device:current_device",
    "utils.is_using_pp": f"{_HERE}.launching_adapters:is_using_pp",
    "utils.print_rank_0": f"{_LAUNCH}:print_rank_0",
}

_GRAPHS = "it comes with plans by operator"

# Names that are not available yet, and why.
COMING: dict[str, str] = {
    "auto_parallel.ColoTracer": _GRAPHS,
}

# The equivalent of an adapter outside compat, if it has another name than the adapter's target.
OWN: dict[str, str] = {
    **{
        f"{_HERE}.launching_adapters:{name}": f"{_LAUNCH}.{name}"
        for name in ("launch", "launch_from_torch", "launch_from_slurm", "launch_from_openmpi")
    },
    f"{_HERE}.launching_adapters:is_using_pp": f"{_LAUNCH}.global_context",
    f"{_HERE}.chunk_adapters:ChunkManager": "gemini.GeminiDDP",
    f"{_HERE}.chunk_adapters:GeminiManager": "gemini.GeminiDDP",
    f"{_HERE}.chunk_adapters:init_chunk_manager": "gemini.GeminiDDP",
    f"{_HERE}.models:ColoInitContext": f"{_COLO}.ColoInitContext",
    f"{_HERE}.models:autoparallelize": "gemini.autoparallelize",
    f"{_HERE}.models:GeminiDDP": f"{_COLO}.GeminiDDP",
    f"{_HERE}.models:ZeroDDP": f"{_COLO}.GeminiDDP",
    f"{_HERE}.models:zero_model_wrapper": "gemini.zero_model_wrapper",
    f"{_HERE}.pipelines:PipelineSharedModuleWrapper": "gemini.parallel.pipeline.SharedParameters",
    f"{_HERE}.plugins:GeminiPlugin": "gemini.parallel.GeminiPlugin",
    f"{_HERE}.plugins:LowLevelZeroPlugin": "gemini.parallel.LowLevelZeroPlugin",
    f"{_HERE}.training_adapters:Trainer": f"{_TRAINER}.Trainer",
    f"{_HERE}.training_adapters:BaseSchedule": f"{_ENGINE}.BaseSchedule",
    f"{_HERE}.training_adapters:initialize": f"{_ENGINE}.initialize",
}
