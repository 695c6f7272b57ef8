"""Schedules: what an engine does with one batch, forward and backward: how the batch becomes calls of the
model and of its criterion, in one piece or cut into micro-batches that go through the stages of a pipeline.
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
    """Return data and label. Of a list or tuple the first member is data and the second the label; if there
    are more, all of them but the first are. Anything else is data, without a label (None)."""
    if not isinstance(batch, (list, tuple)):
        return batch, None
    if not batch:
        raise ConfigError("the data loader gave an empty batch: it must give (data, label), or data")
    if len(batch) == 2:
        return batch[0], batch[1]
    return batch[0], tuple(batch[1:]) or None


def move_to(value: Any, device: torch.device) -> Any:
    """Return ``value`` with all tensors in it on ``device``; a tensor that is there already is not copied."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if _is_tensor(leaf) else leaf, value)


def call_model(model: Callable[..., Any], data: Any) -> Any:
    """Call a model: the items of a mapping are keywords, the members of a list or tuple arguments."""
    if isinstance(data, Mapping):
        return model(**data)
    if isinstance(data, (list, tuple)):
        return model(*data)
    return model(data)


def call_criterion(criterion: Callable[..., Any], output: Any, label: Any) -> Any:
    """Call a criterion with what a model returned, a tuple of it as arguments, and the label: none where it
    is None, else as :func:`call_model` does. If both are mappings all of it is keywords."""
    arguments = output if isinstance(output, (list, tuple)) else (output,)
    if label is None:
        return criterion(*arguments)
    if isinstance(label, Mapping):
        return criterion(**output, **label) if isinstance(output, Mapping) else criterion(*arguments, **label)
    if isinstance(label, (list, tuple)):
        return criterion(*arguments, *label)
    return criterion(*arguments, label)


def num_samples(*values: Any) -> int:
    """Return the length of the first tensor found in ``values``, which is how many samples a batch has; 0
    where there is none."""
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
            (:func:`gemini.parallel.engine.schedule.split_batch`).
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


class PipelineSchedule(BaseSchedule):
    """Forward and backward passes of the micro-batches of a batch through the stages that a
    HybridParallelPlugin has made; how many there are, and in which order they go, the plugin says.

    The ranks of one pipeline take the same batches. The loss is on all ranks the mean over all micro-batches
    and ranks; outputs are on those with the last stage (None elsewhere), labels on all.
    """

    def __init__(
        self,
        booster: Booster,
        data_process_func: Callable[[Any], tuple[Any, Any]] | None = None,
    ) -> None:
        """``booster``: the one whose ``boost`` returned the engine's model."""
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
        """See :class:`BaseSchedule`. Raises ConfigError where a loss is needed and there is no criterion, and
        as :meth:`gemini.parallel.Booster.execute_pipeline`."""
        data, label = self.load_batch(data_iter)
        if engine.criterion is None and (return_loss or not forward_only):
            raise ConfigError("a loss needs a criterion: give one to initialize(), or return_loss=False")
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
    """:class:`PipelineSchedule` of a plugin with several stages on each rank (``num_model_chunks``)."""


def _joined(outputs: list[Any] | None) -> Any:
    """Return the outputs of micro-batches as that of the batch; a list where they are no tensors."""
    if not outputs:
        return None
    if all(isinstance(each, torch.Tensor) and each.dim() for each in outputs):
        return torch.cat([each.detach() for each in outputs])
    return outputs
