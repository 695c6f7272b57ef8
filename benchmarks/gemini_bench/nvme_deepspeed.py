"""DeepSpeed ZeRO-3 with optimizer states and parameters on NVMe, at the job of case ``alldisk``."""

from __future__ import annotations

import importlib
import os
import socket
from pathlib import Path
from typing import Any

import torch

from gemini.jobs.gpt.model import GPT, language_loss
from gemini_bench.io_peers import DEEPSPEED, reason, silent_deepspeed
from gemini_bench.nvme_blocks import StepTimes, run_blocks, timed
from gemini_bench.nvme_settings import Settings
from gemini_bench.trainee import Batch

FAST, SMALL = "DeepSpeed for speed", "DeepSpeed for memory"
VARIANTS = (FAST, SMALL)
_SEED = 1234
_LEARNING_RATE = 1e-4
_MIB = 2**20


def usable_task(options: dict[str, Any]) -> dict[str, Any]:
    """Say why DeepSpeed cannot be measured here; None where it can. Compiles what it needs, for minutes."""
    del options
    try:
        module = silent_deepspeed()
        builders = importlib.import_module("deepspeed.ops.op_builder")
        builders.CPUAdamBuilder().load(verbose=False)
        builders.AsyncIOBuilder().load(verbose=False).aio_handle()
    except (ImportError, RuntimeError, OSError, AssertionError) as error:
        return {"absent": reason(DEEPSPEED, error), "version": None}
    return {"absent": None, "version": module.__version__}


def configuration(settings: Settings, variant: str, directory: str) -> dict[str, Any]:
    """Return DeepSpeed's configuration, tuned for the time of a step or for the least memory.

    Its buffers must each hold the largest parameter; the pipelined optimizer needs three times as many.
    """
    largest = settings.model.vocab * settings.model.hidden
    fast = variant == FAST
    return {
        "train_micro_batch_size_per_gpu": settings.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": _LEARNING_RATE, "weight_decay": 0.0}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": directory,
                "buffer_count": 12 if fast else 4,
                "pipeline_read": fast,
                "pipeline_write": fast,
                "pin_memory": True,
                "fast_init": True,
            },
            "offload_param": {
                "device": "nvme",
                "nvme_path": directory,
                # One for every parameter of a block's size, none of which is then read twice in a step.
                "buffer_count": 2 * settings.model.layers + 4 if fast else 5,
                "buffer_size": largest,
                "max_in_cpu": 0,
                "pin_memory": True,
            },
            "sub_group_size": max(1, largest // 4),
            "overlap_comm": fast,
            "contiguous_gradients": True,
            "reduce_bucket_size": max(1000, largest // (1 if fast else 8)),
            "stage3_prefetch_bucket_size": largest // (4 if fast else 8),
            "stage3_param_persistence_threshold": 10_000 if fast else 0,
            "stage3_max_live_parameters": 4 * largest if fast else largest,
            "stage3_max_reuse_distance": 4 * largest if fast else 0,
        },
        "aio": {
            "block_size": 8 * _MIB if fast else _MIB,
            "queue_depth": 32,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        },
    }


class DeepSpeedTrainee:
    """The model under DeepSpeed, built partitioned so that it is never whole in memory."""

    def __init__(self, settings: Settings, variant: str, directory: str) -> None:
        deepspeed = silent_deepspeed()
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
        os.environ["MASTER_PORT"] = str(_free_port())
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        config = configuration(settings, variant, directory)
        torch.manual_seed(_SEED)
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = GPT(settings.model)
        self._engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )

    def step(self, batch: Batch) -> StepTimes:
        """Train on one batch."""

        def forward_backward() -> float:
            loss = language_loss(self._engine(batch[0]), batch[1])
            self._engine.backward(loss)
            return float(loss.detach())

        return timed(forward_backward, self._engine.step)


def train_task(options: dict[str, Any]) -> dict[str, Any]:
    """Train with ``options["variant"]``; its files are below the directory."""
    settings = Settings.from_options(options)
    directory = Path(options["directory"]) / "deepspeed"
    directory.mkdir(exist_ok=True)
    trainee = DeepSpeedTrainee(settings, options["variant"], os.fspath(directory))
    return run_blocks(trainee.step, settings)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


TASKS = {"usable": usable_task, "train": train_task}
