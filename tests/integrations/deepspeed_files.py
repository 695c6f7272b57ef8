"""Forty configurations as people write them, and the rates that DeepSpeed documents for its schedulers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

UPDATES = 12  # of a run


# ------------------------------------------------------------------------- DeepSpeed's own formulas
def counted(update: int) -> int:
    """Return the step that DeepSpeed's scheduler counts: -1 before its first step, after update 0."""
    return update - 1


def warmup(params: dict[str, Any], update: int) -> float:
    """Return how far a warmup has come, 0 to 1, by its documented type."""
    steps = max(2, params.get("warmup_num_steps", 1000))
    step = counted(update)
    if step < 0:
        return 0.0
    if step >= steps:
        return 1.0
    return step / steps if params.get("warmup_type") == "linear" else math.log(step + 1) / math.log(steps)


def is_warm(params: dict[str, Any], update: int) -> bool:
    """Return whether the warmup is over."""
    return counted(update) >= max(2, params.get("warmup_num_steps", 1000))


def warmup_lr(params: dict[str, Any], update: int, lr: float) -> float:
    """WarmupLR: from warmup_min_lr to warmup_max_lr, which is then kept."""
    least, most = params.get("warmup_min_lr", 0.0), params.get("warmup_max_lr", lr)
    return float(least + (most - least) * warmup(params, update))


def warmup_decay_lr(params: dict[str, Any], update: int, lr: float) -> float:
    """WarmupDecayLR: the same, then a line to warmup_min_lr at total_num_steps."""
    least, most = params.get("warmup_min_lr", 0.0), params.get("warmup_max_lr", 0.001)
    way = warmup(params, update)
    if is_warm(params, update):
        total, steps = params["total_num_steps"], max(2, params.get("warmup_num_steps", 1000))
        way = max(0.0, (total - counted(update)) / (total - steps))
    return float(least + (most - least) * way)


def warmup_cosine_lr(params: dict[str, Any], update: int, lr: float) -> float:
    """WarmupCosineLR: shares of the optimizer's rate, along half a cosine to cos_min_ratio."""
    if update == 0:
        return 0.0
    least, low = params.get("warmup_min_ratio", 0.0), params.get("cos_min_ratio", 0.0001)
    if not is_warm(params, update):
        return float(lr * (least + (1 - least) * warmup(params, update)))
    steps = max(2, params.get("warmup_num_steps", 1000))
    way = min(1.0, (counted(update) - steps + 1) / (params["total_num_steps"] - steps))
    return float(lr * (low + (1 - low) * (1 + math.cos(math.pi * way)) / 2))


def range_test(params: dict[str, Any], update: int, lr: float) -> float:
    """LRRangeTest: the rate grows by step_rate of the first one in each interval."""
    interval = update / params.get("lr_range_test_step_size", 2000)
    if params.get("lr_range_test_staircase"):
        interval = math.floor(interval)
    first = params.get("lr_range_test_min_lr", 0.001)
    return float(first * (1 + params.get("lr_range_test_step_rate", 1.0) * interval))


def cycle(params: dict[str, Any], update: int) -> float:
    """Return the height of OneCycle's cycle, 0 to 1."""
    first = params.get("cycle_first_step_size", 2000)
    second = params.get("cycle_second_step_size", first)
    place = update % (first + second)
    rises = place <= first
    stairs = params.get("cycle_first_stair_count", 0)
    if not rises:
        stairs = params.get("cycle_second_stair_count", stairs)
    part = place / first if rises else (first + second - place) / second
    return math.floor(part * stairs + 1e-9) / stairs if stairs else float(part)


def after_cycle(params: dict[str, Any], update: int) -> float:
    """Return the updates behind the cycle, in steps of the decay; 0 within it."""
    first = params.get("cycle_first_step_size", 2000)
    over = update - first - params.get("cycle_second_step_size", first)
    size = params.get("decay_step_size", 0)
    return float(over / size) if over > 0 and size else 0.0


def one_cycle_lr(params: dict[str, Any], update: int, lr: float) -> float:
    """OneCycle: up to cycle_max_lr and back, then a decay."""
    least, most = params["cycle_min_lr"], params["cycle_max_lr"]
    first = params.get("cycle_first_step_size", 2000)
    if update > first + params.get("cycle_second_step_size", first):
        return float(least / (1 + params.get("decay_lr_rate", 0.0) * after_cycle(params, update)))
    return float(least + (most - least) * cycle(params, update))


