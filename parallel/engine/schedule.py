"""Schedules: run one batch through an engine, forward and backward, as a whole or as micro-batches through
the stages of a pipeline.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_map

from gemini.errors import ConfigError
from gemini.parallel.booster import Booster
from gemini.system.device import current_device


def split_batch(batch: Any) -> tuple[Any, Any]:
    """Return data and label. In a list or tuple the first item is data, and the second the label; with more
    items, the label is a tuple of all but the first. Anything else is data without a label (None).
    """
    if not isinstance(batch, (list, tuple)):
        return batch, None
    if not batch:
        raise ConfigError("the data loader returned an empty batch; it must return (data, label), or data")
    if len(batch) == 2:
        return batch[0], batch[1]
    return batch[0], tuple(batch[1:]) or None


def move_to(value: Any, device: torch.device) -> Any:
    """Return ``value`` with all its tensors on ``device``; tensors that are there already are not copied."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if _is_tensor(leaf) else leaf, value)


def call_model(model: Callable[..., Any], data: Any) -> Any:
    """Call a model: items of a mapping are keywords, items of a list or tuple are positional arguments."""
    if isinstance(data, Mapping):
        return model(**data)
    if isinstance(data, (list, tuple)):
        return model(*data)
    return model(data)


def call_criterion(criterion: Callable[..., Any], output: Any, label: Any) -> Any:
    """Call a criterion with a model's output, a tuple as several arguments, and the label: none if it is
    None, else passed as :func:`call_model` does. If both are mappings, all items are keywords.
    """
    arguments = output if isinstance(output, (list, tuple)) else (output,)
    if label is None:
        return criterion(*arguments)
    if isinstance(label, Mapping):
        return criterion(**output, **label) if isinstance(output, Mapping) else criterion(*arguments, **label)
    if isinstance(label, (list, tuple)):
        return criterion(*arguments, *label)
    return criterion(*arguments, label)


def num_samples(*values: Any) -> int:
    """Return the length of the first tensor in ``values``, which is the number of samples; 0 without one."""
    for value in values:
        inside = value
        if isinstance(value, Mapping):
            inside = list(value.values())
        if isinstance(inside, (list, tuple)):
            found = num_samples(*inside)
            if found:
                return found
        if isinstance(inside, torch.Tensor) and inside.dim():
            return len(inside)
    return 0


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


Result = tuple[Any, Any, torch.Tensor | None]


class Runs(Protocol):
    """The interface of an engine that schedules use."""

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
    """Runs a batch through an engine. ``batch_size`` is the number of samples of the last batch on this rank.

    Args:
        data_process_func: converts a batch to ``(data, label)``; None uses
            :func:`gemini.parallel.engine.schedule.split_batch`.
    """

    batch_size = 0

    def __init__(self, data_process_func: Callable[[Any], tuple[Any, Any]] | None = None) -> None:
        self.data_process_func = data_process_func

    def load_batch(self, data_iter: Iterator[Any]) -> tuple[Any, Any]:
        """Take the next batch; return data and label on the computing device. Raises StopIteration."""
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
        None for those not requested. Does not update; ``engine.step()`` does.
        """


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
        """See :class:`BaseSchedule`. Raises ConfigError if a loss is needed and there is no criterion."""
        data, label = self.load_batch(data_iter)
        with torch.set_grad_enabled(not forward_only):
            output = call_model(engine, data)
            loss = None
            if return_loss or not forward_only:
                if engine.criterion is None:
                    raise ConfigError(
                        "a loss needs a criterion; pass one to initialize(), or return_loss=False"
                    )
                loss = call_criterion(engine.criterion, output, label)
        if not forward_only:
            assert loss is not None
            engine.backward(loss)
        shown = (output, label) if return_output_label else (None, None)
        return *shown, loss.detach() if return_loss and loss is not None else None


class PipelineSchedule(BaseSchedule):
    """Runs the micro-batches of a batch, forward and backward, through the stages of a HybridParallelPlugin,
    which determines their number and order.

    The ranks of one pipeline take the same batches. On all ranks the loss is the mean over all micro-batches
    and ranks. Outputs are on ranks with the last stage (None on the others), labels on all.
    """

    def __init__(
        self,
        booster: Booster,
        data_process_func: Callable[[Any], tuple[Any, Any]] | None = None,
    ) -> None:
        """``booster``: its ``boost`` returned the engine's model."""
        super().__init__(data_process_func)
        self._booster = booster

    def forward_backward_step(
        self,
        engine: Runs,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> Result:
        """See :class:`BaseSchedule`. Raises ConfigError if a loss is needed and there is no criterion, and as
        :meth:`gemini.parallel.Booster.execute_pipeline`.
        """
        data, label = self.load_batch(data_iter)
        if engine.criterion is None and (return_loss or not forward_only):
            raise ConfigError("a loss needs a criterion; pass one to initialize(), or return_loss=False")
        share = 1.0 if forward_only else 1 / engine.accumulation

        def loss_of(output: Any, micro_batch: Any) -> Any:
            assert engine.criterion is not None
            return call_criterion(engine.criterion, output, split_batch(micro_batch)[1]) * share

        alone = engine.is_last_iteration or forward_only
        with nullcontext() if alone else engine.no_sync():
            done = self._booster.execute_pipeline(
                iter([(data,) if label is None else (data, label)]),
                engine.model,
                loss_of if return_loss or not forward_only else None,
                None if forward_only else engine.optimizer,
                return_loss=return_loss,
                return_outputs=return_output_label,
            )
        loss = None if done["loss"] is None else done["loss"] / share
        return *((_joined(done["outputs"]), label) if return_output_label else (None, None)), loss


class InterleavedPipelineSchedule(PipelineSchedule):
    """:class:`PipelineSchedule` for a plugin with several stages on each rank (``num_model_chunks``)."""


def _joined(outputs: list[Any] | None) -> Any:
    """Concatenate the outputs of micro-batches; return a list if they are no tensors."""
    if not outputs:
        return None
    if all(isinstance(each, torch.Tensor) and each.dim() for each in outputs):
        return torch.cat([each.detach() for each in outputs])
    return outputs
