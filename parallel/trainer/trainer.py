"""Trainer: epochs over an engine, with hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gemini.errors import ConfigError
from gemini.parallel.engine import BaseSchedule, Engine
from gemini.parallel.engine.schedule import call_model, move_to
from gemini.parallel.launch import global_context
from gemini.parallel.trainer.hooks.metric import BaseHook
from gemini.parallel.trainer.timer import MultiTimer
from gemini.parallel.trainer.trainer_state import Logs, Training
from gemini.system.device import current_device

_EVENTS = (
    *("before_train", "after_train", "before_train_epoch", "after_train_epoch", "before_train_iter"),
    *("after_train_iter", "before_test", "after_test", "before_test_epoch", "after_test_epoch"),
    *("before_test_iter", "after_test_iter"),
)


class Trainer(Training):
    """Trains an engine epoch by epoch::

        trainer = Trainer(engine, logger=get_dist_logger())
        trainer.fit(loader, epochs=10, test_dataloader=test_loader, hooks=[hooks.LossHook()])

    A further :meth:`fit` continues from the epoch where the last one ended; a program that resumes sets
    ``cur_epoch``.

    Args:
        timer: measures ``Train-step``, ``Train-epoch``, ``Test-step`` and ``Test-epoch``.
        logger: for hooks without one.
        schedule: runs the batches; None uses the engine's.
    """

    def __init__(
        self,
        engine: Engine,
        timer: MultiTimer | None = None,
        logger: Logs | None = None,
        schedule: BaseSchedule | None = None,
    ) -> None:
        super().__init__(engine, schedule or engine.schedule, timer, logger)
        self.hooks: list[BaseHook] = []
        self._calls: dict[str, list[Callable[..., None]]] = {event: [] for event in _EVENTS}

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
    ) -> None:
        """Train until ``epochs`` epochs, or ``max_steps`` iterations, are over. Collective.

        Args:
            test_dataloader, test_interval: evaluate on this after every ``test_interval`` epochs.
            display_progress: show the progress of each epoch, on the first rank.
            return_output_label: pass outputs and labels to hooks, not only losses. If False, a pipeline keeps
                no outputs.

        Raises:
            ConfigError: a number is out of range, or a hook is no BaseHook.
        """
        _check_counts(epochs=epochs, test_interval=test_interval)
        if max_steps is not None:
            _check_counts(max_steps=max_steps)
        self._attach(() if hooks is None else hooks)
        self.max_epochs, self.max_steps = epochs, max_steps
        self.steps_per_epoch = len(train_dataloader) if isinstance(train_dataloader, Sized) else 0
        self._call("before_train")
        while self.cur_epoch < epochs and not self._is_at_end():
            self._train_epoch(train_dataloader, display_progress, return_output_label)
            if test_dataloader is not None and self.cur_epoch % test_interval == 0:
                self._test(test_dataloader, display_progress, return_output_label)
        self._call("after_train")

    def evaluate(
        self,
        test_dataloader: Iterable[Any],
        hooks: Sequence[BaseHook] | None = None,
        display_progress: bool = False,
        return_output_label: bool = True,
    ) -> None:
        """Run over the test data once; see :meth:`fit`. ``hooks=None`` uses those of the last :meth:`fit`."""
        if hooks is not None:
            self._attach(hooks)
        self._test(test_dataloader, display_progress, return_output_label)

    def predict(self, data: Any) -> Any:
        """Return the model's output for a batch without labels, without gradients."""
        self.engine.eval()
        with torch.no_grad():
            return call_model(self.engine, move_to(data, current_device()))

    # -- internal --------------------------------------------------------------------------------

    def _train_epoch(self, loader: Iterable[Any], shows: bool, returns: bool) -> None:
        self.engine.train()
        engine, schedule, source = self.engine, self.schedule, iter(loader)
        self._call("before_train_epoch")
        with self._timed("Train-epoch"), self._progress("Train", loader, shows) as advance:
            while not self._is_at_end():
                batch = next(source, _END)
                if batch is _END:
                    break
                self._call("before_train_iter")
                self._start("Train-step")
                engine.zero_grad()
                output, label, loss = schedule.forward_backward_step(
                    engine, iter((batch,)), return_output_label=returns
                )
                engine.step()
                self._stop("Train-step")
                self.cur_step += 1
                self._call("after_train_iter", output, label, loss)
                advance()
        self.cur_epoch += 1
        self._call("after_train_epoch")

    def _test(self, loader: Iterable[Any], shows: bool, returns: bool) -> None:
        self._call("before_test")
        self.engine.eval()
        self._call("before_test_epoch")
        with self._timed("Test-epoch"), self._progress("Test", loader, shows) as advance:
            for batch in loader:
                self._call("before_test_iter")
                self._start("Test-step")
                with torch.no_grad():
                    output, label, loss = self.schedule.forward_backward_step(
                        self.engine, iter((batch,)), forward_only=True, return_output_label=returns
                    )
                self._stop("Test-step")
                self._call("after_test_iter", output, label, loss)
                advance()
        self._call("after_test_epoch")
        self._call("after_test")

    def _attach(self, hooks: Sequence[BaseHook]) -> None:
        """Replace all hooks by ``hooks``, to be called in order of their priorities."""
        if not isinstance(hooks, Sequence):
            raise ConfigError(f"hooks is a {type(hooks).__name__}; give a list of them")
        for hook in hooks:
            if not isinstance(hook, BaseHook):
                raise ConfigError(f"hooks has {hook!r}; give objects of subclasses of BaseHook")
        self.hooks = sorted(hooks, key=lambda hook: hook.priority)
        self.metrics = {"train": {}, "test": {}}
        for event in _EVENTS:
            nothing = getattr(BaseHook, event)
            self._calls[event] = [
                getattr(hook, event) for hook in self.hooks if getattr(type(hook), event) is not nothing
            ]
        for hook in self.hooks:
            hook.after_hook_is_attached(self)

    def _call(self, event: str, *args: Any) -> None:
        for call in self._calls[event]:
            call(self, *args)

    def _is_at_end(self) -> bool:
        return self.max_steps is not None and self.cur_step >= self.max_steps

    def _start(self, name: str) -> None:
        if self.timer is not None:
            self.timer.start(name)

    def _stop(self, name: str) -> None:
        if self.timer is not None:
            self.timer.stop(name, keep_in_history=True)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        self._start(name)
        yield
        self._stop(name)

    @contextmanager
    def _progress(self, what: str, loader: Iterable[Any], shows: bool) -> Iterator[Callable[[], None]]:
        """Yield a function to call after each iteration of an epoch; it updates the progress bar, if any."""
        self.show("")
        if not shows or global_context.get_global_rank() != 0:
            yield _nothing
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with ExitStack() as stack:
            bar = stack.enter_context(Progress(*columns, TextColumn("{task.fields[text]}")))
            total = len(loader) if isinstance(loader, Sized) else None
            number = self.cur_epoch + (1 if what == "Train" else 0)
            task = bar.add_task(f"[{what}] epoch {number} of {self.max_epochs}", total=total, text="")
            yield lambda: bar.update(task, advance=1, text=self.step_text)


_END = object()


def _nothing() -> None:
    """Show nothing."""


def _check_counts(**values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} is {value!r}; give a whole number, 1 or more")
