"""The models and optimizers that a booster returns for replicated models and for DTensors.

A replicated model is wrapped in torch's DDP, or only thinly on one process. A model that torch has sharded
(DTensors) keeps its parameters. Each wrapper has the model as ``module``, and a ``state_dict()`` with the
model's own names, so that a program for one process runs on several.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from gemini.errors import ConfigError
from gemini.model.ddp import NamedAsWrapped
from gemini.parallel.booster.optimizer import BoostedOptimizer


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Return a context in which torch chooses between fp32 and ``dtype``; None means fp32 only."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


class _OwnNames:
    """A wrapper with a state dict under the names of the wrapped model."""

    module: nn.Module

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's state under its own names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the model's state."""
        return self.module.load_state_dict(state_dict, strict, assign)


class SingleProcess(_OwnNames, NamedAsWrapped):
    """A model that runs on one process."""

    def __init__(self, module: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.module = module
        self._device = device
        self._dtype = dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, in mixed precision if asked."""
        with autocast(self._device, self._dtype):
            return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do nothing: there are no other ranks."""
        yield


class DataParallel(_OwnNames, DistributedDataParallel):
    """torch's DDP in mixed precision, with the model's own names in its state."""

    def __init__(
        self, module: nn.Module, device: torch.device, dtype: torch.dtype | None, **options: Any
    ) -> None:
        super().__init__(module, device_ids=[device] if device.index is not None else None, **options)
        self._computing = (device, dtype)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, in mixed precision if asked.

        Raises:
            ConfigError: parameters that DDP waits for got no gradient in the last backward pass.
        """
        try:
            with autocast(*self._computing):
                return super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if not str(error).startswith("Expected to have finished reduction"):
                raise
            raise ConfigError(self._left_out(str(error))) from None

    def _left_out(self, said: str) -> str:
        """Return torch's message with names instead of the numbers of the trained parameters."""
        trained = [name for name, param in self.module.named_parameters() if param.requires_grad]
        numbers = re.search(r"did not receive grad for rank \d+: ([\d ]+)", said)
        names = [trained[int(number)] for number in numbers[1].split()] if numbers else []
        return (
            f"the last backward pass gave no gradient to {len(names)} parameters (first {names[:1]}), so "
            "torch's DDP did not average all gradients over the ranks, and the step after it was wrong; "
            "freeze these parameters, or use TorchDDPPlugin(find_unused_parameters=True)"
        )


class AutocastCriterion(nn.Module):
    """A loss function in mixed precision: torch computes the losses that need it in fp32."""

    def __init__(self, criterion: Callable[..., Any], device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.criterion = criterion
        self._device = device
        self._dtype = dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss."""
        with autocast(self._device, self._dtype):
            return self.criterion(*args, **kwargs)


class ShardedData(NamedAsWrapped):
    """A model of ``fully_shard``, with a ``state_dict()`` of whole values under the model's own names."""

    def __init__(self, module: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.module = module
        self._computing = (device, dtype)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, in mixed precision if asked: inputs and buffers may have another dtype."""
        with autocast(*self._computing):
            return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate whole gradients on this rank, without the other ranks."""
        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's state under its own names, whole on every rank. Collective."""
        state = self.module.state_dict(*args, **kwargs)
        if not kwargs.get("keep_vars"):
            for name, value in state.items():
                state[name] = whole(value)
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state of whole values; each rank takes its parts."""
        own = self.module.state_dict(keep_vars=True)
        parts = {name: like(own.get(name), value) for name, value in state_dict.items()}
        return self.module.load_state_dict(parts, strict, assign)


class ShardedOptimizer(BoostedOptimizer):
    """A BoostedOptimizer with norms over the parts of all ranks. Every method is collective."""

    def clip_grad_by_norm(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their global norm is at most ``max_norm``; return the norm before."""
        params = list(self._parameters())
        grads = [param.grad for param in params if param.grad is not None]
        norm = whole(nn.utils.get_total_norm(grads, norm_type))
        nn.utils.clip_grads_with_norm_(params, max_norm, norm)
        self._measured = float(norm)
        return torch.as_tensor(norm)

    def get_param_grad(self, param: torch.Tensor) -> torch.Tensor | None:
        """Return a copy of the whole gradient of ``param``; None if it has none."""
        return None if param.grad is None else whole(param.grad).clone()


def whole(value: Any) -> Any:
    """Return the whole value of a DTensor (collective over its ranks); anything else unchanged."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def like(own: Any, value: Any) -> Any:
    """Return a whole ``value`` as a DTensor if ``own``, of the same shape, is one. Each rank takes its part
    of its own copy; nothing is sent.
    """
    if not isinstance(own, DTensor) or isinstance(value, DTensor) or own.shape != value.shape:
        return value
    local = value.to(own.device)
    return distribute_tensor(local, own.device_mesh, own.placements, src_data_rank=None)
