"""The model and the optimizer that a booster returns: for a replicated model torch's DDP, or nothing but the
model on one process; for parameters that torch has sharded (DTensors), both as they are.

Each has the model as ``module``, and a ``state_dict()`` with the model's own names, so that what runs on one
process runs on several.
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
    """Return a context in which torch chooses between fp32 and ``dtype``; None is fp32 throughout."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


class _OwnNames:
    """A wrapper whose state has the names of the model in it."""

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
    """A model that no other process shares."""

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
        """Do nothing: there is nobody to synchronize with."""
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
            ConfigError: the last backward pass left out parameters that torch waits for.
        """
        try:
            with autocast(*self._computing):
                return super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if not str(error).startswith("Expected to have finished reduction"):
                raise
            raise ConfigError(self._left_out(str(error))) from None

    def _left_out(self, said: str) -> str:
        """Return what torch ``said`` with names: it has the numbers of the parameters that train."""
        trained = [name for name, param in self.module.named_parameters() if param.requires_grad]
        numbers = re.search(r"did not receive grad for rank \d+: ([\d ]+)", said)
        names = [trained[int(number)] for number in numbers[1].split()] if numbers else []
        return (
            f"the last backward pass gave no gradient to {len(names)} parameters (first {names[:1]}), so "
            "torch's DDP has not averaged all gradients over the ranks, and the step after it was wrong; "
            "freeze them, or choose TorchDDPPlugin(find_unused_parameters=True)"
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
    """A model of ``fully_shard``, with a ``state_dict()`` of the model's own names and whole values."""

    def __init__(self, module: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.module = module
        self._computing = (device, dtype)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, in mixed precision if asked: what is not a parameter may have another type."""
        with autocast(*self._computing):
            return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate whole gradients here, without the other ranks."""
        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's state under its own names, whole on every rank. All ranks call it."""
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
    """As the other, with norms over the parts of all ranks, which call each method together."""

    def clip_grad_by_norm(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their global norm is at most ``max_norm``; return the norm before."""
        params = list(self._parameters())
        grads = [param.grad for param in params if param.grad is not None]
        norm = whole(nn.utils.get_total_norm(grads, norm_type))
        nn.utils.clip_grads_with_norm_(params, max_norm, norm)
        self._measured = float(norm)
        return torch.as_tensor(norm)

    def get_param_grad(self, param: torch.Tensor) -> torch.Tensor | None:
        """Return a copy of the whole gradient of ``param``; None where there is none."""
        return None if param.grad is None else whole(param.grad).clone()


def whole(value: Any) -> Any:
    """Return a DTensor's whole value, which all its ranks do together; anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def like(own: Any, value: Any) -> Any:
    """Return a whole ``value`` as a DTensor where ``own``, of the same shape, is one: this rank's part of
    it, which nobody sends."""
    if not isinstance(own, DTensor) or isinstance(value, DTensor) or own.shape != value.shape:
        return value
    local = value.to(own.device)
    return distribute_tensor(local, own.device_mesh, own.placements, src_data_rank=None)
