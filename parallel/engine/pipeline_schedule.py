"""Schedules over the stages of a pipeline: a batch is cut into micro-batches, which go through them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch

from gemini.errors import ConfigError
from gemini.parallel.booster import Booster
from gemini.parallel.engine.calls import call_criterion, split_batch
from gemini.parallel.engine.schedule import BaseSchedule, Result, Runs


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
