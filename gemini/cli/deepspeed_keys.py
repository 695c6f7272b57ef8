"""The table of DeepSpeed's configuration keys: our option for each, or why there is none.

A key that is the path of a section covers all keys below it. ``deepspeed_config`` has code for keys that need
more than a row: types of optimizers and schedulers, devices, batches.
"""

from __future__ import annotations

from gemini.cli.conversion import (
    FLAG,
    NOT_NEEDED,
    NOT_SUPPORTED,
    NUMBER,
    ROUNDED,
    WHOLE,
    Key,
    Kind,
    Sentence,
    each,
)

MOST_POWER = 126  # limit of the exponent: scales are fp32 numbers
_POWER = Kind((float,), least=0, most=MOST_POWER, text=lambda value: f"2**{int(value)}")
_OFFLOAD = Kind((bool,), text=lambda value: 'torch.cuda.is_available() and "auto"')
_REDUCED = Kind((str,), text=lambda value: '"fp16"' if value == "fp16" else '"bf16"')
_STATES = Kind((bool,), text=lambda value: '"bf16"')
_STATS = "{handle}.stats(flat=True, since_last=True)"


def _needless(says: Sentence, *paths: str) -> list[Key]:
    return [Key(path, says, NOT_NEEDED) for path in paths]


def _missing(says: Sentence, *paths: str, off: tuple[object, ...] = ()) -> list[Key]:
    return [Key(path, says, NOT_SUPPORTED, off=off) for path in paths]


def _zero(*names: str) -> list[str]:
    return [f"zero_optimization.{name}" for name in names]


_TAKEN = [
    Key(
        "gradient_clipping",
        kind=NUMBER,
        options=each("managed.max_norm", "arguments.max_grad_norm", "loop.max_norm"),
        filled="max_grad_norm=",
    ),
    Key("fp16.loss_scale_window", kind=ROUNDED, options="managed.growth_interval"),
    Key("fp16.hysteresis", kind=ROUNDED, options="managed.hysteresis"),
    Key("fp16.initial_scale_power", kind=_POWER, options="managed.initial_scale"),
    Key("fp16.min_loss_scale", kind=NUMBER, options="managed.min_scale"),
    Key("activation_checkpointing.cpu_checkpointing", kind=_OFFLOAD, options="model.activation_offload",
        off=(False,)),
    Key("bf16.bf16_optimizer_states", "only HybridAdam has bf16 states: state_dtype='bf16'", kind=_STATES,
        options="optimizer.state_dtype", off=(False,)),
    Key(
        "steps_per_print",
        each(
            loop=f"print or log {_STATS} in the training loop, at this interval",
            accelerate=f"call accelerator.log({_STATS}) at this interval",
        ),
        kind=WHOLE,
        options=each(trainer="arguments.logging_steps"),
        filled="logging_steps=",
    ),
    Key(
        "dataloader_drop_last",
        each(loop="give DataLoader drop_last=True", accelerate="give DataLoader drop_last=True"),
        kind=FLAG,
        options=each(trainer="arguments.dataloader_drop_last"),
    ),
]  # fmt: skip

_OTHER_STEP = [
    *_missing("write the steps into the loop: each optimizer.step() makes an update",
              "managed_gradient_accumulation", off=(True,)),
    *_needless("ranks sum gradients in fp32", "prescale_gradients",
               "gradient_predivide_factor"),
    *_missing("gradients are averaged over ranks; for a sum, multiply the loss by the number of ranks",
              "gradient_allreduce_op",
              off=("avg", "mean")),
    *_missing("gradients are dense: use nn.Embedding(sparse=False)", "sparse_gradients"),
    *_missing("for your own optimizer class: elementwise=True of {managed}",
              "zero_allow_untested_optimizer"),
    *_needless("HybridAdam updates states on the tier that holds them", "zero_force_ds_cpu_optimizer"),
    *_needless("the optimizer runs on chunks, not on a fused buffer", "optimizer.legacy_fusion"),
    *_missing("ranks sum gradients in fp32, one process in the dtype of the weights; remove this key",
              "data_types.grad_accum_dtype"),
    *_missing("reduce_dtype='bf16' of {model} halves what ranks send", "communication_data_type",
              "seq_parallel_communication_data_type", "seq_parallel_comm_data_type", off=("fp32", "none")),
    *_needless("the library chooses the collectives", "disable_allgather"),
    *_needless("sizes are computed from the model", "vocabulary_size"),
    *_missing("{handle}.compile() compiles each block", "graph_harvesting", "compile"),
]  # fmt: skip

_PRECISION = [
    *_missing("inputs keep the dtypes that the loader gives them; cast them in the loader", "fp16.auto_cast"),
    *_missing("the hysteresis is reset when the scale grows; use a larger hysteresis",
              "fp16.consecutive_hysteresis"),
    *_missing("masters and gradients stay in fp32; master_remainders=True of HybridAdam stores masters in 2 "
              "bytes", "fp16.fp16_master_weights_and_grads", "bf16.bf16_master_weights_and_grads"),
    *_needless("overlap='backward' of {managed} updates during backward", "bf16.immediate_grad_update"),
    *_missing("bf16 needs no loss scaling; optimizer.get_grad_norm() shows an overflow",
              "bf16.check_grad_overflow"),
    *_missing("apex is not supported: mixed_precision='bf16' of {model} keeps fp32 masters", "amp"),
    *_missing(each(
        loop="use torch.autocast around the forward pass, or give {model} mixed_precision='bf16'",
        trainer="give TrainingArguments bf16=True, which uses torch's autocast",
        accelerate="give GeminiAccelerator mixed_precision='bf16', which uses torch's autocast",
    ), "torch_autocast"),
]  # fmt: skip

