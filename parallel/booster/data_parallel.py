"""The model a booster returns for a replicated model: torch's DDP, or nothing but the model on one process.

Both have the model as ``module``, and a ``state_dict()`` with the model's own names, so that what runs on one
process runs on several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gemini.model.ddp import NamedAsWrapped


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
        """Run the model, in mixed precision if asked."""
        with autocast(*self._computing):
            return super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]


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
