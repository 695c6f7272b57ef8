"""Engine and trainer with the signatures of ColossalAI's documentation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from gemini.compat.adapters.launching_adapters import is_using_pp
from gemini.errors import ConfigError
from gemini.parallel import engine as ours
from gemini.parallel.booster.plugin.base import Criterion
from gemini.parallel.engine.initialize import Initialized
from gemini.parallel.engine.schedule import Result, Runs
from gemini.parallel.pipeline import BuiltStages
from gemini.parallel.trainer import Trainer as OurTrainer
from gemini.parallel.trainer.hooks import BaseHook


def initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    criterion: Criterion | None = None,
    train_dataloader: DataLoader[Any] | None = None,
    test_dataloader: DataLoader[Any] | None = None,
    lr_scheduler: Any = None,
    ophooks: Any = None,
    verbose: bool = True,
) -> Initialized:
    """See :func:`gemini.parallel.engine.initialize`. With pipeline parallelism ``model`` is this rank's
    stage, or a ModuleList of several. ``verbose`` has no effect. Raises ConfigError for ``ophooks``, which
    are not supported.
    """
    if ophooks:
        raise ConfigError("initialize: ophooks are not run; use hooks of torch.nn.Module, or of the Trainer")
    if is_using_pp():
        model = BuiltStages.of(model)
    return ours.initialize(model, optimizer, criterion, train_dataloader, test_dataloader, lr_scheduler)


class Trainer(OurTrainer):
    """:class:`gemini.parallel.trainer.Trainer` with two further keyword names in :meth:`fit`."""

    def fit(
        self,
        train_dataloader: Iterable[Any],
        epochs: int,
        max_steps: int | None = None,
        test_dataloader: Iterable[Any] | None = None,
        test_interval: int = 1,
        hooks: Sequence[BaseHook] | None = None,
        display_progress: bool = False,
        return_output_label: bool = True,
        *,
        hook: Sequence[BaseHook] | None = None,
        display_process: bool = False,
    ) -> None:
        """See :class:`gemini.parallel.trainer.Trainer`. ``hook`` is the same as hooks, ``display_process`` as
        display_progress.
        """
        super().fit(
            train_dataloader,
            epochs,
            max_steps,
            test_dataloader,
            test_interval,
            hooks if hook is None else hook if hooks is None else [*hooks, *hook],
            display_progress or display_process,
            return_output_label,
        )


class BaseSchedule(ours.BaseSchedule):
    """:class:`gemini.parallel.engine.BaseSchedule` with ``forward_back_step`` as the method to override."""

    def forward_backward_step(
        self,
        engine: Runs,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> Result:
        """See :class:`gemini.parallel.engine.BaseSchedule`."""
        return self.forward_back_step(engine, data_iter, forward_only, return_loss, return_output_label)

    def forward_back_step(
        self,
        engine: Runs,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> Result:
        """Run the next batch; subclasses override this."""
        raise NotImplementedError(f"{type(self).__name__} does nothing: override forward_back_step()")
