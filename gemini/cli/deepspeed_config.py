"""A configuration of DeepSpeed as our call."""

from __future__ import annotations

from typing import Any

from gemini.cli.conversion import AUTO, BY_HAND, DONE, NONE, NOT_NEEDED, Conversion, Keys
from gemini.errors import ConfigError

_NUMBER = (float,)
_BUDGETS = (
    "device_bytes= bounds what parameters, gradients and states take on the device; disk_dir= a DISK tier"
)
_FILLED = "the Trainer fills it in: with GeminiTrainer keep it in TrainingArguments"

_NOT_INTEGER = (NONE, "only floating-point weights are trained; state_dtype='int8' makes states small")
_BY_USE = (NOT_NEEDED, "what stays and leaves follows from the recorded step, within the budget")
_WHOLE = (NOT_NEEDED, "state_dict() is whole, in fp32; state_dict_shard() comes in pieces")
_GATHERED = (NONE, "weights are gathered in the type they compute in")
_MESH = (BY_HAND, "process_group= a DeviceMesh of two dimensions: a row per node")

# What has no key of ours, by its path: the verdict, and what to do.
_OTHERS = {
    "train_batch_size": (BY_HAND, "batch_size of the DataLoader x accumulation x ranks"),
    "train_micro_batch_size_per_gpu": (BY_HAND, "batch_size of the DataLoader"),
    "steps_per_print": (BY_HAND, "model.stats(flat=True, since_last=True) is what loggers take"),
    "wall_clock_breakdown": (BY_HAND, "model.record_timeline(), or gemini trace SCRIPT"),
    "flops_profiler": (BY_HAND, "gemini plan, and torch.profiler: it shows gemini:: ranges"),
    "tensorboard": (BY_HAND, "give model.stats(flat=True) to the writer"),
    "wandb": (BY_HAND, "wandb.log(model.stats(flat=True))"),
    "csv_monitor": (BY_HAND, "write model.stats(flat=True)"),
    "comet": (BY_HAND, "log model.stats(flat=True)"),
    "comms_logger": (NONE, "torch.profiler shows collectives"),
    "aio": (NOT_NEEDED, "request size and depth are measured for each disk"),
    "prescale_gradients": (NOT_NEEDED, "gradients are added up in fp32"),
    "gradient_predivide_factor": (NOT_NEEDED, "gradients are added up in fp32"),
    "sparse_gradients": (NONE, "gradients are dense: nn.Embedding(sparse=False)"),
    "zero_allow_untested_optimizer": (
        BY_HAND,
        "GeminiOptimizer(elementwise=True) for an optimizer of your own",
    ),
    "zero_force_ds_cpu_optimizer": (NOT_NEEDED, "HybridAdam updates where states lie"),
    "pipeline": (BY_HAND, "gemini.parallel.pipeline, or HybridParallelPlugin (docs/parallel.md)"),
    "tensor_parallel": (BY_HAND, "parallelize() of gemini.parallel (docs/parallel.md)"),
    "sequence_parallel_size": (BY_HAND, "gemini.parallel.sequence (docs/parallel.md)"),
    "autotuning": (BY_HAND, "gemini plan says what fits and how long a step is"),
    "amp": (BY_HAND, "mixed_precision='bf16', or torch.autocast around the model"),
    "curriculum_learning": (NONE, "order the data in its sampler"),
    "data_efficiency": (NONE, "order the data in its sampler"),
    "compression_training": _NOT_INTEGER,
    "quantize_training": _NOT_INTEGER,
    "progressive_layer_drop": (NONE, "a step that differs from the recorded one runs, unplanned"),
    "eigenvalue": (NONE, "not there"),
    "elasticity": (NONE, "a checkpoint is loaded by any number of ranks: gemini.checkpoint"),
    "checkpoint": (BY_HAND, "gemini.checkpoint.save(..) and load(..), streamed"),
    "hybrid_engine": (NONE, "generate() of the managed model works between steps"),
    "dump_state": (NOT_NEEDED, "print(model.plan()) shows what is in force"),
    "disable_allgather": (NOT_NEEDED, "collectives are chosen by the library"),
    "compile": (BY_HAND, "model.compile()"),
    "zero_optimization.overlap_comm": (NOT_NEEDED, "exchange and transfers run beside computing"),
    "zero_optimization.contiguous_gradients": (NOT_NEEDED, "gradients lie in chunks"),
    "zero_optimization.reduce_scatter": (NOT_NEEDED, "collectives are chosen by the library"),
    "zero_optimization.reduce_bucket_size": (NOT_NEEDED, "a chunk is what is sent: min_chunk_size_mb="),
    "zero_optimization.allgather_bucket_size": (NOT_NEEDED, "a chunk is what is sent: min_chunk_size_mb="),
    "zero_optimization.allgather_partitions": (NOT_NEEDED, "collectives are chosen by the library"),
    "zero_optimization.round_robin_gradients": (NOT_NEEDED, "every chunk is cut among the ranks"),
    "zero_optimization.sub_group_size": (NOT_NEEDED, "states are updated chunk by chunk"),
    "zero_optimization.stage3_prefetch_bucket_size": _BY_USE,
    "zero_optimization.stage3_max_live_parameters": (BY_HAND, "gather_bytes= bounds whole chunks, in bytes"),
    "zero_optimization.stage3_max_reuse_distance": _BY_USE,
    "zero_optimization.stage3_param_persistence_threshold": _BY_USE,
    "zero_optimization.stage3_model_persistence_threshold": _BY_USE,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _WHOLE,
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": _WHOLE,
    "zero_optimization.elastic_checkpoint": (NOT_NEEDED, "a checkpoint is loaded by any number of ranks"),
    "zero_optimization.load_from_fp32_weights": (NOT_NEEDED, "checkpoints have the fp32 masters"),
    "zero_optimization.ignore_unused_parameters": (NOT_NEEDED, "unused parameters are allowed"),
    "zero_optimization.zero_hpz_partition_size": _MESH,
    "zero_optimization.mics_shard_size": _MESH,
    "zero_optimization.zero_quantized_weights": _GATHERED,
    "zero_optimization.zero_quantized_nontrainable_weights": _GATHERED,
    "zero_optimization.zero_quantized_gradients": (BY_HAND, "reduce_dtype='bf16' halves the bytes"),
    "zero_optimization.memory_efficient_linear": (NOT_NEEDED, "activations: activation_offload='auto'"),
}

