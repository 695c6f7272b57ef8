"""Engine and trainer on several processes: stages of a pipeline, and metrics over all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import run_on_ranks
from torch import nn
from torch.utils.data import TensorDataset

from gemini import ConfigError, HybridAdam
from gemini.parallel.engine import (
    AMP_TYPE,
    InterleavedPipelineSchedule,
    PipelineSchedule,
    get_dataloader,
    initialize,
    load_checkpoint,
    save_checkpoint,
)
from gemini.parallel.launch import global_context, launch_from_torch, shutdown
from gemini.parallel.trainer import Accuracy, Trainer, hooks


class Blocks(nn.Module):
    """A model of blocks; it takes its input by the name ``x`` too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Named(TensorDataset):
    """Gives data as keywords."""

    def __getitem__(self, index: int) -> Any:
        x, label = super().__getitem__(index)
        return {"x": x}, label


def run(config: dict[str, Any], named: bool = False) -> tuple[list[Any], float, float]:
    """Train and test over the launched ranks; return what steps returned, test loss and accuracy."""
    launch_from_torch(config)
    model = Blocks()
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    data = (Named if named else TensorDataset)(x, x[:, :4].argmax(1))
    loader = get_dataloader(data, batch_size=8 // global_context.data_parallel_size, drop_last=True)
    optimizer = HybridAdam(model.parameters(), lr=1e-2)
    engine, loader, _, _ = initialize(model, optimizer, nn.CrossEntropyLoss(), loader)
    kinds = {1: PipelineSchedule, 2: InterleavedPipelineSchedule}
    if global_context.pipeline_parallel_size > 1:
        assert type(engine.schedule) is kinds[config.get("NUM_CHUNKS") or 1]
    losses: list[Any] = []

    class Steps(hooks.BaseHook):
        def after_train_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
            if output is not None:
                assert len(output) == len(label)
            losses.append((float(loss), output is not None))

    accuracy, loss = hooks.AccuracyHook(Accuracy()), hooks.LossHook()
    pace = hooks.ThroughputHook()
    Trainer(engine).fit(loader, 1, test_dataloader=loader, hooks=[Steps(), accuracy, loss, pace])
    found = loss.test_loss.value(), accuracy.accuracy.value()
    if global_context.pipeline_parallel_size > 1:
        for saved in (engine.model, nn.Linear(2, 2)):  # the latter may be a stage that a program keeps
            with pytest.raises(ConfigError, match=r"engine\.booster\.save_model"):
                save_checkpoint("none.pt", 1, saved)
            with pytest.raises(
                ConfigError, match=r"load_checkpoint handles one file .* other ranks have stages"
            ):
                load_checkpoint("none.pt", saved)
    assert pace.train_pace.value() > 0
    shutdown()
    return losses, *found


FEATURES = {"gradient_accumulation": 2, "clip_grad_norm": 0.05}
STAGES = {"parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 4, "TENSOR_SHAPE": (2, 8)}


@pytest.mark.parametrize("chunks", [None, 2])
def test_stages_have_the_numbers_of_one_process(chunks: int | None) -> None:
    ((want, loss, right),) = run_on_ranks(run, 1, FEATURES)
    first, last = run_on_ranks(run, 2, {**FEATURES, **STAGES, "NUM_CHUNKS": chunks}, True)
    for losses, tested, accuracy in (first, last):
        assert [value for value, _ in losses] == pytest.approx([value for value, _ in want], rel=1e-4)
        assert tested == pytest.approx(loss, rel=1e-4)
        assert accuracy == right
    assert [has for _, has in first[0]] == [False] * 8
    assert [has for _, has in last[0]] == [True] * 8


def test_metrics_are_over_all_ranks() -> None:
    ((want, loss, right),) = run_on_ranks(run, 1, FEATURES)
    first, second = run_on_ranks(run, 2, FEATURES)
    assert first[1:] == second[1:] == pytest.approx((loss, right), rel=1e-4)
    means = [(one + other) / 2 for (one, _), (other, _) in zip(first[0], second[0], strict=True)]
    assert means != pytest.approx([value for value, _ in first[0]], rel=1e-4)
    assert len(means) == len(want)


def refuse(config: dict[str, Any]) -> str:
    launch_from_torch(config)
    model = Blocks()
    try:
        with pytest.raises(ConfigError) as refused:
            initialize(model, HybridAdam(model.parameters()), nn.CrossEntropyLoss())
    finally:
        shutdown()
    return str(refused.value)


def test_what_does_not_go_with_stages_is_refused() -> None:
    handlers = {"gradient_handler": [{"type": "DataParallelGradientHandler"}]}
    for text in run_on_ranks(refuse, 2, {"parallel": {"pipeline": 2}, **handlers}):
        assert "gradient handlers" in text
    autocast = {"fp16": {"mode": AMP_TYPE.TORCH}}
    for text in run_on_ranks(refuse, 2, {"parallel": {"pipeline": 2}, **autocast}):
        assert "2 stages does not work with autocast" in text
        assert "mode=AMP_TYPE.NAIVE" in text
    for text in run_on_ranks(refuse, 2, {"parallel": {"tensor": {"size": 2, "mode": "sequence"}}}):
        assert "HybridParallelPlugin(sp_size=...)" in text
