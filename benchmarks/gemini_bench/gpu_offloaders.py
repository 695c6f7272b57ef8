"""Other libraries that keep optimizer states in host memory, with the job of case ``peers``.

All train as GeminiDDP does in bf16: fp32 masters, AdamW with the same options, nothing clipped.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from gemini.jobs.gpt.model import language_loss
from gemini.system.device import cuda_capability
from gemini_bench.adam_peers import HYPER
from gemini_bench.gpu_device import CUDA, BenchDevice
from gemini_bench.gpu_trainee import SEED
from gemini_bench.llama import Llama, LlamaConfig
from gemini_bench.trainee import Batch

FSDP2, TORCHAO, DEEPSPEED = "torch FSDP2", "torchao", "DeepSpeed"
# What they raise where they cannot work.
_ABSENT = (ImportError, RuntimeError, OSError, AssertionError, ValueError)
_ADAM: dict[str, Any] = {
    "lr": HYPER.lr,
    "betas": HYPER.betas,
    "eps": HYPER.eps,
    "weight_decay": HYPER.weight_decay,
}


class Offloader(Protocol):
    """A model and its optimizer."""

    def step(self, batch: Batch) -> Tensor:
        """Train on one batch and return its loss."""

    def close(self) -> None:
        """Stop everything that it started for this process."""


class OffloaderAbsent(Exception):
    """A library cannot be measured here; the message says why."""


class Fsdp2Trainee:
    """``fully_shard`` with CPUOffloadPolicy: parameters, gradients and states in page-locked host memory."""

    def __init__(self, config: LlamaConfig, device: BenchDevice, _batch: int) -> None:
        kind = device.compute.torch_device.type
        backend = "nccl" if kind == CUDA else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        model = _whole_model(config)
        # Without a GPU there is nowhere to offload to.
        keywords: dict[str, Any] = {
            "mesh": init_device_mesh(kind, (1,)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
            "offload_policy": CPUOffloadPolicy() if kind == CUDA else OffloadPolicy(),
        }
        for block in model.blocks:
            fully_shard(block, **keywords)
        self._model: nn.Module = model
        fully_shard(model, **keywords)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), fused=True, **_ADAM)

    def step(self, batch: Batch) -> Tensor:
        """Train on one batch and return its loss."""
        loss = language_loss(self._model(batch[0]), batch[1])
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def close(self) -> None:
        """End the process group."""
        dist.destroy_process_group()


class TorchaoTrainee:
    """``CPUOffloadOptimizer``, which sends gradients off as they come; fp32 parameters under autocast, for it
    keeps no masters of others."""

    def __init__(self, config: LlamaConfig, device: BenchDevice, _batch: int) -> None:
        offloading = importlib.import_module("torchao.optim").CPUOffloadOptimizer
        self._model = _whole_model(config).to(device.compute.torch_device)
        self._optimizer = offloading(
            self._model.parameters(), torch.optim.AdamW, offload_gradients=True, fused=True, **_ADAM
        )

    def step(self, batch: Batch) -> Tensor:
        """Train on one batch and return its loss."""
        with torch.autocast(CUDA, torch.bfloat16):
            logits = self._model(batch[0])
        loss = language_loss(logits.float(), batch[1])
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def close(self) -> None:
        """Do nothing."""


class DeepSpeedTrainee:
    """ZeRO-2 with the optimizer on the CPU: bf16 parameters on the GPU, page-locked masters and states."""

    def __init__(self, config: LlamaConfig, device: BenchDevice, batch: int) -> None:
        if device.compute.torch_device.type != CUDA:
            raise OffloaderAbsent("it offloads from a GPU alone")
        os.environ["DS_ACCELERATOR"] = CUDA
        # It reads the capabilities to build for as two numbers: no 9.0a.
        os.environ["TORCH_CUDA_ARCH_LIST"] = "{}.{}".format(*cuda_capability(device.compute.torch_device))
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        deepspeed = importlib.import_module("deepspeed")
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
        deepspeed.init_distributed(dist_backend="nccl", verbose=False)
        model = _whole_model(config)
        self._engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=deepspeed_configuration(batch)
        )

    def step(self, batch: Batch) -> Tensor:
        """Train on one batch and return its loss."""
        loss = language_loss(self._engine(batch[0]), batch[1])
        self._engine.backward(loss)
        self._engine.step()
        return loss.detach()

    def close(self) -> None:
        """End the process group."""
        dist.destroy_process_group()


def deepspeed_configuration(batch: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration, tuned for the time of a step."""
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": _ADAM},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "contiguous_gradients": True,
            "round_robin_gradients": True,
        },
    }


def open_offloader(name: str, config: LlamaConfig, device: BenchDevice, batch: int) -> Offloader:
    """Return one of :data:`OFFLOADERS` with its model. Raises OffloaderAbsent if it is not available."""
    try:
        return OFFLOADERS[name](config, device, batch)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        raise OffloaderAbsent(f"it needs {missing}: pip install {missing}") from error
    except _ABSENT as error:
        said = " ".join(str(error).split())[:300]
        raise OffloaderAbsent(f"it does not work here: {type(error).__name__}: {said}") from error


def _whole_model(config: LlamaConfig) -> Llama:
    torch.manual_seed(SEED)
    return Llama(config)


OFFLOADERS: Mapping[str, Callable[[LlamaConfig, BenchDevice, int], Offloader]] = MappingProxyType(
    {FSDP2: Fsdp2Trainee, TORCHAO: TorchaoTrainee, DEEPSPEED: DeepSpeedTrainee}
)
