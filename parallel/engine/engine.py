"""Engine: a boosted model with its optimizer and criterion, and the features of a configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from gemini.errors import ConfigError
from gemini.parallel.booster import Booster
from gemini.parallel.booster.plugin.base import Criterion
from gemini.parallel.engine.gradient_handler import BaseGradientHandler
from gemini.parallel.engine.schedule import BaseSchedule, NonPipelineSchedule, Result


class Engine:
    """The result of :func:`gemini.parallel.engine.initialize`::

        for image, label in loader:
            engine.zero_grad()
            loss = engine.criterion(engine(image), label)
            engine.backward(loss)
            engine.step()

    The loop is the same with gradient accumulation: the loss is divided by the number of iterations,
    :meth:`zero_grad` and :meth:`step` do nothing in between, and ranks synchronize in the last iteration.

    Args:
        booster: its ``boost`` returned ``model``, ``optimizer`` and ``criterion``.
        optimizer: None for an engine that evaluates and does not train.
        accumulation: the number of iterations over which gradients add up.
        clip_grad_norm: the largest norm of all gradients; 0 does not clip.
        gradient_handlers: called before an update, in order.
        schedule: runs the batches of :meth:`execute_schedule`; None means NonPipelineSchedule().
    """

    def __init__(
        self,
        booster: Booster,
        model: nn.Module,
        optimizer: Any,
        criterion: Criterion | None = None,
        *,
        accumulation: int = 1,
        clip_grad_norm: float = 0.0,
        gradient_handlers: Sequence[BaseGradientHandler] = (),
        schedule: BaseSchedule | None = None,
    ) -> None:
        self.model, self.criterion = model, criterion
        self._optimizer = optimizer
        self.accumulation, self.clip_grad_norm = accumulation, clip_grad_norm
        self.gradient_handlers = list(gradient_handlers)
        self.schedule = schedule or NonPipelineSchedule()
        self.num_updates = 0
        self.booster = booster
        self._iteration = 0  # index among the iterations of the next update

    @property
    def optimizer(self) -> Any:
        """The boosted optimizer. Raises ConfigError if there is none."""
        if self._optimizer is None:
            raise ConfigError(
                "the engine has no optimizer and can only evaluate; pass one to initialize() to train"
            )
        return self._optimizer

    @property
    def is_last_iteration(self) -> bool:
        """Whether the next :meth:`step` updates the parameters."""
        return self._iteration == self.accumulation - 1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        if self.is_last_iteration:
            return self.model(*args, **kwargs)
        with self.no_sync():
            return self.model(*args, **kwargs)

    def train(self, mode: bool = True) -> Engine:
        """Set the model to training mode, as ``nn.Module.train``."""
        self.model.train(mode)
        return self

    def eval(self) -> Engine:
        """Set the model to evaluation mode, as ``nn.Module.eval``."""
        return self.train(False)

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self.model.training

    # -- one iteration ---------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Discard the gradients, unless more will be added to them."""
        if self._iteration == 0:
            self.optimizer.zero_grad()

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of ``loss``, scaled for mixed precision and accumulation."""
        if self.accumulation == 1:
            self.optimizer.backward(loss)
            return
        loss = loss / self.accumulation
        if self.is_last_iteration:
            self.optimizer.backward(loss)
            return
        with self.no_sync():
            self.optimizer.backward(loss)

    def step(self) -> bool:
        """Update the parameters and return True; return False if more iterations come first.

        Gradient handlers run before; then gradients are clipped. A step with gradients that overflowed in 16
        bits is skipped, but counts.
        """
        if not self.is_last_iteration:
            self._iteration += 1
            return False
        for handler in self.gradient_handlers:
            handler.handle_gradient()
        if self.clip_grad_norm:
            self.optimizer.clip_grad_by_norm(self.clip_grad_norm)
        self.optimizer.step()
        self._iteration = 0
        self.num_updates += 1
        return True

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return a context in which gradients accumulate on each rank. Iterations before the last one of an
        update run in it.
        """
        return self.booster.no_sync(self.model, self._optimizer)

    def execute_schedule(
        self,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> Result:
        """Run the next batch by the schedule; return output, label and loss (see BaseSchedule).

        Raises:
            StopIteration: there are no more batches.
        """
        return self.schedule.forward_backward_step(
            self, data_iter, forward_only, return_loss, return_output_label
        )


class UpdateScheduler:
    """A learning rate scheduler with a :meth:`step` that does nothing if the engine has made no update since
    the last call, so it may be called after every iteration or epoch. Everything else is passed to the
    scheduler.
    """

    def __init__(self, scheduler: Any, engine: Engine) -> None:
        if not hasattr(scheduler, "step"):
            raise ConfigError(f"lr_scheduler is a {type(scheduler).__name__}, which has no step()")
        self.scheduler = scheduler
        self._engine = engine
        self._seen = engine.num_updates

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step if there was an update since the last call."""
        if self._engine.num_updates != self._seen:
            self._seen = self._engine.num_updates
            self.scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # the object is being copied or unpickled
            raise AttributeError(name)
        return getattr(self.scheduler, name)