_MOST_POWER = 126  # of fp32
_ADAMS = {"adam": None, "adamw": True, "cpuadam": None, "deepspeedcpuadam": None, "fusedadam": None}
_TORCH = {"sgd": "SGD", "adagrad": "Adagrad", "rmsprop": "RMSprop"}


def convert(document: Any, source: str) -> Conversion:
    """Return what a configuration of DeepSpeed becomes; ``source`` is the file's name.

    Raises:
        ConfigError: a value that DeepSpeed would refuse as well, by its key.
    """
    found = Conversion(source)
    keys = Keys(document, "", source)
    _precision(found, keys)
    _zero(found, keys)
    _optimizer(found, keys)
    _scheduler(found, keys)
    _step(found, keys)
    _rest(found, keys)
    return found


def _precision(found: Conversion, keys: Keys) -> None:
    bf16 = keys.under("bf16" if "bf16" in keys else "bfloat16")
    fp16 = keys.under("fp16")
    uses_bf16, uses_fp16 = (each.take("enabled", bool, False) for each in (bf16, fp16))
    if uses_bf16 is True and uses_fp16 is True:
        raise ConfigError(f"{found.source} enables both fp16 and bf16; keep one")
    for each, enabled, name in ((bf16, uses_bf16, "bf16"), (fp16, uses_fp16, "fp16")):
        if enabled == AUTO:
            found.say(each.path("enabled"), BY_HAND, _FILLED)
        elif enabled:
            found.model["mixed_precision"] = f'"{name}"'
            found.say(each.path("enabled"), DONE, f'mixed_precision="{name}", fp32 masters are kept')
    if uses_fp16 is True:
        _loss_scale(found, fp16)
    for key in ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"):
        fp16.take(key, _NUMBER)
    _leave(found, bf16)
    _leave(found, fp16)


def _loss_scale(found: Conversion, fp16: Keys) -> None:
    fixed = fp16.take("loss_scale", _NUMBER, 0)
    if fixed not in (0, AUTO):
        found.managed.update({key: repr(fixed) for key in ("initial_scale", "min_scale", "max_scale")})
        found.say(fp16.path("loss_scale"), DONE, "a scale that does not change: all three the same")
        return
    for key, name in (("loss_scale_window", "growth_interval"), ("hysteresis", "hysteresis")):
        value = fp16.take(key, _NUMBER)
        if value not in (None, AUTO):
            found.managed[name] = f"{int(value)}"
            found.say(fp16.path(key), DONE, f"{name}=")
    power = fp16.take("initial_scale_power", _NUMBER)
    if power not in (None, AUTO):
        if not 0 <= power <= _MOST_POWER:
            raise ConfigError(
                f"{found.source}: {fp16.path('initial_scale_power')} is {power:g}; give 0 to {_MOST_POWER}"
            )
        found.managed["initial_scale"] = f"2**{int(power)}"
        found.say(fp16.path("initial_scale_power"), DONE, "initial_scale=")
    least = fp16.take("min_loss_scale", _NUMBER)
    if least not in (None, AUTO):
        found.managed["min_scale"] = repr(least)
        found.say(fp16.path("min_loss_scale"), DONE, "min_scale=")


