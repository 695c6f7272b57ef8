"""Schedules: what an engine does with one batch, forward and backward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from gemini.errors import ConfigError
from gemini.parallel.engine.calls import call_criterion, call_model, move_to, num_samples, split_batch
from gemini.system.device import current_device

Result = tuple[Any, Any, torch.Tensor | None]


class Runs(Protocol):
    """What a schedule asks of an engine."""

    model: nn.Module
    criterion: Callable[..., Any] | None
    accumulation: int

    @property
    def optimizer(self) -> Any:
        """The boosted optimizer."""
        ...

    @property
    def is_last_iteration(self) -> bool:
        """Whether an update comes next."""
        ...

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return a context in which gradients accumulate on each rank."""
        ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of ``loss``."""
        ...


class BaseSchedule(ABC):
    """Runs a batch through an engine. ``batch_size`` is how many samples the last one had on this rank.

    Args:
        data_process_func: makes ``(data, label)`` of a batch; None: a pair is that already
            (:func:`gemini.parallel.engine.calls.split_batch`).
    """

    batch_size = 0

    def __init__(self, data_process_func: Callable[[Any], tuple[Any, Any]] | None = None) -> None:
        self.data_process_func = data_process_func

    def load_batch(self, data_iter: Iterator[Any]) -> tuple[Any, Any]:
        """Take the next batch, on the computing device: data and label. Raises StopIteration at the end."""
        data, label = (self.data_process_func or split_batch)(next(data_iter))
        device = current_device()
        data, label = move_to(data, device), move_to(label, device)
        self.batch_size = num_samples(data, label)
        return data, label

    @abstractmethod
    def forward_backward_step(
        self,
        engine: Runs,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> Result:
        """Run the next batch, and its backward pass unless ``forward_only``; return output, label and loss,
        None for what is not asked for. Updates nothing: ``engine.step()`` does."""


class NonPipelineSchedule(BaseSchedule):
    """The whole model on each rank: forward, criterion, backward."""

    def forward_backward_step(
        self,
        engine: Runs,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> Result:
        """See :class:`BaseSchedule`. Raises ConfigError where a loss is needed and there is no criterion."""
        data, label = self.load_batch(data_iter)
        with torch.set_grad_enabled(not forward_only):
            output = call_model(engine, data)
            loss = None
            if return_loss or not forward_only:
                if engine.criterion is None:
                    raise ConfigError(
                        "a loss needs a criterion: give one to initialize(), or return_loss=False"
                    )
                loss = call_criterion(engine.criterion, output, label)
        if not forward_only:
            assert loss is not None
            engine.backward(loss)
        shown = (output, label) if return_output_label else (None, None)
        return *shown, loss.detach() if return_loss and loss is not None else None