def one_cycle_momentum(params: dict[str, Any], update: int) -> float:
    """OneCycle: the momentum falls while the rate rises, beginning with the least."""
    least, most = params.get("cycle_min_mom", 0.8), params.get("cycle_max_mom", 0.9)
    first = params.get("cycle_first_step_size", 2000)
    if update == 0:
        return float(least)
    if update > first + params.get("cycle_second_step_size", first):
        return float(most * (1 + params.get("decay_mom_rate", 0.0) * after_cycle(params, update)))
    return float(most - (most - least) * cycle(params, update))


RATES = {
    "WarmupLR": warmup_lr,
    "WarmupDecayLR": warmup_decay_lr,
    "WarmupCosineLR": warmup_cosine_lr,
    "LRRangeTest": range_test,
    "OneCycle": one_cycle_lr,
}


# ------------------------------------------------------------------------------------ configurations
def _scheduled(kind: str, optimizer: str = "AdamW", **params: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": optimizer, "params": {"lr": 2e-3}},
        "scheduler": {"type": kind, "params": params},
    }


def _optimizer(kind: str, **params: Any) -> dict[str, Any]:
    return {"train_batch_size": 2, "optimizer": {"type": kind, "params": params}}


def _infinity(disk: str) -> dict[str, Any]:
    place = {"device": "nvme", "nvme_path": disk, "pin_memory": True, "buffer_count": 4}
    return {
        "train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {**place, "buffer_size": 1e8, "max_in_cpu": 1e9},
            "offload_optimizer": {**place, "pipeline_read": True, "pipeline_write": True, "fast_init": False},
            "sub_group_size": 1e9,
            "stage3_prefetch_bucket_size": 5e7,
            "stage3_param_persistence_threshold": 1e5,
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
        "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "overlap_events": True},
    }


def _of_trainer(stage: int, **zero: Any) -> dict[str, Any]:
    automatic = ("lr", "betas", "eps", "weight_decay")
    return {
        "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
                 "hysteresis": 2, "min_loss_scale": 1},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(automatic, "auto")},
        "scheduler": {"type": "WarmupDecayLR", "params": dict.fromkeys(
            ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": "auto",
                              "stage3_prefetch_bucket_size": "auto", **zero},
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
    }  # fmt: skip


def _fsdp(**more: Any) -> dict[str, Any]:
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": "bf16",
        "num_machines": 1,
        "num_processes": 8,
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "fsdp_config": {
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": "GPT2Block",
            "fsdp_backward_prefetch": "BACKWARD_PRE",
            "fsdp_use_orig_params": True,
            "fsdp_sync_module_states": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            **more,
        },
    }


def _plugin(**more: Any) -> dict[str, Any]:
    return {
        "distributed_type": "DEEPSPEED",
        "mixed_precision": "no",
        "num_processes": 2,
        "deepspeed_config": {
            "zero_stage": 3,
            "zero3_init_flag": True,
            "zero3_save_16bit_model": True,
            **more,
        },
    }