def _zero(found: Conversion, keys: Keys) -> None:
    zero = keys.under("zero_optimization")
    stage = zero.take("stage", int, 0)
    if stage not in (0, 1, 2, 3, AUTO):
        raise ConfigError(f"{found.source}: zero_optimization.stage is {stage}; there are 0, 1, 2 and 3")
    devices = [_offload(found, zero, key) for key in ("offload_param", "offload_optimizer")]
    legacy = [key for key in ("cpu_offload", "cpu_offload_params") if zero.take(key, bool, False) is True]
    for key in legacy:
        found.say(zero.path(key), DONE, "HOST is used where a GPU's memory is short; host_bytes= bounds it")
    way = "every chunk is cut among the ranks, parameters too (ZeRO-3)"
    if stage in (1, 2) and not any(devices) and not legacy:
        way += f"; for stage {stage} itself LowLevelZeroPlugin(stage={stage}) of gemini.parallel.booster"
    if stage == 0:
        way = "one process holds the model in chunks; over ranks they are cut among them"
    found.say(zero.path("stage"), DONE, way)
    found.say("(budget)", BY_HAND, _BUDGETS)
    dtype = keys.take("communication_data_type", str)
    if dtype in ("fp16", "bf16", "bfp16"):
        found.model["reduce_dtype"] = '"fp16"' if dtype == "fp16" else '"bf16"'
        found.say("communication_data_type", DONE, "reduce_dtype=")
    _leave(found, zero)


def _offload(found: Conversion, zero: Keys, key: str) -> bool:
    """Convert where parameters or states go; say whether they go anywhere."""
    there = key in zero
    keys = zero.under(key)
    device = keys.take("device", str, "cpu" if there else "none")
    path = keys.take("nvme_path", str)
    if device not in ("none", "cpu", "nvme", AUTO):
        raise ConfigError(
            f"{found.source}: {keys.path('device')} is {device!r}; there are none, cpu and nvme"
        )
    if device == "nvme":
        if path in (None, AUTO):
            raise ConfigError(
                f"{found.source}: {keys.path('device')} is nvme and nvme_path is missing; give it"
            )
        chosen = repr(path)
        if found.model.setdefault("disk_dir", chosen) != chosen:
            found.say(
                keys.path("nvme_path"),
                BY_HAND,
                f"one DISK tier holds all: disk_dir={found.model['disk_dir']}",
            )
        else:
            found.say(keys.path("device"), DONE, "disk_dir=; what DEVICE and HOST cannot hold goes there")
    elif device == "cpu":
        found.say(
            keys.path("device"), DONE, "HOST is used where a GPU's memory is short; host_bytes= bounds it"
        )
    pinned = keys.take("pin_memory", bool)
    if pinned is False and device != "none":
        found.model["pin_memory"] = "False"
    if pinned is not None:
        found.say(keys.path("pin_memory"), DONE, "pin_memory=; True is the default on a GPU")
    ratio = keys.take("ratio", _NUMBER, 1.0)
    if ratio not in (1.0, AUTO):
        found.say(keys.path("ratio"), BY_HAND, "gpu_margin_mem_ratio= of GeminiOptimizer; 'auto' measures")
    for name in keys.left():
        found.say(keys.path(name), NOT_NEEDED, "buffers are sized by the budget")
    return bool(device != "none")


