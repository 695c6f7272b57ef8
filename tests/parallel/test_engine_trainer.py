"""Trainer: hooks are called in their order, metrics are right, and a run is the engine's loop."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gemini import ConfigError, StateError
from gemini.parallel.engine import Engine, initialize, load_checkpoint
from gemini.parallel.trainer import Accuracy, MixupAccuracy, MultiTimer, Trainer, hooks
from gemini.parallel.trainer.metrics import AccuracyMetric, LossMetric, ThroughputMetric


def data_of(count: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 6, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


def loader_of(batch_size: int = 8) -> DataLoader[Any]:
    return DataLoader(data_of(), batch_size=batch_size)


def engine_of(**config: Any) -> Engine:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return initialize(model, optimizer, nn.CrossEntropyLoss(), config=config)[0]


class Recorder(hooks.BaseHook):
    def __init__(self, said: list[str], priority: int = 10) -> None:
        self.said, self.priority = said, priority

    def after_hook_is_attached(self, trainer: Any) -> None:
        self.said.append("attached")

    def before_train(self, trainer: Any) -> None:
        self.said.append("(")

    def after_train(self, trainer: Any) -> None:
        self.said.append(")")

    def before_train_epoch(self, trainer: Any) -> None:
        self.said.append(f"epoch {trainer.cur_epoch}:")

    def after_train_epoch(self, trainer: Any) -> None:
        self.said.append(f"of {trainer.cur_epoch}")

    def before_train_iter(self, trainer: Any) -> None:
        self.said.append(f"{trainer.cur_step}-")

    def after_train_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        assert trainer.engine.training
        assert (output.shape, label.shape, loss.shape) == ((8, 2), (8,), ())
        self.said.append(f"{trainer.cur_step}")

    def before_test(self, trainer: Any) -> None:
        self.said.append("test(")

    def after_test(self, trainer: Any) -> None:
        self.said.append(")test")

    def before_test_epoch(self, trainer: Any) -> None:
        assert not trainer.engine.training
        self.said.append("[")

    def after_test_epoch(self, trainer: Any) -> None:
        self.said.append("]")

    def before_test_iter(self, trainer: Any) -> None:
        self.said.append("<")

    def after_test_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        assert not output.requires_grad
        self.said.append(">")


class Silent(hooks.BaseHook):
    """As the documents write one: nothing is set up."""

    def __init__(self, priority: int = 10) -> None:
        pass


def test_hooks_are_called_in_the_course_of_a_run() -> None:
    said: list[str] = []
    trainer = Trainer(engine_of())
    trainer.fit(
        loader_of(), 2, test_dataloader=loader_of(24), test_interval=2, hooks=[Silent(), Recorder(said)]
    )
    steps = ["0-", "1", "1-", "2", "2-", "3"]
    again = ["3-", "4", "4-", "5", "5-", "6"]
    test = ["test(", "[", "<", ">", "]", ")test"]
    assert said == ["attached", "(", "epoch 0:", *steps, "of 1", "epoch 1:", *again, "of 2", *test, ")"]
    assert (trainer.max_epochs, trainer.steps_per_epoch) == (2, 3)


def test_the_lowest_priority_is_called_first() -> None:
    said: list[str] = []
    low, high = Recorder(said, 1), Recorder([], 2)
    trainer = Trainer(engine_of())
    trainer.fit(loader_of(), 1, hooks=[high, Silent(), low])
    assert trainer.hooks[0] is low
    assert trainer.hooks[1] is high


def test_a_run_is_the_engines_loop() -> None:
    plain, trained = engine_of(gradient_accumulation=2), engine_of(gradient_accumulation=2)
    torch.manual_seed(9)
    for _ in range(2):
        for data, label in loader_of():
            plain.zero_grad()
            plain.backward(plain.criterion(plain(data), label))
            plain.step()
    torch.manual_seed(9)
    Trainer(trained).fit(loader_of(), 2)
    for want, got in zip(plain.model.parameters(), trained.model.parameters(), strict=True):
        assert torch.equal(want, got)


def test_a_run_ends_with_its_steps_and_goes_on_from_its_epochs() -> None:
    trainer = Trainer(engine_of())
    trainer.fit(loader_of(), 5, max_steps=4)
    assert (trainer.cur_step, trainer.cur_epoch) == (4, 2)
    trainer.fit(loader_of(), 3)
    assert (trainer.cur_step, trainer.cur_epoch) == (7, 3)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def logged() -> tuple[logging.Logger, list[str]]:
    logger, handler = logging.Logger("told"), Lines()
    logger.addHandler(handler)
    return logger, handler.lines


def test_metrics_of_an_epoch_are_logged() -> None:
    engine, (logger, lines) = engine_of(), logged()
    engine.model.module[2].p = 0.0
    scheduler = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.5)
    accuracy, losses = hooks.AccuracyHook(accuracy_func=Accuracy()), hooks.LossHook()
    each = [
        *(hooks.LogMetricByEpochHook(logger), losses, hooks.LRSchedulerHook(scheduler, by_epoch=True)),
        *(accuracy, hooks.LogMemoryByEpochHook(logger), hooks.ThroughputHook()),
    ]
    Trainer(engine, logger=logger).fit(loader_of(), 1, test_dataloader=loader_of(7), hooks=each)
    with torch.no_grad():
        data, label = data_of().tensors
        right = (engine(data).argmax(1) == label).double().mean().item()
        losses_by_batch = [engine.criterion(engine(x), y).item() for x, y in loader_of(7)]
    assert accuracy.accuracy.value() == pytest.approx(right)
    assert losses.test_loss.value() == pytest.approx(sum(losses_by_batch) / len(losses_by_batch))
    kinds = [line.partition(":")[0] for line in lines]
    assert kinds == ["[Epoch 1 / Train]"] * 2 + ["[Epoch 1 / Test]"] * 2
    assert [name in lines[0] for name in ("Loss = ", "LR = 0.005", "samples/s")] == [True] * 3
    assert f"Accuracy = {right:.5g}" in lines[2]
    assert "resident" in lines[1]


def test_a_scheduler_is_stepped_by_iterations_too() -> None:
    engine = engine_of()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.5)
    Trainer(engine).fit(loader_of(), 1, hooks=[hooks.LRSchedulerHook(scheduler, by_epoch=False)])
    assert scheduler.get_last_lr() == [1e-2 / 8]


def test_progress_and_metrics_of_steps_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    Trainer(engine_of()).fit(
        loader_of(), 2, hooks=[hooks.LossHook(), hooks.LogMetricByStepHook()], display_progress=True
    )
    shown = capsys.readouterr().out
    assert "[Train] epoch 2 of 2" in shown
    assert "3/3" in shown
    assert "Loss = " in shown


def test_timers_of_a_run_are_logged() -> None:
    timer, (logger, lines) = MultiTimer(), logged()
    trainer = Trainer(engine_of(), timer, logger)
    trainer.fit(loader_of(), 2, test_dataloader=loader_of(), hooks=[hooks.LogTimingByEpochHook()])
    assert len(timer.get_timer("Train-step").history) == len(timer.get_timer("Test-step").history) == 6
    assert len(timer.get_timer("Train-epoch").history) == 2
    assert [line.count(" = ") for line in lines] == [2, 2, 2, 2]
    with pytest.raises(ConfigError, match="MultiTimer"):
        Trainer(engine_of()).fit(loader_of(), 1, hooks=[hooks.LogTimingByEpochHook()])


def test_checkpoints_are_saved_by_epoch_and_by_step(tmp_path: Path) -> None:
    engine = engine_of()
    file = tmp_path / "last.pt"
    each = [
        hooks.SaveCheckpointHook(interval=2, checkpoint_dir=tmp_path / "epochs"),
        hooks.SaveCheckpointHook(1, file, engine.model.module),
        hooks.SaveCheckpointHook(4, tmp_path / "run-1.5", save_by_iter=True),
    ]
    Trainer(engine).fit(loader_of(), 4, hooks=each)
    assert sorted(path.name for path in (tmp_path / "epochs").iterdir()) == ["epoch_2.pt", "epoch_4.pt"]
    assert sorted(path.name for path in (tmp_path / "run-1.5").iterdir()) == [
        *("step_12.pt", "step_4.pt", "step_8.pt")
    ]
    other = engine_of()
    assert load_checkpoint(tmp_path / "epochs" / "epoch_4.pt", other.model, other.optimizer) == 4
    assert load_checkpoint(file, engine_of().model) == 4
    for want, got in zip(engine.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(want, got)


def test_iterations_are_profiled(tmp_path: Path) -> None:
    Trainer(engine_of()).fit(loader_of(4), 1, hooks=[hooks.ProfilerHook(str(tmp_path), active=2)])
    (trace,) = tmp_path.glob("rank_0*.json")
    assert "aten::linear" in trace.read_text()


def test_a_batch_without_labels_is_predicted() -> None:
    engine = engine_of()
    data, _ = data_of().tensors
    found = Trainer(engine).predict(data)
    assert not found.requires_grad
    assert torch.equal(found, engine.model(data))


def test_the_test_hooks_of_a_fit_are_used_to_evaluate() -> None:
    trainer, losses = Trainer(engine_of()), hooks.LossHook()
    trainer.evaluate(loader_of(), hooks=[losses])
    first = losses.test_loss.value()
    assert first is not None
    trainer.evaluate(loader_of())
    assert losses.test_loss.value() == first


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"epochs": 0}, "epochs"),
        ({"max_steps": 0}, "max_steps"),
        ({"test_interval": 0}, "test_interval"),
        ({"hooks": [hooks.LossHook]}, "BaseHook"),
        ({"hooks": hooks.LossHook()}, "hooks is a LossHook; give a list"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Trainer(engine_of()).fit(loader_of(), **{"epochs": 1, **options})


def test_accuracy_needs_outputs() -> None:
    trainer = Trainer(engine_of())
    with pytest.raises(ConfigError, match="return_output_label=True"):
        trainer.fit(
            loader_of(),
            1,
            test_dataloader=loader_of(),
            hooks=[hooks.AccuracyHook(Accuracy())],
            return_output_label=False,
        )


@pytest.mark.parametrize(
    "make", [lambda: hooks.SaveCheckpointHook(), lambda: hooks.SaveCheckpointHook(0, "x")]
)
def test_a_save_needs_a_place_and_an_interval(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint_dir|interval"):
        make()


def test_tensorboard_is_asked_for_where_it_is_missing(tmp_path: Path) -> None:
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match="pip install tensorboard"):
            hooks.TensorboardHook(log_dir=str(tmp_path), ranks=[0])
        hooks.TensorboardHook(log_dir=str(tmp_path), ranks=[1])  # writes on no rank of these
        return
    hook = hooks.TensorboardHook(log_dir=str(tmp_path), ranks=[0])
    Trainer(engine_of()).fit(loader_of(), 1, hooks=[hooks.LossHook(), hook])
    assert list((tmp_path / "rank_0").iterdir())


class Writer:
    def __init__(self) -> None:
        self.written: list[tuple[str, int]] = []

    def add_scalar(self, name: str, value: float, number: int) -> None:
        self.written.append((name, number))

    def flush(self) -> None:
        self.written.append(("flush", 0))


def test_metrics_of_steps_and_epochs_go_to_tensorboard() -> None:
    hook = hooks.TensorboardHook(log_dir="unused", ranks=[])
    hook._writer = writer = Writer()
    Trainer(engine_of()).fit(loader_of(), 1, test_dataloader=loader_of(), hooks=[hooks.LossHook(), hook])
    steps = [("Loss/Train-step", number) for number in (1, 2, 3)]
    assert writer.written == [*steps, ("Loss/Train", 1), ("Loss/Test", 1), ("flush", 0)]


def calls_of(run: Callable[[], object]) -> int:
    """Return how many Python functions ``run`` calls."""
    count = 0

    def see(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def test_engine_and_trainer_add_few_calls_to_a_step() -> None:
    model, criterion = nn.Linear(6, 2), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = initialize(model, optimizer, criterion, config={})
    trainer, batches = Trainer(engine), list(loader_of(1))

    def plain() -> None:
        for data, label in batches:
            optimizer.zero_grad()
            criterion(model(data), label).backward()
            optimizer.step()

    def by_engine() -> None:
        for data, label in batches:
            engine.zero_grad()
            engine.backward(engine.criterion(engine(data), label))
            engine.step()

    def by_trainer() -> None:
        trainer.fit(batches, trainer.cur_epoch + 1, hooks=[hooks.LossHook(), hooks.ThroughputHook()])

    for run in (plain, by_engine, by_trainer):
        run()
    base, with_engine, with_trainer = (calls_of(run) / len(batches) for run in (plain, by_engine, by_trainer))
    assert with_engine - base <= 25  # some 20 microseconds
    assert with_trainer - base <= 100


# -- metrics and timers ----------------------------------------------------------------------------


def test_mixtures_count_by_the_share_of_the_class() -> None:
    scores = torch.tensor([[3.0, 1.0, 0.0], [0.0, 2.0, 1.0]])
    plain, mixed = torch.tensor([0, 2]), MixupAccuracy()
    assert mixed(scores, plain) == Accuracy()(scores, plain) == 1
    shares = torch.tensor([[0.25, 0.75, 0.0], [0.0, 0.5, 0.5]])
    assert mixed(scores, shares) == 0.75
    both = {"targets_a": plain, "targets_b": torch.tensor([1, 1]), "lam": 0.75}
    assert mixed(scores, both) == 0.75 + 0.25
    assert mixed(scores, {"targets_a": plain}) == 1
    with pytest.raises(ConfigError, match=r"\(2, 3\)"):
        Accuracy()(scores, shares)


def test_a_metric_without_steps_has_no_value() -> None:
    for metric in (LossMetric(), AccuracyMetric(Accuracy())):
        assert metric.value() is None
        assert metric.last_text() == "none"
    labels = AccuracyMetric(Accuracy())
    labels.update(torch.zeros(2, 3, 4), torch.tensor([[0, 0, 1], [1, 1, 1]]))  # tokens
    assert labels.value() == labels.last_value() == pytest.approx(2 / 6)


def test_throughput_counts_samples_between_the_first_step_and_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    metric, tflops = ThroughputMetric(ignored_steps=1), ThroughputMetric(1, tflop_per_step=6.0)
    for _ in range(3):
        for each in (metric, tflops):
            each.begin()
        now[0] += 2.0
        for each in (metric, tflops):
            each.update(8)
    assert metric.last_value() == 4.0
    assert metric.value() == 4.0
    assert tflops.text() == "3 TFLOPS"
    now[0] += 50.0
    assert metric.value() == 4.0


def test_a_timer_adds_up_and_keeps_what_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    timer = MultiTimer()
    for keeps in (True, False, True):
        timer.start("a")
        now[0] += 2.0
        assert timer.stop("a", keeps) == 2.0
    one = timer.get_timer("a")
    assert (one.get_elapsed_time(), one.get_history_mean(), one.get_history_sum()) == (6.0, 2.0, 4.0)
    assert dict(timer) == {"a": one}
    timer.reset()
    assert (one.get_elapsed_time(), one.has_history, one.get_history_mean()) == (0.0, False, 0.0)
    for wrong in (lambda: timer.stop("a"), lambda: timer.stop("b"), lambda: timer.get_timer("b")):
        with pytest.raises(StateError, match=r"start|no timer"):
            wrong()
    off = MultiTimer(on=False)
    off.start("a")
    assert off.stop("a") is None