ZERO_PLUS_PLUS = {
    "stage": 3,
    "zero_hpz_partition_size": 8,
    "zero_quantized_weights": True,
    "zero_quantized_gradients": True,
    "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024},
    "mics_shard_size": -1,
}
COMPRESSED = {
    "train_batch_size": 2,
    "compression_training": {
        "weight_quantization": {
            "shared_parameters": {"enabled": True, "quantize_groups": 1},
            "different_groups": {"wq1": {"params": {"start_bits": 8}, "modules": ["attention.self"]}},
        },
        "layer_reduction": {"enabled": False},
    },
}
STAGED = {
    "train_micro_batch_size_per_gpu": 1,
    "train_batch_size": 3,
    "pipeline": {"stages": "auto", "partition": "best", "activation_checkpoint_interval": 1},
    "moe": {"enabled": True, "ep_size": 4, "num_experts": [8]},
    "tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 2}},
    "sequence_parallel_size": 2,
    "expert_parallel": {"enabled": True, "ep_size": 2},
}
WATCHED = {
    "train_micro_batch_size_per_gpu": 1,
    "steps_per_print": 3,
    "dataloader_drop_last": True,
    "tensorboard": {"enabled": True, "output_path": "logs", "job_name": "a"},
    "wandb": {"enabled": False, "project": "b"},
    "flops_profiler": {"enabled": True, "profile_step": 1, "module_depth": -1},
    "comms_logger": {"enabled": True, "verbose": False, "prof_ops": ["all_reduce"]},
    "dump_state": True,
    "elasticity": {"enabled": True, "micro_batch_sizes": [2, 4], "max_gpus": 100},
    "curriculum_learning": {"enabled": True, "schedule_config": {"total_curriculum_step": 10}},
    "data_efficiency": {"enabled": True, "data_sampling": {"enabled": True}},
    "autotuning": {"enabled": False, "arg_mappings": {"a": "b"}},
    "checkpoint": {"tag_validation": "Warn", "load_universal": True},
    "compile": {"deepcompile": True},
}
RECOMPUTED = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "activation_checkpointing": {
        "partition_activations": True,
        "cpu_checkpointing": True,
        "contiguous_memory_optimization": True,
        "number_checkpoints": 4,
        "profile": False,
    },
}


def fenced(language: str) -> str:
    """Return the first block of this language on the page about configurations."""
    page = (Path(__file__).parents[2] / "docs" / "migrate.md").read_text()
    return page.split(f"```{language}\n")[1].split("```")[0]