def _optimizer(found: Conversion, keys: Keys) -> None:
    if "optimizer" not in keys:
        found.say("(optimizer)", BY_HAND, "none is configured: HybridAdam's defaults are printed, give yours")
        return
    section = keys.under("optimizer")
    kind = section.take("type", str, "")
    given = section.under("params")
    name = kind.lower()
    if name in _ADAMS:
        _adam(found, given, _ADAMS[name])
    elif name == "lion":
        found.drive("gemini.Lion")
    elif name == "lamb":
        found.drive("gemini.Lamb")
        correction = given.take("bias_correction", bool, True)
        found.optimizer.update(eps="1e-08", bias_correction=repr(correction))  # DeepSpeed's defaults
    elif name == "muon":
        _muon(found, section, given)
        return
    elif name in _TORCH:
        found.drive(f"torch.optim.{_TORCH[name]}")
    else:
        found.say(
            section.path("type"),
            NONE,
            f"no {kind}: HybridAdam is printed; state_dtype='int8' makes its states small",
        )
    if name in _ADAMS or name in ("lion", "lamb") or name in _TORCH:
        found.say(section.path("type"), DONE, found.optimizer_class)
    for key in ("lr", "eps", "weight_decay", "momentum"):
        value = _not_negative(found, given, key)
        if value == AUTO:
            found.say(given.path(key), BY_HAND, _FILLED)
        elif value is not None and _takes(found.optimizer_class, key):
            found.optimizer[key] = repr(value)
            found.say(given.path(key), DONE, f"{key}=")
        elif value is not None:
            found.say(given.path(key), NONE, f"{found.optimizer_class} has no {key}")
    betas = given.take("betas", list)
    if betas == AUTO:
        found.say(given.path("betas"), BY_HAND, _FILLED)
    elif betas is not None and _takes(found.optimizer_class, "betas"):
        if len(betas) != 2 or not all(type(beta) in (int, float) and 0 <= beta < 1 for beta in betas):
            raise ConfigError(
                f"{found.source}: {given.path('betas')} is {betas!r:.100}; it is to be two numbers from 0 to "
                "below 1"
            )
        found.optimizer["betas"] = repr(tuple(betas))
        found.say(given.path("betas"), DONE, "betas=")
    for key in given.left():
        found.say(given.path(key), NONE, f"give what {found.optimizer_class} has for it, if anything")
    _leave(found, section)


def _muon(found: Conversion, section: Keys, given: Keys) -> None:
    """Say what there is for Muon: torch's takes matrices alone, and one optimizer drives a model."""
    found.say(
        section.path("type"),
        NONE,
        "torch.optim.Muon takes matrices alone, and GeminiOptimizer drives one optimizer: for a model of "
        "matrices give it that; HybridAdam is printed, with its own rate, since Muon's is for another rule",
    )
    for key in given.left():
        given.take(key, object)
        found.say(given.path(key), NONE, "is for Muon")
    _leave(found, section)


def _adam(found: Conversion, given: Keys, decoupled: bool | None) -> None:
    mode = given.take("adam_w_mode", bool, True)
    given.take("torch_adam", bool)
    if decoupled is None and mode is False:
        found.optimizer["adamw_mode"] = "False"
        found.say(given.path("adam_w_mode"), DONE, "adamw_mode=")
    if given.take("bias_correction", bool, True) is False:
        found.optimizer["bias_correction"] = "False"
        found.say(given.path("bias_correction"), DONE, "bias_correction=")


def _takes(optimizer: str, key: str) -> bool:
    if key == "momentum":
        return optimizer in ("torch.optim.SGD", "torch.optim.RMSprop")
    if key == "betas":
        return optimizer in ("gemini.HybridAdam", "gemini.Lion", "gemini.Lamb")
    return key != "eps" or optimizer not in ("gemini.Lion", "torch.optim.SGD")


def _scheduler(found: Conversion, keys: Keys) -> None:
    if "scheduler" not in keys:
        return
    section = keys.under("scheduler")
    kind = section.take("type", str, "")
    given = section.under("params")
    numbers = {
        key: _not_negative(found, given, key)
        for key in ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps",
                    "warmup_min_ratio", "cos_min_ratio")
    }  # fmt: skip
    shape = given.take("warmup_type", str, "log")
    if kind not in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"):
        found.say(
            section.path("type"), NONE, f"no {kind}: one of torch.optim.lr_scheduler over the optimizer"
        )
    elif AUTO in numbers.values():
        found.say(section.path("params"), BY_HAND, _FILLED)
    else:
        is_log = shape != "linear"
        _warmup(found, kind, {k: value for k, value in numbers.items() if value is not None}, is_log=is_log)
        kind_of_warmup = "logarithmic, as DeepSpeed's by default" if is_log else "linear"
        found.say(section.path("type"), DONE, f"torch's schedulers; the warmup is {kind_of_warmup}")
    for key in given.left():
        found.say(given.path(key), NONE, "give what torch's scheduler has for it, if anything")


def _not_negative(found: Conversion, given: Keys, key: str) -> Any:
    """Return the number of a key, ``"auto"`` or None. Raises ConfigError where it is negative."""
    value = given.take(key, _NUMBER)
    if isinstance(value, (int, float)) and value < 0:
        raise ConfigError(f"{found.source}: {given.path(key)} is {value!r}; it is to be 0 or more")
    return value


