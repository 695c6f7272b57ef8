"""Under ``mixed_precision="fp16"`` Accelerate and the Trainer scale the loss as a loop of ours does."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from transformers import TrainingArguments

import gemini
from gemini.integrations.accelerate import GeminiAccelerator
from gemini.integrations.transformers import GeminiTrainer

ROWS = torch.rand(1, 6, generator=torch.Generator().manual_seed(1)).expand(8, 6)  # in any order
FP16 = {"mixed_precision": "fp16"}
SCALE = {"initial_scale": 2.0**10, "max_norm": 0.1}


class Output(NamedTuple):
    loss: torch.Tensor


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> Output:
        return Output(self.body(x.half()).float().square().mean() * 1e-5)  # its gradients underflow in fp16


@pytest.fixture
def looped() -> dict[str, torch.Tensor]:
    """Return the weights after a step for each row by the optimizer's own backward()."""
    model = Model()
    handle = gemini.manage(model, **FP16)
    optimizer = gemini.GeminiOptimizer(gemini.HybridAdam(model.parameters(), lr=1e-2), model, **SCALE)
    for row in ROWS:
        optimizer.backward(model(row.reshape(1, 6)).loss)
        optimizer.step()
        optimizer.zero_grad()
    return handle.state_dict()


def test_accelerate_trains_the_weights_of_the_loop(looped: dict[str, torch.Tensor]) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = GeminiAccelerator(cpu=True, gemini=FP16, gemini_optimizer=SCALE)
    model = Model()
    model, optimizer = accelerator.prepare(model, gemini.HybridAdam(model.parameters(), lr=1e-2))
    for row in ROWS:
        accelerator.backward(model(row.reshape(1, 6)).loss)
        optimizer.step()
        optimizer.zero_grad()
    trained = gemini.handle_of(model).state_dict()
    assert not torch.equal(trained["body.0.weight"], Model().state_dict()["body.0.weight"])
    for name, value in looped.items():
        assert torch.equal(trained[name], value), name


def test_the_trainer_trains_the_weights_of_the_loop(
    looped: dict[str, torch.Tensor], tmp_path: object
) -> None:
    args = TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=1,
        num_train_epochs=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        max_grad_norm=0.1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = GeminiTrainer(
        model=Model(),
        args=args,
        train_dataset=[{"x": row} for row in ROWS],
        gemini=FP16,
        gemini_optimizer={"initial_scale": 2.0**10},
    )
    trainer.train()
    for name, value in trainer.handle.state_dict().items():
        assert torch.equal(value, looped[name]), name
