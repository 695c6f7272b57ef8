"""TorchFSDPPlugin: torch's own sharding of parameters, gradients and states over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from gemini.errors import ConfigError
from gemini.optim.kernel_adam import CPUAdam
from gemini.parallel.booster.data_parallel import (
    AutocastCriterion,
    ShardedData,
    ShardedOptimizer,
    SingleProcess,
    like,
)
from gemini.parallel.booster.mixed_precision import Precision
from gemini.parallel.booster.optimizer import BoostedOptimizer
from gemini.parallel.booster.plugin.base import Boosted, Criterion, Plugin
from gemini.runtime.intercept.compiled import find_blocks
from gemini.system.device import current_device


class TorchFSDPPlugin(Plugin):
    """Train with torch's ``fully_shard`` (FSDP2): each rank keeps a part of every parameter, as a DTensor.

    The blocks of the model (members of its lists) are gathered one by one, the rest with the model. Any torch
    optimizer may be used, made before :meth:`Booster.boost`; the optimizers of gemini need plain tensors.
    Every rank starts with the weights and buffers of the first rank. Without a process group the model trains
    in this process.

    Args:
        process_group: the ranks; None means all.
        reshard_after_forward: free gathered parameters between forward and backward.
        cpu_offload: keep parts in CPU memory beside a GPU.
    """

    def __init__(
        self,
        *,
        process_group: dist.ProcessGroup | None = None,
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
    ) -> None:
        self.process_group = process_group
        self._reshard = reshard_after_forward
        self._offload = cpu_offload

    def configure(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        criterion: Criterion | None,
        precision: Precision | None,
    ) -> Boosted:
        """See :class:`Plugin`. Parameters are replaced, also in the optimizer. In bf16 they are gathered as
        bf16, and gradients are summed in fp32.
        """
        _check_model(model, optimizer, precision)
        device = current_device()
        dtype = precision.dtype if precision is not None else None
        if criterion is not None and dtype is not None:
            criterion = AutocastCriterion(criterion, device, dtype)
        model.to(device)
        if isinstance(criterion, nn.Module):
            criterion.to(device)
        if not self.ranks.is_group:
            boosted = None if optimizer is None else BoostedOptimizer(optimizer)
            return Boosted(SingleProcess(model, device, dtype), boosted, criterion)
        names = {param: name for name, param in model.named_parameters()}
        self._shard(model, device, dtype)
        if optimizer is not None:
            _follow(optimizer, {param: model.get_parameter(name) for param, name in names.items()})
        sharded = None if optimizer is None else ShardedOptimizer(optimizer)
        return Boosted(ShardedData(model, device, dtype), sharded, criterion)

    def no_sync(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> AbstractContextManager[Any]:
        """See :class:`Plugin`; ``optimizer`` is not needed. Inside, gradients stay whole on each rank."""
        assert isinstance(model, (ShardedData, SingleProcess))
        return model.no_sync()

    def _shard(self, model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
        group = self.process_group or dist.group.WORLD
        assert group is not None
        with torch.no_grad():
            for param in model.parameters():
                param.data = param.data.contiguous()
                dist.broadcast(param.data, group=group, group_src=0)
            for buffer in model.buffers():
                dist.broadcast(buffer, group=group, group_src=0)
        options: dict[str, Any] = {
            "mesh": DeviceMesh.from_group(group, device.type),
            "reshard_after_forward": self._reshard,
            "offload_policy": CPUOffloadPolicy() if self._offload else OffloadPolicy(),
        }
        inside, around = MixedPrecisionPolicy(), MixedPrecisionPolicy()
        if dtype is not None:
            inside = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
            around = replace(inside, output_dtype=torch.float32)
        for block in _apart(model):
            fully_shard(block, mp_policy=inside, **options)
        fully_shard(model, mp_policy=around, **options)
        if hasattr(model, "generate"):  # PEFT calls the inner model, which gathers nothing itself
            register_fsdp_forward_method(model, "generate")


@torch.no_grad()
def _follow(optimizer: torch.optim.Optimizer, cut: Mapping[torch.Tensor, nn.Parameter]) -> None:
    """Replace the parameters of ``optimizer`` by those in ``cut``, and its states by this rank's part of
    them: torch's Adagrad has states before its first step.
    """
    for group in optimizer.param_groups:
        group["params"] = [cut[param] for param in group["params"]]
    for param in [param for param in optimizer.state if param in cut]:
        states, own = optimizer.state.pop(param), cut[param]
        optimizer.state[own] = {name: like(own, value) for name, value in states.items()}


def _apart(model: nn.Module) -> Sequence[nn.Module]:
    """Return the blocks with parameters that no other part of the model uses."""
    found = []
    for _, block in find_blocks(model):
        own = {id(param) for param in block.parameters()}
        inside = {id(module) for module in block.modules()}
        used = (
            id(param)
            for module in model.modules()
            if id(module) not in inside
            for param in module.parameters(recurse=False)
        )
        if own and own.isdisjoint(used):
            found.append(block)
    return found


def _check_model(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, precision: Precision | None
) -> None:
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ConfigError(
            "the model is on 'meta', but TorchFSDPPlugin cuts existing weights; build it on 'cpu', or use "
            "GeminiPlugin"
        )
    if precision is not None and precision.name != "bf16":
        raise ConfigError(
            f"TorchFSDPPlugin has no loss scale, which mixed_precision={precision.name!r} needs; use 'bf16', "
            "or another plugin"
        )
    scalars = [name for name, param in model.named_parameters() if param.dim() == 0]
    if scalars:
        raise ConfigError(
            f"fully_shard cannot cut {scalars[0]!r}, a parameter without dimensions; give it the shape (1,), "
            "or use another plugin"
        )
    if optimizer is None:
        return
    if isinstance(optimizer, CPUAdam):
        raise ConfigError(
            f"{type(optimizer).__name__} updates plain tensors, but fully_shard makes DTensors; make the "
            "optimizer torch.optim.AdamW(model.parameters(), ...), or use GeminiPlugin"
        )
    known = {id(param) for param in model.parameters()}
    if any(id(param) not in known for group in optimizer.param_groups for param in group["params"]):
        raise ConfigError(
            "the optimizer holds a parameter that the model does not have; make it from model.parameters()"
        )