_CUT_BY_CHUNKS = "ranks send whole chunks: set their size with min_chunk_size_mb= of {model}"
_BY_USE = "the recorded step and the budget decide which chunks stay on DEVICE"
_BUFFERS = "the budget determines the size of buffers"
_MESH = "give {model} process_group= a DeviceMesh of two dimensions: a row for each node"
_ZERO = [
    *_needless("collectives and transfers overlap with computing", *_zero("overlap_comm")),
    *_needless("gradients are stored in chunks", *_zero("contiguous_gradients")),
    *_needless("the library chooses the collectives", *_zero(
        "reduce_scatter", "allgather_partitions", "use_multi_rank_bucket_allreduce",
        "stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential",
    )),
    *_needless(_CUT_BY_CHUNKS, *_zero(
        "reduce_bucket_size", "allgather_bucket_size", "stage3_module_granularity_threshold", "leaf_module",
    )),
    *_needless("every chunk is sharded over the ranks", *_zero("round_robin_gradients", "legacy_stage1")),
    *_needless("states are updated chunk by chunk", *_zero("sub_group_size")),
    *_needless(_BY_USE, *_zero(
        "stage3_prefetch_bucket_size", "stage3_max_reuse_distance", "stage3_param_persistence_threshold",
        "stage3_model_persistence_threshold", "prefetch_bucket_size", "param_persistence_threshold",
        "model_persistence_threshold", "max_reuse_distance",
    )),
    *_needless("gather_bytes= of {model} limits the gathered chunks, in bytes",
               *_zero("stage3_max_live_parameters", "max_live_parameters")),
    *_needless("state_dict() returns whole weights in fp32; state_dict_shard() returns pieces", *_zero(
        "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save",
        "gather_16bit_weights_on_model_save",
    )),
    *_needless("any number of ranks can load a checkpoint", *_zero("elastic_checkpoint")),
    *_needless("checkpoints contain the fp32 masters", *_zero("load_from_fp32_weights")),
    *_needless("unused parameters are allowed", *_zero("ignore_unused_parameters")),
    *_needless("build the model with gemini.init_on('meta'): no rank holds it whole",
               *_zero("stage3_partition_stream_chunk_size", "override_module_apply")),
    *_needless("activation_offload='auto' offloads activations to HOST and DISK",
               *_zero("memory_efficient_linear")),
    *_needless("pin_memory= of {model} is True on a GPU", *_zero("cpu_offload_use_pin_memory")),
    *_needless("if a step leaves the recorded order, the next one is recorded again",
               *_zero("log_trace_cache_warnings", "enable_sanity_checks")),
    *_needless("checkpoints are streamed", *_zero("pipeline_loading_checkpoint")),
    *_missing(_MESH, *_zero("zero_hpz_partition_size", "mics_shard_size"), off=(0, 1, -1)),
    *_missing(_MESH, *_zero("mics_hierarchical_params_gather")),
    *_missing("ranks gather weights in the dtype of the computation: remove this key and use bf16",
              *_zero("zero_quantized_weights", "zero_quantized_nontrainable_weights")),
    *_missing("reduce_dtype='bf16' of {model} halves what ranks send",
              *_zero("zero_quantized_gradients", "zeropp_loco_param")),
    *_missing("overlap=True of {managed} runs updates during the next forward pass, bit-identical",
              *_zero("zenflow")),
    *_needless("the momentum of Muon is stored in chunks, like all states",
               *_zero("save_muon_momentum_buffer_in_memory")),
    *_needless(_BUFFERS, *(
        f"zero_optimization.offload_{part}.{name}" for part in ("param", "optimizer")
        for name in ("buffer_count", "buffer_size", "fast_init", "pipeline_read", "pipeline_write",
                     "pipeline", "convert_grad_on_cpu", "super_offload", "cpuadam_cores_perc")
    )),
    *_needless("host_bytes= of {model} limits HOST in bytes, for parameters, gradients and states",
               *_zero("offload_param.max_in_cpu", "offload_optimizer.max_in_cpu")),
    *_missing("gpu_margin_mem_ratio= of {managed}; the default 'auto' measures it",
              *_zero("offload_optimizer.ratio"), off=(1, 1.0, "auto")),
]  # fmt: skip

