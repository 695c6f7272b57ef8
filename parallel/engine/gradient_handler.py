"""Gradient handlers share gradients among ranks, instead of torch's DDP."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from gemini.errors import ConfigError
from gemini.parallel.booster.data_parallel import SingleProcess
from gemini.parallel.booster.plugin import TorchDDPPlugin
from gemini.parallel.launch import GRADIENT_HANDLER
from gemini.parallel.moe.divide import divided_experts

_BUCKET_NUMEL = 2**22


class BaseGradientHandler(ABC):
    """Shares the gradients of ``model`` among ranks, before the step of ``optimizer``.

    Register a subclass in ``GRADIENT_HANDLER`` and name it in a configuration:
    ``gradient_handler=[dict(type="MyHandler")]``; further entries are its keywords.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer

    @abstractmethod
    def handle_gradient(self) -> None:
        """Share the gradients; called once per update, after all its iterations."""


@GRADIENT_HANDLER.register_module
class DataParallelGradientHandler(BaseGradientHandler):
    """Averages all gradients over the ranks of data parallelism."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        """``process_group=None`` means all ranks."""
        super().__init__(model, optimizer)
        self._group = process_group

    def handle_gradient(self) -> None:
        """Average all gradients, some megabytes at a time. A parameter without gradient on a rank counts as 0
        there if another rank has one.
        """
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(self._group) == 1:
            return
        params = [param for param in self._model.parameters() if param.requires_grad]
        if not params:
            return
        said = [float(param.grad is not None) for param in params]
        has = torch.tensor(said, dtype=torch.float32, device=params[0].device)
        dist.all_reduce(has, group=self._group)
        used = [param for param, count in zip(params, has.tolist(), strict=True) if count]
        for param in used:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        self.share(used)

    def share(self, params: Sequence[torch.Tensor]) -> None:
        """Average the gradients of ``params``, which are the same on all ranks and all have one."""
        average((param.grad for param in params), self._group)


@GRADIENT_HANDLER.register_module
class MoeGradientHandler(DataParallelGradientHandler):
    """Averages all gradients over the ranks of data parallelism.

    If ranks divide experts, the gradient of an expert already contains the tokens of all ranks that divide
    the experts with this one. It is summed over the ranks with the same expert, and divided by the number of
    all ranks.
    """

    def share(self, params: Sequence[torch.Tensor]) -> None:
        """See :class:`DataParallelGradientHandler`."""
        experts = divided_experts(self._model)
        if experts is None:
            super().share(params)
            return
        super().share([param for param in params if not experts.has(param)])
        own = [param.grad for param in params if experts.has(param)]
        if experts.copies is None:
            for grad in own:
                if grad is not None:
                    grad.div_(experts.ranks.data.size)
        else:
            average(own, experts.copies, divided_by=experts.ranks.data.size)


@torch.no_grad()
def average(
    tensors: Iterable[torch.Tensor | None],
    group: dist.ProcessGroup | None,
    *,
    divided_by: int | None = None,
) -> None:
    """Replace tensors by their sum over the ranks of ``group``, divided by ``divided_by``; None divides by
    the number of ranks. Extra memory: one bucket of 2**22 elements, or the largest tensor.
    """
    divisor = divided_by or dist.get_world_size(group)
    by_type: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor is not None:
            by_type.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for same in by_type.values():
        for bucket in _buckets(same):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket]).div_(divisor)
            dist.all_reduce(flat, group=group)
            for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                tensor.copy_(part.view_as(tensor))


def make_handlers(
    entries: Sequence[Mapping[str, Any]],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup | None,
) -> list[BaseGradientHandler]:
    """Return the handlers that a configuration names; ``group``: the ranks of data parallelism.

    Raises:
        ConfigError: no class with the name is registered, or it is no handler.
    """
    handlers = []
    for entry in entries:
        options = {key: value for key, value in entry.items() if key != "type"}
        kind = GRADIENT_HANDLER.get_module(entry["type"])
        if not issubclass(kind, BaseGradientHandler):
            raise ConfigError(f"{kind.__name__} must be a subclass of BaseGradientHandler")
        if issubclass(kind, DataParallelGradientHandler):
            options.setdefault("process_group", group)
        handlers.append(kind(model, optimizer, **options))
    return handlers


class HandledPlugin(TorchDDPPlugin):
    """A replica of the model on every rank, with gradients shared by handlers: all start with the weights of
    the first rank, and backward synchronizes nothing.
    """

    def wrap(self, model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
        """See :class:`TorchDDPPlugin`."""
        if self.ranks.size > 1:
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.detach(), group=self.process_group, group_src=0)
        return SingleProcess(model, device, dtype)


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """Yield ``tensors`` in order, as many at a time as fit a bucket, at least one."""
    bucket: list[torch.Tensor] = []
    for tensor in tensors:
        if bucket and sum(each.numel() for each in bucket) + tensor.numel() > _BUCKET_NUMEL:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