def _warmup(found: Conversion, kind: str, numbers: dict[str, float], *, is_log: bool) -> None:
    steps = max(1, int(numbers.get("warmup_num_steps", 1000)))
    peak = numbers.get("warmup_max_lr")
    if peak is not None and kind != "WarmupCosineLR":
        found.optimizer["lr"] = repr(peak)
    lr = float(found.optimizer.get("lr", "0.001"))
    start = (
        numbers.get("warmup_min_ratio", 0.01)
        if kind == "WarmupCosineLR"
        else numbers.get("warmup_min_lr", 0.0) / (lr or 1.0)
    )
    total = int(numbers.get("total_num_steps", steps + 1))
    if total <= steps and kind != "WarmupLR":
        raise ConfigError(
            f"{found.source}: scheduler.params.total_num_steps is {total}, and warmup_num_steps {steps}: "
            "that leaves no steps for the rate to fall in; correct one of them"
        )
    left = total - steps
    if is_log:
        least = numbers.get("cos_min_ratio", 0.0001)
        falling = {
            "WarmupLR": "1.0",
            "WarmupDecayLR": f"max(0.0, ({total} - step) / {left})",
            "WarmupCosineLR": f"{least!r} + {1 - least!r} * (1 + math.cos("
            f"math.pi * (step - {steps - 1}) / {left})) / 2",
        }
        _logarithmic(found, min(1.0, start), steps, falling[kind])
        return
    start = min(1.0, max(start, 1e-8))  # LinearLR takes no 0
    found.schedule.extend(
        [
            "schedulers = torch.optim.lr_scheduler",
            f"scheduler = schedulers.LinearLR(optimizer, start_factor={start!r}, total_iters={steps})",
        ]
    )
    if kind == "WarmupLR":
        return
    then = f"schedulers.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters={left})"
    if kind == "WarmupCosineLR":
        least = numbers.get("cos_min_ratio", 0.0001) * lr
        then = f"schedulers.CosineAnnealingLR(optimizer, T_max={left}, eta_min={least!r})"
    found.schedule.extend(
        [
            f"decay = {then}",
            f"scheduler = schedulers.SequentialLR(optimizer, [scheduler, decay], milestones=[{steps}])",
        ]
    )


def _logarithmic(found: Conversion, start: float, steps: int, then: str) -> None:
    """Print a rate that rises with the logarithm of the step from a share of ``start`` to all of it within
    ``steps``, and is the share ``then`` behind them: DeepSpeed's formulas."""
    found.schedule.extend(
        [
            "import math",
            "schedulers = torch.optim.lr_scheduler",
            "def share(step):  # of the learning rate",
            f"    if step < {steps}:",
            f"        return {start!r} + {1 - start!r} * math.log(step + 1) / math.log({max(2, steps)})",
            f"    return {then}",
            "scheduler = schedulers.LambdaLR(optimizer, share)",
        ]
    )


def _step(found: Conversion, keys: Keys) -> None:
    norm = _not_negative(found, keys, "gradient_clipping")
    if norm == AUTO:
        found.say("gradient_clipping", BY_HAND, _FILLED)
    elif norm:
        found.managed["max_norm"] = repr(norm)
        found.say("gradient_clipping", DONE, "max_norm= of GeminiOptimizer")
    times = keys.take("gradient_accumulation_steps", int)
    if times == AUTO:
        found.say("gradient_accumulation_steps", BY_HAND, _FILLED)
    elif times is not None:
        if times < 1:
            raise ConfigError(
                f"{found.source}: gradient_accumulation_steps is {times}; it is to be 1 or more"
            )
        found.accumulate(times)
        found.say("gradient_accumulation_steps", DONE, "the loop: gradients stay until step()")
    recompute = keys.under("activation_checkpointing")
    if recompute.take("cpu_checkpointing", bool, False) is True:
        found.model["activation_offload"] = '"auto"'
        found.say(recompute.path("cpu_checkpointing"), DONE, "activation_offload=")
    for key in recompute.left():
        found.say(recompute.path(key), BY_HAND, "torch.utils.checkpoint works; or activation_recompute=True")


def _rest(found: Conversion, keys: Keys) -> None:
    _leave(found, keys)


def _leave(found: Conversion, keys: Keys) -> None:
    """Say of each key that is left what to do about it."""
    for key in keys.left():
        path = keys.path(key)
        verdict, text = _OTHERS.get(
            path, (NONE, "not known here; see the options of GeminiDDP and GeminiOptimizer")
        )
        found.say(path, verdict, text)