_PARALLEL = [
    *_missing("use pipeline stages: gemini.parallel.pipeline, or HybridParallelPlugin (docs/parallel.md)",
              "pipeline"),
    *_missing("use tensor parallelism: parallelize() of gemini.parallel (docs/parallel.md)",
              "tensor_parallel",
              off=(1,)),
    *_missing("use sequence parallelism: gemini.parallel.sequence (docs/parallel.md)",
              "sequence_parallel_size",
              off=(1,)),
    *_missing("a managed model transfers experts one by one (docs/experts.md); to divide them over ranks use "
        "gemini.parallel.moe (docs/parallel.md)", "moe", "expert_parallel",
              "use_data_before_expert_parallelism"),
    *_missing("the model's own attention is used: give torch's scaled_dot_product_attention a mask",
              "sparse_attention"),
    *_missing("create the process groups yourself: process_group= of {model}", "data_parallel_group"),
]  # fmt: skip

_FLOATS_ONLY = (
    "only floating-point weights are trained; state_dtype='int8' of HybridAdam makes states smaller"
)
_FEATURES = [
    *_missing(_FLOATS_ONLY, "compression_training", "quantize_training", "weight_quantization"),
    *_missing("order the samples in the sampler of the DataLoader", "curriculum_learning", "data_efficiency"),
    *_missing("drop layers in the model: a step that differs from the recorded one runs without a "
        "plan",
              "progressive_layer_drop"),
    *_missing("eigenvalues of layers are not supported; compute them with torch.autograd.functional.hvp",
              "eigenvalue"),
    *_missing("any number of ranks can load a checkpoint of gemini.checkpoint: restart with that number",
              "elasticity"),
    *_missing("gemini plan reports what fits and how long a step takes", "autotuning"),
    *_missing("generate() of the managed model works between steps", "hybrid_engine", "inference"),
    *_missing("gemini.checkpoint.save() streams; keep= sets how many checkpoints it keeps", "checkpoint",
              "nebula", "datastates"),
    *_missing("create the DataLoader in the script", "data_sampling", "dataloader"),
]  # fmt: skip

_WATCHING = [
    *_missing(each(
        loop="{handle}.record_timeline() shows each wait; or run gemini trace SCRIPT",
        trainer="{handle}.record_timeline() shows each wait",
        accelerate="{handle}.record_timeline() shows each wait",
    ), "wall_clock_breakdown", "memory_breakdown", "timers"),
    *_missing("gemini plan prints the time of a step; torch.profiler has gemini:: ranges", "flops_profiler"),
    *_missing("torch.profiler shows collectives as gemini::exchange", "comms_logger", "comms_config"),
    *_missing(each(
        loop=f"pass {_STATS} to its writer",
        trainer="name it in report_to= of TrainingArguments; the logs contain gemini/ metrics",
        accelerate=f"use log_with= of GeminiAccelerator, and accelerator.log({_STATS})",
    ), "tensorboard", "wandb", "comet"),
    *_missing(f"write {_STATS} to a file", "csv_monitor"),
    *_needless("print({handle}.plan()) shows the settings in force", "dump_state"),
    *_missing("logging.getLogger('gemini').setLevel(...)", "log_level"),
]  # fmt: skip

_REST = [
    *_needless("the depth and size of requests are measured for each disk", "aio"),
    *_missing(each(
        loop="call model.gradient_checkpointing_enable() before GeminiDDP, or torch.utils.checkpoint",
        trainer="give TrainingArguments gradient_checkpointing=True",
        accelerate="call model.gradient_checkpointing_enable() before prepare()",
    ), "activation_checkpointing"),
    *_needless("chunks hold saved activations with activation_offload='auto'",
               "activation_checkpointing.contiguous_memory_optimization",
               "activation_checkpointing.synchronize_checkpoint_boundary"),
    *_needless("a resumed run loads the scheduler's state from the checkpoint",
               "scheduler.params.last_batch_iteration"),
    *_missing("torch.profiler shows the recomputation", "activation_checkpointing.profile"),
    *_missing("use sequence parallelism: gemini.parallel.sequence (docs/parallel.md)",
              "activation_checkpointing.partition_activations"),
]  # fmt: skip

KEYS: dict[str, Key] = {
    key.path: key
    for key in (
        *_TAKEN, *_OTHER_STEP, *_PRECISION, *_ZERO, *_PARALLEL, *_FEATURES, *_WATCHING, *_REST
    )
}  # fmt: skip

# Sections that do nothing without "enabled": true.
SWITCHED = frozenset(
    (
        "fp16", "bf16", "bfloat16", "amp", "torch_autocast", "flops_profiler", "tensorboard", "wandb",
        "comet", "csv_monitor", "comms_logger", "eigenvalue", "progressive_layer_drop", "elasticity",
        "autotuning",
        "hybrid_engine", "curriculum_learning", "data_efficiency", "nebula", "datastates", "expert_parallel",
    )
)  # fmt: skip

# Key -> the TrainingArguments that the Trainer fills in for "auto".
FILLED = {
    "train_batch_size": "per_device_train_batch_size= and gradient_accumulation_steps=",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size=",
    "gradient_accumulation_steps": "gradient_accumulation_steps=",
    "optimizer.params.lr": "learning_rate=",
    "optimizer.params.betas": "adam_beta1= and adam_beta2=",
    "optimizer.params.eps": "adam_epsilon=",
    "optimizer.params.weight_decay": "weight_decay=",
}
