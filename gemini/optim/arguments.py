"""What GeminiOptimizer refuses to be made with."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

import torch

from gemini.errors import ConfigError
from gemini.model.handle import ManagedModel
from gemini.optim.host_update import elements_per_second
from gemini.optim.kernel_adam import KernelAdam
from gemini.optim.kernels import has_cuda_kernel
from gemini.optim.rule import UpdateRule
from gemini.optim.rule_choice import rule_of
from gemini.optim.self_managed import SelfManaged
from gemini.runtime import ManagedParameter
from gemini.runtime.storage.model_storage import HostUpdates
from gemini.system.threads import usable_processors

logger = logging.getLogger(__name__)

Overlap = bool | Literal["backward"]  # of GeminiOptimizer: where updates run
Margin = float | Literal["auto"] | None  # its gpu_margin_mem_ratio


def checked_max_norm(max_norm: float) -> float:
    """Return the norm to clip to in every step. Raise ConfigError for one that means nothing."""
    if not max_norm >= 0:
        raise ConfigError(f"max_norm is {max_norm}; give a positive number, or 0 to clip nothing")
    return max_norm


def check_optimizer(
    optim: torch.optim.Optimizer, model: ManagedModel, *, elementwise: bool = False, whole: bool = False
) -> UpdateRule:
    """Return by which rule ``optim`` updates the chunks of ``model``. Raise ConfigError where it cannot."""
    if isinstance(optim, SelfManaged):
        optim.require_free()
    rule = rule_of(optim, elementwise=elementwise, whole=whole)
    if rule.whole and model.manager.part is not None:
        raise ConfigError(
            f"{type(optim).__name__} needs whole parameters, and this model was cut before it was wrapped "
            "(model_ranks: tensor or pipeline parallelism): what it would take for one may be a part; train "
            "over ranks of data alone, without model_ranks, or with an optimizer that is element-wise: "
            "HybridAdam, Lion, or one of torch's but Muon and Adafactor"
        )
    for index, group in enumerate(optim.param_groups):
        check_parameters(index, group["params"], model)
    for group in optim.param_groups:
        rule.hyper(group)
    if not isinstance(optim, KernelAdam):
        return rule
    if model.device.torch_device.type == "cuda" and not has_cuda_kernel():
        raise ConfigError(
            "this build cannot update parameters on a GPU: it was built without nvcc; build it where "
            "nvcc is on PATH (`gemini check` says how)"
        )
    if optim.state_format.remainders and any(group.plan.master for group in model.storage.groups):
        raise ConfigError(
            "master_remainders keeps the rest of bf16 parameters, mixed_precision whole fp32 masters: "
            "use one of both. To train a parameter in 14 bytes, 10 or 8, make the model bf16 "
            "(model.to(torch.bfloat16)) and leave mixed_precision out"
        )
    return rule


def check_parameters(index: int, params: Iterable[Any], model: ManagedModel) -> None:
    """Raise ConfigError where ``model`` does not manage a parameter of the optimizer's group ``index``; one
    may come with a name."""
    for tensor in map(bare, params):
        if not is_managed(tensor, model):
            raise ConfigError(
                f"group {index} of the optimizer holds a parameter of shape {tuple(tensor.shape)} that "
                "the model does not manage; build the optimizer from the wrapped model's parameters"
            )


def bare(param: Any) -> Any:
    """Return a parameter that may come with a name."""
    return param[1] if isinstance(param, tuple) else param


def is_managed(tensor: Any, model: ManagedModel) -> bool:
    """Say whether ``model`` manages a parameter that its module has."""
    if type(tensor) is not ManagedParameter:
        return False
    return model.storage.slots.get(tensor._slot.name) is tensor._slot


def host_updates_of(model: ManagedModel, ratio: Margin) -> HostUpdates | None:
    """Return what ``gpu_margin_mem_ratio=ratio`` has the CPU update on HOST; None: nothing, as ``"auto"``
    does where a number could not be had.

    Raises:
        ConfigError: it cannot be done with this model's tiers.
    """
    has_gpu = model.device.has_own_memory
    if ratio is None or (ratio in ("auto", 0) and not has_gpu):
        return None
    if ratio != "auto" and not (isinstance(ratio, (int, float)) and 0 <= ratio <= 1):
        raise ConfigError(f"gpu_margin_mem_ratio is {ratio!r}; give a number from 0 to 1, 'auto' or None")
    if not has_gpu:
        raise ConfigError(
            f"gpu_margin_mem_ratio is {ratio}, but there is no GPU: all updates are the CPU's, and optimizer "
            "states stay on DEVICE where there is room; leave it out and raise device_bytes instead"
        )
    budgets = model.manager.chunks.budgets
    if budgets.host_bytes < _least_host_bytes(model):
        if ratio == "auto":
            return None
        beside_disk = budgets.disk_dir is not None
        held = (
            "all model data, beside disk_dir,"
            if beside_disk
            else "the optimizer states and one update's chunks"
        )
        raise ConfigError(
            f"gpu_margin_mem_ratio is {ratio}, but host_bytes is {budgets.host_bytes} and {held} take "
            f"{_least_host_bytes(model)}: the CPU updates states on HOST alone; raise host_bytes to that, or "
            "leave out gpu_margin_mem_ratio: then states come to the GPU"
        )
    sharding = model.manager.sharding
    whole_bytes = sharding.gather_bytes if sharding is not None else 0
    _warn_of_one_thread(model)
    updates = HostUpdates.of_groups(model.storage.groups, whole_bytes, ratio)
    if ratio != "auto":
        return updates
    numel = sum(group.numel for group in updates.groups)
    return replace(updates, elements_per_second=elements_per_second(model.device.processors, numel))


def _warn_of_one_thread(model: ManagedModel) -> None:
    """Tell who launches several ranks that the CPU updates with fewer threads than there are processors."""
    sharding = model.manager.sharding
    if sharding is None or torch.get_num_threads() > 1:
        return
    usable = usable_processors()
    near = usable.intersection(model.device.processors) or usable
    share = len(near) // sharding.peers.ranks_on_this_host
    if share > 1:
        logger.warning(
            "the CPU updates optimizer states with one thread, and there are processors for %d in each of "
            "the ranks here; torchrun sets OMP_NUM_THREADS=1 where it is not set: set OMP_NUM_THREADS=%d",
            share,
            share,
        )


def _least_host_bytes(model: ManagedModel) -> int:
    """Return what HOST has to hold: all states, and what one update needs beside them. With a DISK tier all
    model data: states would go there where others take their room, and on DISK the CPU does not update."""
    if model.manager.chunks.budgets.disk_dir is not None:
        return model.manager.context.size.total_bytes
    groups = HostUpdates.of_groups(model.storage.groups, 0, 0.0).groups
    beside = max((group.param_bytes + group.grad_bytes for group in groups), default=0)
    return sum(group.state_bytes for group in groups) + beside


def check_several(model: ManagedModel, overlaps: set[Overlap], ratios: set[Margin]) -> None:
    """Raise ConfigError where ``model`` cannot have several optimizers with these values of ``overlap`` and
    ``gpu_margin_mem_ratio``."""
    if model.manager.sharding is not None:
        raise ConfigError(
            "over several ranks one optimizer updates a model: gradients of all parameters are exchanged "
            "and given up together; put the parameters into groups of one optimizer"
        )
    if model.config.precision == torch.float16:
        raise ConfigError(
            "under mixed_precision='fp16' one optimizer updates a model: it keeps the loss scale; "
            "put the parameters into groups of one optimizer"
        )
    if "backward" in overlaps:
        raise ConfigError(
            "with overlap='backward' one optimizer updates a model: a backward pass makes the gradients "
            "of all its parameters; put the parameters into groups of one optimizer"
        )
    if len(ratios) > 1:
        raise ConfigError(
            f"the optimizers of one model have gpu_margin_mem_ratio {sorted(map(str, ratios))}, but share "
            "its chunks; give each the same"
        )


def check_mode(
    overlap: Overlap, *, clips: bool, counts: bool, scales: bool, several_ranks: bool, shares: bool
) -> None:
    """Raise ConfigError where ``overlap`` is unknown, or updates cannot run in backward."""
    if overlap in (True, False):
        return
    if overlap != "backward":
        raise ConfigError(f"overlap={overlap!r} is unknown; choose True, False or 'backward'")
    reasons = {
        "max_norm=: the norm is known when all gradients are": clips,
        "log_num_zeros_in_grad=: gradients are used up before they are counted": counts,
        "mixed_precision='fp16': whether gradients overflow is known when all are there": scales,
        "several ranks": several_ranks,
        "an optimizer of a class that is not known: its step may change what parameters share": shares,
    }
    for reason, applies in reasons.items():
        if applies:
            raise ConfigError(f"overlap='backward' does not go with {reason}; choose overlap=True")
