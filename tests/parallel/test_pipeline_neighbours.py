"""What programs do to models beside training them plainly, done to a model in stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipeline_harness import ADAM, CHUNKS, language, loss_of
from processes import run_on_ranks
from tensor_harness import LANGUAGE_PLAN
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gemini import CPUAdam
from gemini.parallel import Booster, HybridParallelPlugin

STYLES = {"1f1b": {}, "zero_bubble": {"num_model_chunks": 2}, "zbv": {}}
TIGHT = {"device_bytes": "250KiB", "host_bytes": "16MiB"}


class Recomputed(nn.Module):
    """Computes its activations again in backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return out


class Idle(nn.Module):
    """Has a weight that nothing uses, and one that some micro-batches do not use."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.unused = nn.Parameter(torch.ones(5))
        self.seldom = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        if self.training and bool(x.detach().sum() > 0):
            out = out + self.seldom(x)
        return out


def recomputed(model: Any) -> None:
    model.blocks = nn.ModuleList(Recomputed(block) for block in model.blocks)


def idle(model: Any) -> None:
    model.blocks = nn.ModuleList(Idle(block) for block in model.blocks)


def frozen_front(model: Any) -> None:
    for module in (model.embedding, *model.blocks[:2]):
        module.requires_grad_(False)


def frozen_behind(model: Any) -> None:
    for module in (*model.blocks[1:], model.head):
        module.requires_grad_(False)


CHANGES: dict[str, Callable[[Any], None]] = {
    "recomputed": recomputed,
    "idle": idle,
    "frozen front": frozen_front,
    "frozen behind": frozen_behind,
}


def changed(change: str) -> nn.Module:
    model = language(tied=not change.startswith("frozen"))
    torch.manual_seed(2)
    CHANGES[change](model)
    return model


def batch_of(step: int) -> Tensor:
    """Sequences of other lengths, and another number of them, in every step."""
    shape = (8 if step % 2 else 16, 5 + step % 3)
    return torch.randint(37, shape, generator=torch.Generator().manual_seed(step))


def micro_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return sum((loss_of(model(part), part) for part in ids.chunk(4)), torch.zeros(())) / 4


def train(change: str) -> tuple[list[float], dict[str, Tensor]]:
    model = changed(change)
    optimizer = CPUAdam([p for p in model.parameters() if p.requires_grad], **ADAM)
    losses = []
    for step in range(5):
        loss = micro_loss(model, batch_of(step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


def _train(change: str, style: str, options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    plugin = HybridParallelPlugin(
        pp_size=2,
        pp_style=style,
        num_microbatches=4,
        max_norm=0.5,
        tp_plan=LANGUAGE_PLAN,
        split="layers",
        **STYLES[style],
        **CHUNKS,
        **options,
    )
    booster, model = Booster(plugin=plugin), changed(change)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trained[:3]}, {"params": trained[3:]}]
    model, optimizer, *_ = booster.boost(model, CPUAdam(groups, **ADAM))
    losses = []
    for step in range(5):
        out = booster.execute_pipeline(iter([batch_of(step)]), model, loss_of, optimizer)
        optimizer.step()
        losses.append(float(out["loss"]))
    return losses, {name: value.detach().clone() for name, value in model.state_dict(keep_vars=True).items()}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("change", CHANGES)
def test_changed_models_train_as_in_one_process(change: str, style: str) -> None:
    losses, weights = train(change)
    options = {**TIGHT, "activation_offload": True}
    for got, state in run_on_ranks(_train, 2, change, style, options):
        assert got == pytest.approx(losses, rel=1e-5)
        for name, value in state.items():
            assert torch.allclose(value, weights[name], atol=2e-5), name
