"""DeepSpeed as a contender of ``gemini bench exact``: its engine, configured for each setting."""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from gemini_bench.exact_settings import (
    ADAM,
    LOSS_SCALE,
    Batch,
    Setting,
    Task,
    join_alone,
    set_launched,
    token_loss,
)
from gemini_bench.io_peers import silent_deepspeed


def configuration(task: Task, *, torch_adam: bool) -> dict[str, Any]:
    """Return DeepSpeed's configuration. ``torch_adam``: torch's AdamW instead of its own kernels, which its
    documentation prefers."""
    setting = task.setting
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": task.job.batch,
        "gradient_accumulation_steps": setting.parts,
        "gradient_clipping": setting.max_norm,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {**ADAM, "torch_adam": torch_adam}},
        "zero_optimization": _zero(task),
    }
    if torch_adam:
        found.update(zero_force_ds_cpu_optimizer=False, zero_allow_untested_optimizer=True)
    if setting.precision == "bf16":
        found["bf16"] = {"enabled": True}
    if setting.precision == "fp16":
        found["fp16"] = {"enabled": True, "loss_scale": 0, "initial_scale_power": int(math.log2(LOSS_SCALE))}
    return found


def _zero(task: Task) -> dict[str, Any]:
    """Return the section of ZeRO: the lowest stage that offers the setting. Parameters of any size are cut:
    by default those of fewer than 100,000 elements, here all, would stay whole."""
    setting = task.setting
    stage = zero_stage(setting)
    found: dict[str, Any] = {"stage": stage}
    if stage == 3:
        found["stage3_param_persistence_threshold"] = 0
    if setting.weights:
        found["offload_param"] = {"device": "cpu", "pin_memory": False}
    if setting.states == "host":
        found["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    if setting.states == "disk":
        place = str(Path(task.directory, "nvme"))
        found["offload_optimizer"] = {"device": "nvme", "nvme_path": place, "pin_memory": False}
    return found


def zero_stage(setting: Setting) -> int:
    """Return the stage of ZeRO; 0 is none."""
    if setting.weights or setting.states == "disk" or setting.ranks > 1:
        return 3
    if setting.states:
        return 2
    return 1 if setting.precision != "fp32" else 0


def compile_kernels(_options: dict[str, Any]) -> dict[str, Any]:
    """Have DeepSpeed compile its kernels, which takes minutes the first time. A contender that needs a kernel
    reports where this has failed."""
    with contextlib.suppress(ImportError):
        silent_deepspeed()
        builders = importlib.import_module("deepspeed.ops.op_builder.cpu")
        for builder in (builders.FusedAdamBuilder, builders.CPUAdamBuilder, builders.AsyncIOBuilder):
            with contextlib.suppress(RuntimeError, OSError, AssertionError):
                builder().load(verbose=False)
    return {}


class DeepSpeed:
    """Its engine over one rank."""

    def __init__(self, task: Task, *, torch_adam: bool = False) -> None:
        self._module = silent_deepspeed()
        set_launched(task)
        join_alone(task.setting)
        self._module.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        Path(task.directory, "nvme").mkdir(exist_ok=True)
        model = task.make_model()
        self._cut = zero_stage(task.setting) > 0
        self._engine, *_ = self._module.initialize(
            model=model,
            model_parameters=model.parameters(),
            config=configuration(task, torch_adam=torch_adam),
        )

    def step(self, batches: Sequence[Batch]) -> list[float]:
        """Train on the micro-batches; the engine counts them, divides their losses and clips."""
        losses = []
        for tokens, labels in batches:
            loss = token_loss(self._engine(tokens), labels)
            self._engine.backward(loss)
            self._engine.step()
            losses.append(float(loss.detach()))
        return losses

    def weights(self) -> dict[str, Tensor]:
        """Return the fp32 weights, which lie with the optimizer under ZeRO."""
        params = self._engine.module.named_parameters()
        if not self._cut:
            return {name: param.detach() for name, param in params}
        get = self._module.utils.safe_get_full_fp32_param
        return {name: get(param).detach() for name, param in params}

    def save(self, directory: str) -> None:
        """Save with ``save_checkpoint``."""
        self._engine.save_checkpoint(directory)
        dist.barrier()

    def load(self, directory: str) -> None:
        """Load with ``load_checkpoint``."""
        self._engine.load_checkpoint(directory)


TASKS = {"compile": compile_kernels}