def configurations(disk: str) -> dict[str, dict[str, Any]]:
    """Return the documents by their names; those that ``accelerate config`` writes begin with "accelerate".

    ``disk``: a directory for DISK tiers.
    """
    cpu = {"device": "cpu", "pin_memory": True}
    page = json.loads(fenced("json").replace("/mnt/nvme", disk))
    return {
        "nothing": {},
        "stage 1": {"train_batch_size": 4, "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8}},
        "stage 2, bf16": {"bf16": {"enabled": True},
                          "zero_optimization": {"stage": 2, "offload_optimizer": cpu}},
        "stage 2, old names": {"bfloat16": {"enabled": True},
                               "zero_optimization": {"stage": 2, "cpu_offload": True}},
        "stage 3, cpu": {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {
            "stage": 3, "offload_param": cpu, "offload_optimizer": {**cpu, "ratio": 0.3}}},
        "infinity": _infinity(disk),
        "fp16": {"fp16": {"enabled": True, "loss_scale_window": 500, "initial_scale_power": 8,
                          "hysteresis": 4, "min_loss_scale": 2},
                 "gradient_clipping": 0.5, "communication_data_type": "fp16"},
        "fp16, fixed scale": {"fp16": {"enabled": True, "loss_scale": 64, "loss_scale_window": 10}},
        "fp16 off": {"fp16": {"enabled": False, "loss_scale": 0}, "bf16": {"enabled": False}},
        "bf16 states": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True,
                                 "bf16_optimizer_states": True}},
        "adam": _optimizer("Adam", lr=1e-3, betas=[0.8, 0.999], eps=1e-8, weight_decay=3e-7),
        "adam, l2": _optimizer("Adam", lr=1e-3, adam_w_mode=False, weight_decay=0.1, torch_adam=True),
        "adamw of torch": _optimizer("AdamW", lr=1e-3, torch_adam=True, bias_correction=False),
        "cpu adam": _optimizer("DeepSpeedCPUAdam", lr=1e-3, adamw_mode=True),
        "lamb": _optimizer("Lamb", lr=1e-3, weight_decay=0.01, max_coeff=0.3, min_coeff=0.01),
        "lion": _optimizer("Lion", lr=1e-4, betas=[0.9, 0.99], weight_decay=0.1),
        "sgd": _optimizer("SGD", lr=0.1, momentum=0.9, nesterov=True),
        "adagrad": _optimizer("Adagrad", lr=0.01, eps=1e-10),
        "muon": _optimizer("Muon", lr=0.02, momentum=0.95, adam_lr=3e-4, ns_method="gram"),
        "muon, two rates": _optimizer("Muon", muon_lr=0.01, adam_lr=3e-4, weight_decay=0.1, ns_steps=3),
        "muon in a warmup": _scheduled("WarmupCosineLR", "Muon", warmup_num_steps=4, total_num_steps=10),
        "1-bit": _optimizer("OneBitAdam", lr=1e-3, freeze_step=400, cuda_aware=False),
        "0/1": _optimizer("ZeroOneAdam", lr=1e-3, var_freeze_step=1000, local_step_scaler=100),
        "1-bit lamb": _optimizer("OneBitLamb", lr=1e-3, weight_decay=0.01, freeze_step=1000, coeff_beta=0.9,
                                 factor_max=4.0, max_coeff=0.3, comm_backend_name="nccl"),
        "log warmup": _scheduled("WarmupLR", warmup_max_lr=1e-3, warmup_num_steps=4, last_batch_iteration=-1),
        "linear warmup": _scheduled("WarmupLR", warmup_min_lr=1e-4, warmup_num_steps=4, warmup_type="linear"),
        "warmup of one step": _scheduled("WarmupLR", "Lion", warmup_num_steps=1),
        "log decay": _scheduled("WarmupDecayLR", warmup_num_steps=3, total_num_steps=10, warmup_max_lr=3e-3),
        "linear decay": _scheduled("WarmupDecayLR", "SGD", warmup_num_steps=3, total_num_steps=9,
                                   warmup_min_lr=1e-4, warmup_type="linear"),
        "log cosine": _scheduled("WarmupCosineLR", warmup_num_steps=4, total_num_steps=10),
        "linear cosine": _scheduled("WarmupCosineLR", "Lamb", warmup_num_steps=3, total_num_steps=8,
                                    warmup_min_ratio=0.1, cos_min_ratio=0.05, warmup_type="linear"),
        "one cycle": _scheduled("OneCycle", cycle_min_lr=1e-4, cycle_max_lr=1e-3, cycle_first_step_size=4,
                                cycle_second_step_size=3, decay_step_size=2, decay_lr_rate=0.5,
                                cycle_min_mom=0.85, cycle_max_mom=0.95, decay_mom_rate=0.001),
        "cycle in stairs": _scheduled("OneCycle", "SGD", cycle_min_lr=1e-4, cycle_max_lr=1e-3,
                                      cycle_first_step_size=4, cycle_first_stair_count=2),
        "range test": _scheduled("LRRangeTest", lr_range_test_min_lr=1e-4, lr_range_test_step_size=5,
                                 lr_range_test_step_rate=4),
        "range test in stairs": _scheduled("LRRangeTest", lr_range_test_min_lr=1e-4,
                                           lr_range_test_step_size=5, lr_range_test_staircase=True),
        "trainer, stage 2": _of_trainer(2, offload_optimizer=cpu, allgather_partitions=True),
        "trainer, stage 3": _of_trainer(3, stage3_gather_16bit_weights_on_model_save=True),
        "page": page,
        "zero++": {"train_batch_size": 4, "zero_optimization": ZERO_PLUS_PLUS},
        "compressed": COMPRESSED,
        "staged": STAGED,
        "watched": WATCHED,
        "recomputed": RECOMPUTED,
        "accelerate, fsdp": _fsdp(fsdp_sharding_strategy="FULL_SHARD", fsdp_offload_params=True),
        "accelerate, fsdp 2": {**_fsdp(fsdp_version=2, fsdp_reshard_after_forward=True,
                                       fsdp_activation_checkpointing=True), "dynamo_config": {}},
        "accelerate, hybrid": _fsdp(fsdp_sharding_strategy=4, fsdp_state_dict_type="FULL_STATE_DICT"),
        "accelerate, plugin": _plugin(gradient_clipping=1.0, gradient_accumulation_steps=2,
                                      offload_optimizer_device="cpu", offload_param_device="none"),
        "accelerate, nvme": _plugin(offload_param_device="nvme", offload_param_nvme_path=disk,
                                    deepspeed_multinode_launcher="standard"),
        "fsdp of the trainer": {"transformer_layer_cls_to_wrap": ["GPT2Block"],
                                "backward_prefetch": "backward_pre",
                                "cpu_offload": True, "xla": False, "activation_checkpointing": True},
    }  # fmt: skip
