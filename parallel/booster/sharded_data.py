"""The model and the optimizer a booster returns for parameters that torch has sharded (DTensors)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from gemini.model.ddp import NamedAsWrapped
from gemini.parallel.booster.data_parallel import autocast
from gemini.parallel.booster.optimizer import BoostedOptimizer


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
